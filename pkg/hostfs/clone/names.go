package clone

import (
	"encoding/binary"
	"hash/maphash"
)

// rootNames are what the names in the root of a source led to, as fingerprints of name and inode. There are few, as a rule.
// Of more than maxNames none counts as known, so that they are copied again if the root changes.
type rootNames struct {
	seed maphash.Seed
	all  map[uint64]struct{}
}

const maxNames = 1 << 16

func newRootNames() rootNames {
	return rootNames{maphash.MakeSeed(), make(map[uint64]struct{})}
}

func (r *rootNames) print(name string, inode uint64) uint64 {
	var h maphash.Hash
	h.SetSeed(r.seed)
	var number [8]byte
	binary.NativeEndian.PutUint64(number[:], inode)
	_, _ = h.Write(number[:]) // never fails
	_, _ = h.WriteString(name)
	return h.Sum64()
}

func (r *rootNames) add(name string, inode uint64) {
	switch {
	case r.all == nil:
	case len(r.all) == maxNames:
		r.all = nil
	default:
		r.all[r.print(name, inode)] = struct{}{}
	}
}

func (r *rootNames) has(name string, inode uint64) bool {
	_, known := r.all[r.print(name, inode)]
	return known
}
