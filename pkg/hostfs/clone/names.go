package clone

import (
	"encoding/binary"
	"hash/maphash"

	"golang.org/x/sys/unix"
)

// Names say of what entries the copies are: for each name in a directory of the copy, the inode of the source that it was made
// of, both as fingerprints. Of a tree with more than are remembered they know some, and tell of the others that they do not.
type Names struct {
	seed maphash.Seed
	all  map[uint64]uint64
	most int
	some bool // others were left out
}

// maxNames takes some 5 MiB, and a pass has the names of the one before as well.
const maxNames = 1 << 17

// NewNames has none yet.
func NewNames() Names { return newNames(maxNames) }

func newNames(most int) Names {
	return Names{seed: maphash.MakeSeed(), all: make(map[uint64]uint64), most: most}
}

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

// Add notes that the name in a directory of the copy, which is known by its inode, is a copy of an entry. A quarter of what is
// remembered is for directories alone: one that is not known is copied with all that is below.
func (n *Names) Add(in uint64, name string, of *unix.Stat_t) {
	if n.all == nil {
		return
	}
	room := n.most
	if of.Mode&unix.S_IFMT != unix.S_IFDIR {
		room -= room / 4
	}
	key := n.print(in, name)
	if _, known := n.all[key]; !known && len(n.all) >= room {
		n.some = true
		return
	}
	n.all[key] = n.inode(of)
}

// LeaveOut notes that there are names of which it is not known what they are copies of.
func (n *Names) LeaveOut() { n.some = true }

// Has says that the name was last noted as a copy of that entry. Of a name that may have been left out it says what the caller
// concludes without that. Those of an unset Names all are.
func (n *Names) Has(in uint64, name string, of *unix.Stat_t, unnoted bool) bool {
	if n.all == nil {
		return unnoted
	}
	inode, known := n.all[n.print(in, name)]
	if !known {
		return n.some && unnoted
	}
	return inode == n.inode(of)
}
