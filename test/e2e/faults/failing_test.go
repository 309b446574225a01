package faults

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

// What a disk that fails could not store is not acknowledged, and what was acknowledged
// before is there when the disk is well again.
func TestFailingDisk(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range filesystems() {
		for name, failing := range map[string][]disk.Operation{
			"everything":         {disk.Read, disk.Write, disk.Flush},
			"writes and flushes": {disk.Write, disk.Flush},
			"flushes":            {disk.Flush},
		} {
			if testing.Short() && name != "flushes" {
				continue
			}
			t.Run(fs.kind+", "+name, func(t *testing.T) {
				m, d := newFaultyMount(t, fs)
				w := newWorld(t, driver, m)
				d.Fail(failing...)
				w.wantNothingAcknowledged()
				w.wantAlive("failing")
				// A pod can end whose disk fails.
				w.Must(w.unpublish(tree))
				w.Must(w.unpublish(raw))
				if fs.kind != "ext4" || name != "flushes" { // which ext4 does not always count
					w.Eventually("the failing is noticed", func() bool {
						got, err := w.Get(t.Context(), idle.ID)
						return err == nil && oldcsi.Condition(got.GetStatus()).GetAbnormal()
					})
					w.wantListed("failing", all)
				}
				w.wantToldAsFailing()

				d.Heal()
				w.repair()
				w.wantUnacknowledgedWhole()
				w.end()
			})
		}
	}
}

// wantNothingAcknowledged makes the calls that have to store something. None may succeed
// from the moment that the disk fails, not the first and not one that is repeated.
func (w *world) wantNothingAcknowledged() {
	w.Helper()
	for round := range 2 {
		for _, c := range []struct {
			name string
			make func() error
		}{
			{"create", func() error { return w.create(late) }},
			{"create disk", func() error { return w.create(lateDisk) }},
			{"expand", func() error { return w.expand(tree) }},
			{"expand disk", func() error { return w.expand(raw) }},
			{"delete", func() error { return w.delete(doomed) }},
			{"delete disk", func() error { return w.delete(doomedDisk) }},
			{"snapshot", func() error { return w.snapshot(tried) }},
			{"clone", func() error { return w.clone(idle) }},
		} {
			err := c.make()
			if code := status.Code(err); code == codes.OK || code == codes.Unknown || code == codes.NotFound {
				w.Errorf("the disk fails, %s, round %d: %v, want an error that has it repeated", c.name, round, err)
			}
		}
	}
}

// wantToldAsFailing tries what many try first. It does not help, and has the kernel forget
// what it had read, so that the pool cannot be opened. It is the same pool all the same.
func (w *world) wantToldAsFailing() {
	w.Helper()
	if err := syscall.Mount("", w.mount.at, "", syscall.MS_REMOUNT, ""); err != nil {
		w.Log("mounting it anew: ", err)
	}
	if err := w.delete(doomed); err == nil || strings.Contains(err.Error(), "not the pool that was opened") {
		w.Errorf("delete: %v, want an error that reports the disk", err)
	}
}

// repair is what an administrator does with a filesystem that has stopped: it is unmounted
// and mounted again, and brings itself in order.
func (w *world) repair() {
	w.Helper()
	w.Must(w.mount.unmountAll())
	if w.mount.kind == "ext4" {
		// It counts the errors until it is checked.
		output, err := exec.CommandContext(w.Context(), "e2fsck", "-f", "-y", w.mount.device).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) { // 1: repaired
			w.Fatalf("e2fsck: %v\n%s", err, output)
		}
	}
	w.mount.mount()
	if w.mount.kind == "btrfs" {
		output, err := exec.CommandContext(w.Context(), "btrfs", "device", "stats", "--reset", w.mount.at).CombinedOutput()
		if err != nil {
			w.Fatalf("btrfs device stats --reset: %v\n%s", err, output)
		}
	}
	w.awaitServing(true)
	w.Eventually("all is in order again", func() bool { return w.pool.Lists(w.acknowledged) == nil })
}

// wantUnacknowledgedWhole checks what was asked for while the disk failed: it may be
// there or not, and asked for again it has to be.
func (w *world) wantUnacknowledgedWhole() {
	w.Helper()
	for _, v := range []drivertest.Volume{late, lateDisk} {
		w.Must(w.create(v))
	}
	w.Must(drivertest.Repeat(w.Context(), func() error { return w.snapshot(tried) })) // what failed ones left is erased first
	w.Must(w.DeleteSnapshot(w.Context(), snapshotID(tried)))
	w.Must(w.clone(idle))
	for _, v := range []drivertest.Volume{doomed, doomedDisk} {
		w.Must(w.delete(v))
	}
	for _, v := range []drivertest.Volume{tree, raw} {
		w.Must(w.publish(v))
		w.Must(w.expand(v))
	}
	w.wantWhole("asked again")
}

// A disk that nothing can be read from is that of a pool which does not serve, and serves
// once it is well.
func TestUnreadableDiskAtOpen(t *testing.T) {
	unlessShort(t)
	driver := drivertest.Built(t)
	fs := filesystems()[0]
	m, d := newFaultyMount(t, fs)
	w := newWorld(t, driver, m)
	w.Must(w.unpublish(tree))
	w.Must(w.unpublish(raw))
	w.Must(w.Process.Stop())
	w.Must(m.unmountAll())
	m.mount() // and nothing of it is in memory
	d.Fail(disk.Read)
	w.Must(w.Process.Restart(w.Context()))
	if got := w.capacity(); got != 0 {
		t.Errorf("the capacity is %d bytes", got)
	}
	for _, c := range []struct {
		name string
		err  error
		want codes.Code
	}{
		{"create", w.create(late), codes.ResourceExhausted},
		{"publish", w.publish(idle), codes.Unavailable},
		{"delete", w.delete(doomed), codes.Unavailable},
		{"get", w.get(idle), codes.Unavailable},
	} {
		w.WantCode(fmt.Sprintf("the disk cannot be read, %s", c.name), c.err, c.want)
	}
	w.wantAlive("the disk cannot be read")
	d.Heal()
	w.repair()
	w.end()
}
