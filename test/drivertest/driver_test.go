package drivertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// twoPools are one on a filesystem of its own, and another pool.
func twoPools(t *testing.T) Config {
	t.Helper()
	program, err := Binary(t.Context(), t.TempDir())
	must.Succeed(t, err)
	return Config{Binary: program, Pools: []PoolConfig{
		{Name: "first", Path: testenv.LoopFS(t, "ext4", 256*mib)},
		{Name: "second", Path: t.TempDir()},
	}}
}

func TestVolumeLifecycle(t *testing.T) {
	testenv.NeedRoot(t)
	config := twoPools(t)
	d := Start(t, config)
	before, err := d.Capacity(t.Context(), "first")
	d.Must(err)
	volumes := map[string]Volume{
		"tree": {ID: "tree", Pool: "first", Bytes: 8 * mib},
		"disk": {ID: "disk", Pool: "first", Bytes: 8 * mib, Block: true},
		"away": {ID: "away", Pool: "second", Bytes: 8 * mib},
	}
	names := []string{"tree", "disk", "away"}
	d.Together(names, func(name string) error { return second(d.Create(t.Context(), volumes[name])) })
	if after, err := d.Capacity(t.Context(), "first"); err != nil || after > before-16*mib {
		t.Errorf("the capacity was %d and is %d, %v", before, after, err)
	}
	d.Together(names, func(name string) error { return d.Publish(t.Context(), volumes[name], name) })
	d.Must(d.PublishReadOnly(t.Context(), volumes["tree"], "reader"))
	d.Must(d.Publish(t.Context(), Volume{ID: "inline", Pool: "second", Bytes: 8 * mib, Inline: true}, "inline"))
	WantErrno(t, "writing to what is published read-only", os.WriteFile(filepath.Join(d.Target("reader"), "file"), nil, 0o600), syscall.EROFS)

	for _, end := range []func(){d.Restart, d.Crash} {
		end()
		entries, err := d.List(t.Context(), 1)
		if err != nil || len(entries) != 4 {
			t.Errorf("listed are %v, %v; want 4 volumes", entries, err)
		}
		stats, err := d.Stats(t.Context(), "disk", "disk")
		if err != nil || stats.GetUsage()[0].GetTotal() != 8*mib {
			t.Errorf("the stats of the disk are %v, %v", stats, err)
		}
	}
	d.WantCode("deleting what is published", d.Delete(t.Context(), "disk"), codes.FailedPrecondition)
	grown := volumes["disk"]
	grown.Bytes = 16 * mib
	d.Must(second(d.Expand(t.Context(), grown, "disk")))
	got, err := d.Get(t.Context(), "disk")
	if err != nil || got.GetVolume().GetCapacityBytes() != grown.Bytes || len(got.GetStatus().GetPublishedNodeIds()) != 1 {
		t.Errorf("the disk is %v, %v", got, err)
	}

	d.Must(d.Unpublish(t.Context(), "tree", "reader"))
	d.Must(d.Unpublish(t.Context(), "inline", "inline"))
	d.Together(names, func(name string) error { return d.Unpublish(t.Context(), name, name) })
	d.Together(names, func(name string) error { return d.Delete(t.Context(), name) })
	for _, p := range config.Pools {
		d.AwaitNoTrash(p.Path)
	}
	if left, err := d.List(t.Context(), 0); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestCleanupAfterTest(t *testing.T) {
	testenv.NeedRoot(t)
	config := twoPools(t)
	var targets string
	t.Run("leaves mounts and devices", func(t *testing.T) {
		d := Start(t, config)
		targets = d.Targets
		for _, v := range []Volume{{ID: "tree", Pool: "first", Bytes: mib}, {ID: "disk", Pool: "first", Bytes: mib, Block: true}} {
			d.Must(second(d.Create(t.Context(), v)))
			d.Must(d.Publish(t.Context(), v, v.ID))
		}
		if mounts, err := mountns.Below(targets); err != nil || len(mounts) != 2 {
			t.Errorf("published are %q, %v", mounts, err)
		}
	})
	mounts, err := mountns.Below(targets)
	devices, e := loopfs.Devices(config.Pools[0].Path)
	if len(mounts)+len(devices) > 0 || errors.Join(err, e) != nil {
		t.Errorf("left are the mounts %q and the devices %q, %v", mounts, devices, errors.Join(err, e))
	}
}

func TestRepeat(t *testing.T) {
	calls := 0
	answer := func(after int, last codes.Code) func() error {
		calls = 0
		return func() error {
			if calls++; calls <= after {
				return status.Error(codes.Aborted, "another call is in progress")
			}
			return status.Error(last, "")
		}
	}
	for _, last := range []codes.Code{codes.OK, codes.NotFound} {
		if got := status.Code(Repeat(t.Context(), answer(2, last))); got != last || calls != 3 {
			t.Errorf("%v after %d calls, want %v after 3", got, calls, last)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if got := status.Code(Repeat(ended, answer(1<<30, codes.OK))); got != codes.Aborted {
		t.Errorf("a call that is always ABORTED ends with %v", got)
	}
}
