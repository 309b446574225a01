package clone

import (
	"encoding/binary"
	"hash/maphash"

	"golang.org/x/sys/unix"
)

// Names say of what entries the copies are: for each name in a directory of the copy, the inode of the source that it was made
// of, both as fingerprints. Beyond maxNames none is known: then directories that changed are copied whole.
type Names struct {
	seed maphash.Seed
	all  map[uint64]uint64
}

// maxNames takes some 5 MiB, and a pass has the names of the one before as well.
const maxNames = 1 << 17

// NewNames has none yet.
func NewNames() Names { return Names{maphash.MakeSeed(), make(map[uint64]uint64)} }

func (n *Names) print(number uint64, name string) uint64 {
	var h maphash.Hash
	h.SetSeed(n.seed)
	var bytes [8]byte
	binary.NativeEndian.PutUint64(bytes[:], number)
	_, _ = h.Write(bytes[:]) // never fails
	_, _ = h.WriteString(name)
	return h.Sum64()
}

// inode is a fingerprint of an entry of the source. Subvolumes have inodes of the same numbers.
func (n *Names) inode(st *unix.Stat_t) uint64 {
	return maphash.Comparable(n.seed, [2]uint64{st.Dev, st.Ino})
}

// Complete says that the names are known. Those of an unset Names are not.
func (n *Names) Complete() bool { return n.all != nil }

// Add notes that the name in a directory of the copy, which is known by its inode, is a copy of an entry.
func (n *Names) Add(in uint64, name string, of *unix.Stat_t) {
	switch {
	case !n.Complete():
	case len(n.all) == maxNames:
		n.all = nil
	default:
		n.all[n.print(in, name)] = n.inode(of)
	}
}

// Has says that the name was last noted as a copy of that entry.
func (n *Names) Has(in uint64, name string, of *unix.Stat_t) bool {
	if !n.Complete() {
		return false
	}
	inode, known := n.all[n.print(in, name)]
	return known && inode == n.inode(of)
}
