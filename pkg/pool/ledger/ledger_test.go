package ledger

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const g = 1 << 30

// disk100 is a filesystem of 100 GiB of which so much is taken.
func disk100(taken int64) dir.Space {
	return dir.Space{SizeBytes: 100 * g, FreeBytes: (100 - taken) * g, UsedBytes: taken * g, BlockBytes: 4096}
}

// base are the accounts of one pool, with what others are known to occupy.
func base(foreign int64, owed sums) *accounts {
	return &accounts{of: []account{{sums: owed}}, base: foreign}
}

func TestAvailable(t *testing.T) {
	tenth, err := volume.ParseReserve("10%")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		pools  *accounts
		space  dir.Space
		policy Policy
		want   int64 // GiB
	}{
		"an empty disk is free":                       {base(0, sums{}), disk100(0), Policy{}, 100},
		"promises count in full":                      {base(0, sums{promised: 30 * g}), disk100(0), Policy{}, 70},
		"what volumes hold is inside their promise":   {base(0, sums{promised: 30 * g}), disk100(30), Policy{}, 70},
		"foreign use at the start is subtracted":      {base(20*g, sums{promised: 30 * g}), disk100(20), Policy{}, 50},
		"and is not volumes' use":                     {base(20*g, sums{promised: 30 * g}), disk100(50), Policy{}, 50},
		"use beyond all promises is foreign":          {base(0, sums{promised: 30 * g}), disk100(60), Policy{}, 40},
		"what is taken bounds foreign use":            {base(90*g, sums{}), disk100(10), Policy{}, 90},
		"trash is not sold again":                     {base(0, sums{promised: 50 * g, trashed: 50 * g}), disk100(50), Policy{}, 0},
		"trash of unknown size counts all as foreign": {base(0, sums{promised: 30 * g, unknown: 1}), disk100(30), Policy{}, 40},
		"nothing below zero":                          {base(0, sums{promised: 150 * g}), disk100(0), Policy{}, 0},
		"a reserve stays free":                        {base(0, sums{promised: 30 * g}), disk100(0), Policy{Reserve: tenth}, 60},
		"promises may exceed the disk":                {base(0, sums{promised: 150 * g}), disk100(0), Policy{Overprovision: 2}, 50},
		"but one volume not what is free":             {base(0, sums{}), disk100(40), Policy{Overprovision: 3}, 60},
		"a file server may report all that it can":    {base(0, sums{}), dir.Space{SizeBytes: (8<<30 - 1) * g, FreeBytes: (8<<30 - 1) * g}, Policy{Overprovision: 2}, 8<<30 - 1},
		"one that takes no file more has nothing":     {base(0, sums{}), dir.Space{SizeBytes: g, FreeBytes: g, Inodes: 512}, Policy{}, 0},
		"inodes that are not counted are ignored":     {base(0, sums{}), dir.Space{SizeBytes: g, FreeBytes: g}, Policy{}, 1},
		"a read-only disk has nothing":                {base(0, sums{}), dir.Space{SizeBytes: g, FreeBytes: g, ReadOnly: true}, Policy{}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if c.policy.Overprovision == 0 {
				c.policy.Overprovision = 1
			}
			if got := c.pools.available(c.space, c.policy); got != c.want*g {
				t.Errorf("available %.1f GiB, want %d", float64(got)/g, c.want)
			}
		})
	}
}

func TestInodes(t *testing.T) {
	xfs := NewInfo(g, "uid", 1, HasDirectory|HasRecord|ByXFS)
	block := NewInfo(g, "uid", 1, HasDirectory|HasRecord|ByXFS|IsBlock).WithInodes(16 << 10)
	ext4 := NewInfo(g, "uid", 1, HasDirectory|HasRecord|ByExt4)
	for name, c := range map[string]struct {
		info           Info
		option         int64
		inodes, beside int64
	}{
		"recorded":                {xfs.WithInodes(16 << 10), volume.Unknown, 65537, 65537 * (UsualInode + perInode)},
		"not recorded":            {xfs, volume.Unknown, 0, 0},
		"the option comes first":  {xfs.WithInodes(16 << 10), 1 << 20, 1025, 1025 * (UsualInode + perInode)},
		"the option is no limit":  {xfs.WithInodes(16 << 10), 0, 0, 0},
		"not recorded, an option": {xfs, 1 << 20, 1025, 1025 * (UsualInode + perInode)},
		"a block volume":          {block, 1 << 20, 0, 0},
		"ext4":                    {ext4, 1 << 20, 1025, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l := New(Policy{BytesPerInode: c.option})
			if got := c.info.Inodes(c.option); got != c.inodes {
				t.Errorf("%d inodes, want %d", got, c.inodes)
			}
			l.Note(idOf("pvc-1"), c.info)
			if got := l.Summary(); got.Promised != g || got.Overhead != c.beside || l.Owed(c.info) != g+c.beside || l.on.load().owed().promised != g+c.beside {
				t.Errorf("%d bytes are promised and %d set aside for inodes, want %d", got.Promised, got.Overhead, c.beside)
			}
			if got, want := l.InodesHold(c.info, 1000), min(1000*UsualInode, c.beside); got != want || l.InodesHold(c.info, volume.Unknown) != 0 {
				t.Errorf("1000 inodes hold %d bytes of that, want %d", got, want)
			}
			l.Note(idOf("pvc-1"), Info{})
			if l.sums.promised != 0 || l.index.overhead != 0 {
				t.Errorf("%d bytes are promised of no volume", l.sums.promised)
			}
		})
	}
}

// What is reported can be asked for.
func TestReportedCapacityHasRoomForOverhead(t *testing.T) {
	for _, per := range []int64{0, 512, 16 << 10, 1 << 20} {
		for _, data := range []int64{0, 28, 113} {
			l := New(Policy{Overprovision: 1, BytesPerInode: volume.Unknown})
			l.SetCosts(per, Costs{InodeBytes: UsualInode, DataPerByte: data})
			bytes := l.Available(disk100(0))
			directory := NewInfo(bytes, "uid", 1, HasDirectory|HasRecord|ByXFS).WithInodes(per)
			disk := NewInfo(bytes, "uid", 1, HasDirectory|HasRecord|IsBlock)
			for _, c := range []Info{directory, disk} {
				held, err := l.Reserve(disk100(0), l.Owed(c))
				if err != nil {
					t.Fatalf("one inode for each %d bytes, one byte for each %d of block volumes, %s: %v", per, data, c.Mode(), err)
				}
				held.Release()
			}
			if per == 16<<10 && data != 28 && bytes < 96*g {
				t.Errorf("%d bytes are available of 100 GiB, want at least 96 GiB", bytes)
			}
		}
	}
}

// A block volume of any kind, and its snapshot, owe the tree of their extents where that is in no promise.
func TestBlockVolumeOwesItsExtents(t *testing.T) {
	l := New(Policy{})
	l.SetCosts(0, Costs{InodeBytes: UsualInode, DataPerByte: 128})
	for name, c := range map[string]struct {
		flags Flags
		want  int64
	}{
		"a disk":                       {IsBlock, g + g/128 + 1<<20},
		"one with a limit that shares": {IsBlock | ByXFS | Shares, g + g/128 + 1<<20},
		"a snapshot of one":            {IsBlock | IsSnapshot, g + g/128 + 1<<20},
		"a directory":                  {0, g},
		"a snapshot of a directory":    {IsSnapshot | ByXFS | Shares, g},
	} {
		t.Run(name, func(t *testing.T) {
			info := NewInfo(g, "uid", 1, HasDirectory|HasRecord|c.flags)
			if got := l.Owed(info); got != c.want {
				t.Errorf("%d bytes are owed, want %d", got, c.want)
			}
			l.Note(idOf("pvc-1"), info)
			if got := l.Summary(); got.Promised != g || got.Overhead != c.want-g {
				t.Errorf("%d bytes are promised and %d set aside", got.Promised, got.Overhead)
			}
		})
	}
}
