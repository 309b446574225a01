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
				h := newHarness(t, driver, m)
				d.Fail(failing...)
				h.wantNothingAcknowledged()
				h.wantAlive("failing")
				// A pod can end whose disk fails.
				h.Must(h.unpublish(tree))
				h.Must(h.unpublish(raw))
				if fs.kind != "ext4" || name != "flushes" { // which ext4 does not always count
					h.Eventually("the failing is noticed", func() bool {
						got, err := h.Get(t.Context(), idle.ID)
						return err == nil && oldcsi.Condition(got.GetStatus()).GetAbnormal()
					})
					h.wantListed("failing", all)
				}
				h.wantToldAsFailing()

				d.Heal()
				h.repair()
				h.wantUnacknowledgedWhole()
				h.end()
			})
		}
	}
}

// wantNothingAcknowledged makes the calls that have to store something. None may succeed
// from the moment that the disk fails, not the first and not one that is repeated.
func (h *harness) wantNothingAcknowledged() {
	h.Helper()
	for round := range 2 {
		for _, c := range []struct {
			name string
			make func() error
		}{
			{"create", func() error { return h.create(late) }},
			{"create disk", func() error { return h.create(lateDisk) }},
			{"expand", func() error { return h.expand(tree) }},
			{"expand disk", func() error { return h.expand(raw) }},
			{"delete", func() error { return h.delete(doomed) }},
			{"delete disk", func() error { return h.delete(doomedDisk) }},
			{"snapshot", func() error { return h.snapshot(tried) }},
			{"clone", func() error { return h.clone(idle) }},
		} {
			err := c.make()
			if code := status.Code(err); code == codes.OK || code == codes.Unknown || code == codes.NotFound {
				h.Errorf("the disk fails, %s, round %d: %v, want an error that has it repeated", c.name, round, err)
			}
		}
	}
}

// wantToldAsFailing tries what many try first. It does not help, and has the kernel forget
// what it had read, so that the pool cannot be opened. It is the same pool all the same.
func (h *harness) wantToldAsFailing() {
	h.Helper()
	if err := syscall.Mount("", h.mount.at, "", syscall.MS_REMOUNT, ""); err != nil {
		h.Log("mounting it anew: ", err)
	}
	if err := h.delete(doomed); err == nil || strings.Contains(err.Error(), "not the pool that was opened") {
		h.Errorf("delete: %v, want an error that reports the disk", err)
	}
}

// repair is what an administrator does with a filesystem that has stopped: it is unmounted
// and mounted again, and brings itself in order.
func (h *harness) repair() {
	h.Helper()
	h.Must(h.mount.unmountAll())
	if h.mount.kind == "ext4" {
		// It counts the errors until it is checked.
		output, err := exec.CommandContext(h.Context(), "e2fsck", "-f", "-y", h.mount.device).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) { // 1: repaired
			h.Fatalf("e2fsck: %v\n%s", err, output)
		}
	}
	h.mount.mount()
	if h.mount.kind == "btrfs" {
		output, err := exec.CommandContext(h.Context(), "btrfs", "device", "stats", "--reset", h.mount.at).CombinedOutput()
		if err != nil {
			h.Fatalf("btrfs device stats --reset: %v\n%s", err, output)
		}
	}
	h.awaitServing(true)
	h.Eventually("all is in order again", func() bool { return h.pool.Lists(h.acknowledged) == nil })
}

// wantUnacknowledgedWhole checks what was asked for while the disk failed: it may be
// there or not, and asked for again it has to be.
func (h *harness) wantUnacknowledgedWhole() {
	h.Helper()
	for _, v := range []drivertest.Volume{late, lateDisk} {
		h.Must(h.create(v))
	}
	h.Must(drivertest.Repeat(h.Context(), func() error { return h.snapshot(tried) })) // what failed ones left is erased first
	h.Must(h.DeleteSnapshot(h.Context(), snapshotID(tried)))
	h.Must(h.clone(idle))
	for _, v := range []drivertest.Volume{doomed, doomedDisk} {
		h.Must(h.delete(v))
	}
	for _, v := range []drivertest.Volume{tree, raw} {
		h.Must(h.publish(v))
		h.Must(h.expand(v))
	}
	h.wantWhole("asked again")
}

// A disk that nothing can be read from is that of a pool which does not serve, and serves
// once it is well.
func TestUnreadableDiskAtOpen(t *testing.T) {
	unlessShort(t)
	driver := drivertest.Built(t)
	fs := filesystems()[0]
	m, d := newFaultyMount(t, fs)
	h := newHarness(t, driver, m)
	h.Must(h.unpublish(tree))
	h.Must(h.unpublish(raw))
	h.Must(h.Process.Stop())
	h.Must(m.unmountAll())
	m.mount() // and nothing of it is in memory
	d.Fail(disk.Read)
	h.Must(h.Process.Restart(h.Context()))
	if got := h.MustCapacity("local"); got != 0 {
		t.Errorf("the capacity is %d bytes", got)
	}
	for _, c := range []struct {
		name string
		err  error
		want codes.Code
	}{
		{"create", h.create(late), codes.ResourceExhausted},
		{"publish", h.publish(idle), codes.Unavailable},
		{"delete", h.delete(doomed), codes.Unavailable},
		{"get", h.get(idle), codes.Unavailable},
	} {
		h.WantCode(fmt.Sprintf("the disk cannot be read, %s", c.name), c.err, c.want)
	}
	h.wantAlive("the disk cannot be read")
	d.Heal()
	h.repair()
	h.end()
}
