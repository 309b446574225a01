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
func manyVolumes(b *bench) {
	count := 10000
	switch {
	case testing.Short() && testenv.Guest():
		count = 100
	case testing.Short():
		count = 1200
	}
	before := b.capacity()
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

	b.Together(names, func(name string) error { return b.tryCreate(name, promise) })
	made := lap()
	b.Must(b.Process.Kill())
	lap()
	b.Must(b.Process.Restart(b.Context()))
	b.AwaitServing()
	started := lap()

	b.wantListed(names)
	b.wantOwnLimits(names, promise)
	b.wantCapacity(before-promise*int64(count), count)
	lap()
	b.removeAll()
	fmt.Printf("%s: %d volumes of %d KiB: made in %v, ready %v after SIGKILL, deleted in %v\n",
		b.fs.kind, count, promise>>10, made, started, lap())
	b.wantCapacity(before, 0)
	// Ids are given again.
	b.create("pvc-again", promise)
}

func (b *bench) wantListed(want []string) {
	b.Helper()
	var got []string
	entries, err := b.List(b.Context(), 999)
	b.Must(err)
	for _, entry := range entries {
		got = append(got, entry.GetVolume().GetVolumeId())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		b.Errorf("%d volumes are listed, want the %d that were made", len(got), len(want))
	}
}

// wantOwnLimits expects each volume to have the limit, and an id of its own.
func (b *bench) wantOwnLimits(names []string, promise int64) {
	b.Helper()
	has := make(map[quota.ID]string)
	for _, name := range names {
		id := b.idOf(name)
		if other, taken := has[id]; taken {
			b.Fatalf("%s and %s have the same id, %d", name, other, id)
		}
		has[id], b.ids[name] = name, id
		b.wantLimit(name, promise)
	}
}

// wantCapacity allows for the steps in which it is reported, and for what driver and
// filesystem keep of each volume: a record, two inodes, and their names.
func (b *bench) wantCapacity(want int64, volumes int) {
	b.Helper()
	space, err := dir.SpaceOf(b.root)
	b.Must(err)
	step := space.SizeBytes / 500
	less, more := step+int64(volumes)*(8<<10), step
	if b.fs.kind == quota.Btrfs {
		// The root of a subvolume counts as its use, and is not taken from what is
		// free for data.
		more += int64(volumes) * b.fs.block
		// What has been allocated for trees stays so.
		less += space.SizeBytes / 64
	}
	if got := b.capacity(); got > want+more || got < want-less {
		b.Errorf("the capacity is %d, want %d, up to %d less or %d more; it is %d more", got, want, less, more, got-want)
	}
}
