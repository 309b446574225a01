package volumes

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// manyVolumes makes ten thousand volumes. With -short there are fewer, which still make several
// pages of a list, and fewer again on an emulated processor.
func manyVolumes(h *harness) {
	count := 10000
	switch {
	case testing.Short() && testenv.Guest():
		count = 100
	case testing.Short():
		count = 1200
	}
	before := h.MustCapacity("local")
	promise := before * 3 / 4 / int64(count) / (64 << 10) * (64 << 10)
	var names []string
	for i := range count {
		names = append(names, fmt.Sprintf("pvc-%05d", i))
	}
	watch := time.Now()
	lap := func() time.Duration {
		took := time.Since(watch).Round(time.Millisecond)
		watch = time.Now()
		return took
	}

	h.Together(names, func(name string) error { return h.CreateEnforced(volume(name, promise)) })
	made := lap()
	h.Must(h.Process.Kill())
	lap()
	h.Must(h.Process.Restart(h.Context()))
	h.AwaitServing()
	started := lap()

	h.wantListed(names)
	h.wantOwnLimits(names, promise)
	h.wantCapacity(before-promise*int64(count), count)
	lap()
	h.removeAll()
	fmt.Printf("%s: %d volumes of %d KiB: made in %v, ready %v after SIGKILL, deleted in %v\n",
		h.fs.kind, count, promise>>10, made, started, lap())
	h.wantCapacity(before, 0)
	// Ids are given again.
	h.create("pvc-again", promise)
}

func (h *harness) wantListed(want []string) {
	h.Helper()
	var got []string
	entries, err := h.List(h.Context(), 999)
	h.Must(err)
	for _, entry := range entries {
		got = append(got, entry.GetVolume().GetVolumeId())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		h.Errorf("%d volumes are listed, want the %d that were made", len(got), len(want))
	}
}

// wantOwnLimits expects each volume to have the limit, and an id of its own.
func (h *harness) wantOwnLimits(names []string, promise int64) {
	h.Helper()
	has := make(map[quota.ID]string)
	for _, name := range names {
		id := h.idOf(name)
		if other, taken := has[id]; taken {
			h.Fatalf("%s and %s have the same id, %d", name, other, id)
		}
		has[id], h.ids[name] = name, id
		h.wantLimit(name, promise)
	}
}

// wantCapacity allows for the steps in which it is reported, and for what driver and
// filesystem keep of each volume: a record, two inodes, and their names.
func (h *harness) wantCapacity(want int64, volumes int) {
	h.Helper()
	space, err := dir.SpaceOf(h.root)
	h.Must(err)
	step := space.SizeBytes / 500
	less, more := step+int64(volumes)*(8<<10), step
	// What is reported leaves room for the extents of a block volume, which directories do not take.
	per, err := quota.DataPerByte(h.root)
	h.Must(err)
	if per > 0 {
		more += space.SizeBytes / per
	}
	if h.fs.kind == quota.Btrfs {
		// The root of a subvolume counts as its use, and is not taken from what is
		// free for data.
		more += int64(volumes) * h.fs.block
		// What has been allocated for trees stays so.
		less += space.SizeBytes / 64
	}
	if got := h.MustCapacity("local"); got > want+more || got < want-less {
		h.Errorf("the capacity is %d, want %d, up to %d less or %d more; it is %d more", got, want, less, more, got-want)
	}
}
