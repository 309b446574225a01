package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// A step is one row: what happens, the CSI call or system call by which it does, and its answer. An error is an
// answer that the driver or the kernel should not have given.
type step struct {
	what, call string
	run        func(context.Context) (string, error)
}

var (
	large    = drivertest.Volume{ID: "pvc-large", Bytes: 1 << 30}
	small    = drivertest.Volume{ID: "pvc-small", Bytes: 64 << 20}
	disk     = drivertest.Volume{ID: "pvc-disk", Bytes: 128 << 20, Block: true}
	restored = drivertest.Volume{ID: "pvc-restored", Bytes: 1 << 30}
	tooLarge = drivertest.Volume{ID: "pvc-too-large", Bytes: 2 * poolBytes}
	hostile  = drivertest.Volume{ID: "../../etc"}
)

// data is what a pod writes: 4 MiB in which no two pages are alike.
func data() []byte {
	var b bytes.Buffer
	for page := 0; b.Len() < 4<<20; page++ {
		fmt.Fprintf(&b, "page %-4090d\n", page)
	}
	return b.Bytes()
}

func (d *demo) steps() []step {
	return []step{
		{"How much can be promised?", "GetCapacity", d.capacity},
		{"Create a volume of 1 GiB", "CreateVolume", d.create(large)},
		{"How much is left?", "GetCapacity", d.capacity},
		{"Publish it for a pod", "NodePublishVolume", d.publish(large)},
		{"The pod writes 4 MiB", "write, sync", d.write(large)},
		{"Create a volume of 64 MiB", "CreateVolume", d.create(small)},
		{"Publish it for a pod", "NodePublishVolume", d.publish(small)},
		{"The pod writes until it is full", "write", d.fill},
		{"Grow it to 128 MiB, in use", "NodeExpandVolume", d.grow(small)},
		{"The pod writes 4 MiB more", "write, sync", d.write(small)},
		{"Create a block volume of 128 MiB", "CreateVolume", d.create(disk)},
		{"Publish it for a virtual machine", "NodePublishVolume", d.publish(disk)},
		{"The machine writes past its end", "write", d.writePastEnd},
		{"Grow it to 256 MiB, in use", "NodeExpandVolume", d.grow(disk)},
		{"Publish the volume ../../etc", "NodePublishVolume", refused(codes.InvalidArgument, d.publish(hostile))},
		{"Create one larger than the pool", "CreateVolume", refused(codes.ResourceExhausted, d.create(tooLarge))},
		{"Delete a volume in use", "DeleteVolume", refused(codes.FailedPrecondition, d.remove(large))},
		{"Kill the driver, and start it", "SIGKILL", d.crash},
		{"The pod reads its 4 MiB", "read", d.read(large)},
		{"End the pod", "NodeUnpublishVolume", d.unpublish(large)},
		{"Take a snapshot of its volume", "CreateSnapshot", d.takeSnapshot},
		{"Delete its volume", "DeleteVolume", d.remove(large)},
		{"Restore the snapshot", "CreateVolume", d.restore},
		{"Publish the restored volume", "NodePublishVolume", d.publish(restored)},
		{"A pod reads the 4 MiB in it", "read", d.read(restored)},
		{"End this pod", "NodeUnpublishVolume", d.unpublish(restored)},
		{"Delete its volume", "DeleteVolume", d.remove(restored)},
		{"Delete the snapshot", "DeleteSnapshot", func(ctx context.Context) (string, error) {
			return "gone", d.DeleteSnapshot(ctx, d.snapshot)
		}},
		{"End the pod of the small volume", "NodeUnpublishVolume", d.unpublish(small)},
		{"Delete it", "DeleteVolume", d.remove(small)},
		{"End the virtual machine", "NodeUnpublishVolume", d.unpublish(disk)},
		{"Delete its volume", "DeleteVolume", d.remove(disk)},
		{"How much can be promised now?", "GetCapacity", d.capacity},
	}
}

func (d *demo) capacity(ctx context.Context) (string, error) {
	free, err := d.Capacity(ctx, "")
	return size(free), err
}

// create expects the driver to promise the size asked for.
func (d *demo) create(v drivertest.Volume) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		created, err := d.Create(ctx, v)
		if got := created.GetVolume().GetCapacityBytes(); err == nil && got != v.Bytes {
			err = fmt.Errorf("the volume has %d bytes, want %d", got, v.Bytes)
		}
		return v.ID, err
	}
}

func (d *demo) publish(v drivertest.Volume) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) { return "mounted", d.Publish(ctx, v, filepath.Base(v.ID)) }
}

func (d *demo) unpublish(v drivertest.Volume) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) { return "unmounted", d.Unpublish(ctx, v.ID, v.ID) }
}

// remove expects the directory to be gone when the call is answered.
func (d *demo) remove(v drivertest.Volume) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		if err := d.Delete(ctx, v.ID); err != nil {
			return "", err
		}
		if _, err := os.Lstat(filepath.Join(d.pool, v.ID)); !errors.Is(err, os.ErrNotExist) {
			return "", fmt.Errorf("its directory is still in the pool (%w)", err)
		}
		return "gone", nil
	}
}

func (d *demo) grow(v drivertest.Volume) func(context.Context) (string, error) {
	v.Bytes *= 2
	return func(ctx context.Context) (string, error) {
		grown, err := d.Expand(ctx, v, v.ID)
		if got := grown.GetCapacityBytes(); err == nil && got != v.Bytes {
			err = fmt.Errorf("the volume has %d bytes, want %d", got, v.Bytes)
		}
		return size(v.Bytes), err
	}
}

func (d *demo) takeSnapshot(ctx context.Context) (string, error) {
	made, err := d.Snapshot(ctx, "snapshot-demo", large.ID, "")
	if err == nil && !made.GetReadyToUse() {
		err = errors.New("the snapshot is not ready to use")
	}
	d.snapshot = made.GetSnapshotId()
	return "ready to use", err
}

func (d *demo) restore(ctx context.Context) (string, error) {
	_, err := d.Restore(ctx, restored, d.snapshot)
	return restored.ID, err
}

func (d *demo) crash(ctx context.Context) (string, error) {
	return "serves again", errors.Join(d.Process.Kill(), d.Process.Restart(ctx))
}

// open opens the file that the pod of a volume writes to.
func (d *demo) open(v drivertest.Volume) (*os.File, error) {
	return os.OpenFile(filepath.Join(d.Target(v.ID), "data"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

func (d *demo) write(v drivertest.Volume) func(context.Context) (string, error) {
	return func(context.Context) (string, error) {
		file, err := d.open(v)
		if err != nil {
			return "", err
		}
		defer file.Close()
		_, err = file.Write(data())
		// btrfs counts what was written when it is on the disk.
		return "written", errors.Join(err, unix.Syncfs(int(file.Fd())))
	}
}

func (d *demo) read(v drivertest.Volume) func(context.Context) (string, error) {
	return func(context.Context) (string, error) {
		got, err := os.ReadFile(filepath.Join(d.Target(v.ID), "data"))
		if err == nil && !bytes.Equal(got, data()) {
			err = errors.New("what was read is not what was written")
		}
		return "as it was", err
	}
}

// fill writes until the kernel refuses, which it has to do at the size of the volume.
func (d *demo) fill(context.Context) (string, error) {
	if !d.enforced {
		return "left out: sizes are not enforced", nil
	}
	file, err := d.open(small)
	if err != nil {
		return "", err
	}
	defer file.Close()
	written := int64(0)
	for piece := data(); err == nil; {
		var n int
		n, err = file.Write(piece)
		written += int64(n)
		if e := unix.Syncfs(int(file.Fd())); e != nil {
			return "", e
		}
	}
	if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return "", err
	}
	if written > small.Bytes || written < small.Bytes-int64(len(data())) {
		return "", fmt.Errorf("%d bytes could be written to a volume of %d", written, small.Bytes)
	}
	return fmt.Sprintf("%s, then %s", size(written), errors.Unwrap(err)), nil
}

func (d *demo) writePastEnd(context.Context) (string, error) {
	device, err := os.OpenFile(d.Target(disk.ID), os.O_WRONLY, 0)
	if err != nil {
		return "", err
	}
	defer device.Close()
	if _, err = device.WriteAt(data()[:4096], disk.Bytes); !errors.Is(err, syscall.ENOSPC) {
		return "", fmt.Errorf("got %v, want %w", err, syscall.ENOSPC)
	}
	return "refused: " + syscall.ENOSPC.Error(), nil
}

// refused expects the driver to refuse a call with a code.
func refused(want codes.Code, call func(context.Context) (string, error)) func(context.Context) (string, error) {
	return func(ctx context.Context) (string, error) {
		if _, err := call(ctx); status.Code(err) != want {
			return "", fmt.Errorf("got %v, want %v", err, want)
		}
		return "refused: " + want.String(), nil
	}
}

// size is in the largest unit in which it is not less than one.
func size(bytes int64) string {
	value, unit := float64(bytes)/(1<<20), "MiB"
	if value >= 1024 {
		value, unit = value/1024, "GiB"
	}
	return fmt.Sprintf("%.1f %s", value, unit)
}
