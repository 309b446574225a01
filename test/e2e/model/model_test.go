// Package model walks at random over all calls of the pools, with restarts, crashes
// and changes by hand in between, and compares each answer, the disk, the mounts and
// the devices with a model of them. The pools are real directories; mounts, devices and
// quotas are stand-ins that keep their contract, and time is a bubble's own.
//
// A failure is shrunk to the shortest walk that still fails. -rapid.seed repeats it,
// -rapid.checks and -rapid.steps say how many walks there are and how long one is.
package model

import (
	"flag"
	"fmt"
	"math"
	"slices"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) {
	// With -short rapid makes a fifth of the walks, of half the length.
	for name, value := range map[string]string{"rapid.checks": "300", "rapid.steps": "80", "rapid.nofailfile": "true"} {
		if err := flag.Set(name, value); err != nil {
			panic(err)
		}
	}
	testenv.Main(m)
}

func TestRandomCallsMatchModel(t *testing.T) {
	testenv.NeedRoot(t)
	disks := make(map[string]string)
	for _, name := range pools {
		disks[name] = testenv.Tmpfs(t, diskBytes)
	}
	rapid.Check(t, func(rt *rapid.T) {
		var failure any
		synctest.Test(t, func(*testing.T) {
			defer func() { failure = recover() }()
			h := newHarness(rt, disks)
			defer h.end()
			rt.Repeat(h.actions())
		})
		// Again, in the goroutine where rapid waits for it. It identifies failures by where
		// they come from, and this one only says that a shorter walk has no more steps.
		if fmt.Sprintf("%T", failure) == "rapid.invalidData" {
			panic(failure)
		}
		if failure != nil {
			panic(failure)
		}
	})
}

const (
	mib       = 1 << 20
	block     = 4096
	diskBytes = 64 * mib
)

// The pools differ in all that calls depend on: quotas and a reserve, thin files and
// promises beyond the disk, marks of what is published.
const (
	kept   = "legacy" // the one that is meant where none is named
	thin   = "thin"
	shared = "shared"
)

var (
	pools   = []string{kept, thin, shared}
	ids     = []string{"pvc-1", "pvc-2", "pvc-3", "csi-4"}
	targets = []string{"a", "b", "c"}
	// snapshots are the ids of those that can be made.
	snapshots = []string{"~s-1", "~s-2", "~s-3"}
	// entryIDs can have a directory and a record.
	entryIDs = slices.Concat(ids, snapshots)
	sizes    = []int64{0, 1, block, mib, 5*mib + 1, 20 * mib, 50 * mib, 100 * mib, math.MaxInt64}
)

// A modelVolume is what a pool has under an id: that of a volume, or of a snapshot.
type modelVolume struct {
	pool   string
	dir    *directory // nil: lost
	record *record    // nil: none
	torn   bool       // the record cannot be read
}

// A record is a promise that was given.
type record struct {
	bytes        int64
	mode         volume.Mode
	kept, inline bool
	origin       origin
}

// An origin is what a volume or a snapshot was made from; the zero value stands for nothing.
type origin struct {
	id    string
	bytes int64 // which it promised
}

// A directory is what is known by its stamp wherever it is moved.
type directory struct {
	stamp string
	disk  bool // the stamp is in a file that can be a device
}

// A publication is what a target carries.
type publication struct {
	dir      *directory
	device   bool
	readOnly bool
}

// promise is what can be known of a volume from its record.
func (v *modelVolume) promise() record {
	if v.record == nil || v.torn {
		return record{mode: volume.ModeMount}
	}
	return *v.record
}

func (v *modelVolume) promised() bool { return v.record != nil && !v.torn }

// round is a size in whole blocks, as docs/capacity.md has it.
func round(r volume.Range) (int64, error) {
	bytes := r.Required
	if bytes == 0 {
		bytes = 1 << 30
		if r.Limit > 0 && r.Limit < bytes {
			bytes = r.Limit - r.Limit%block
		}
	}
	if bytes == 0 || bytes > math.MaxInt64-block {
		return 0, volume.ErrOutOfRange
	}
	if rest := bytes % block; rest > 0 {
		bytes += block - rest
	}
	if r.Limit > 0 && bytes > r.Limit {
		return 0, volume.ErrOutOfRange
	}
	return bytes, nil
}

// promises are those of a pool.
func (h *harness) promises(in string) (sum int64) {
	for _, v := range h.volumes {
		if v.pool == in && v.promised() {
			sum += v.record.bytes
		}
	}
	return sum
}

// available is what a pool can promise: the formula of docs/capacity.md, without trash.
func (h *harness) available(in string) int64 {
	size, free := h.space(in)
	promised, taken, sellable, reserve := h.promises(in), size-free, size, int64(0)
	switch in {
	case thin:
		sellable = 2 * size
	case kept:
		reserve = size / 10
	}
	foreign := min(taken, max(h.foreign[in], taken-promised))
	return max(0, min(free, sellable-promised-foreign)-reserve)
}

// learn is what a pool notices of what others hold, as time passes.
func (h *harness) learn() {
	for _, in := range pools {
		size, free := h.space(in)
		taken := size - free
		switch {
		case in == kept, in == thin && h.promises(in) == 0: // counted, or nothing can be ours
			h.foreign[in] = taken
		case in == thin:
			h.foreign[in] = min(h.foreign[in], taken)
		}
	}
}

// owner is the volume whose directory it is.
func (h *harness) owner(d *directory) (id string, v *modelVolume) {
	for id, v := range h.volumes {
		if v.dir == d {
			return id, v
		}
	}
	return "", nil
}

// published are the targets of a volume but one.
func (h *harness) published(v *modelVolume, but string) (at []string) {
	for name, p := range h.targets {
		if v.dir != nil && p.dir == v.dir && name != but {
			at = append(at, name)
		}
	}
	return at
}

func (h *harness) publishedAt(v *modelVolume, target string) bool {
	at := h.targets[target]
	return at != nil && v.dir != nil && at.dir == v.dir
}
