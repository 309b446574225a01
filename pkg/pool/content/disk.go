package content

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// FileName is the file in the directory of a block volume that is its content.
const FileName = "disk.img"

// A Disk is the content of a block volume: a file in its directory, which has what the device
// shows, byte for byte.
type Disk struct {
	Host  Host
	ID    volume.ID
	Bytes int64 // promised
	// BlockBytes is the logical block of its devices. Make sets it.
	BlockBytes int64
	// Thin: no space is set aside in the filesystem.
	Thin bool
}

func (c *Disk) allocation() loop.Allocation {
	if c.Thin {
		return loop.Thin
	}
	return loop.Thick
}

// Make makes the file, in full. The directory stays closed.
func (c *Disk) Make(ctx context.Context, d *dir.Dir) error {
	return trace.Step(ctx, "make the file", func() error { return c.make(ctx, d) })
}

func (c *Disk) make(ctx context.Context, d *dir.Dir) (err error) {
	disk, err := loop.Create(d, FileName)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	if c.BlockBytes, err = disk.BlockBytes(); err != nil {
		return err
	}
	err = disk.Grow(ctx, c.Bytes, c.allocation())
	if errors.Is(err, errors.ErrUnsupported) {
		err = fmt.Errorf(`%w: the pool's filesystem cannot set space aside for a file; the pool option "allocation":"thin" does without: %w`, volume.ErrNoSpace, err)
	}
	return err
}

// Check returns volume.ErrLost for a file that is missing, or smaller than what was promised.
func (c *Disk) Check(d *dir.Dir) error {
	disk, err := OpenFile(c.ID, d)
	if err != nil {
		return err
	}
	return errors.Join(c.whole(disk), disk.Close())
}

func (c *Disk) whole(disk *loop.File) error {
	bytes, err := disk.Size()
	if err == nil && bytes < c.Bytes {
		err = fmt.Errorf("%w: the file of block volume %s has %d bytes, but %d were promised", volume.ErrLost, c.ID, bytes, c.Bytes)
	}
	return err
}

// Grow makes the file larger.
func (c *Disk) Grow(ctx context.Context, d *dir.Dir, bytes int64) error {
	disk, err := OpenFile(c.ID, d)
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	return disk.Grow(ctx, bytes, c.allocation())
}

// Cut undoes Grow where the growth was not recorded: no device has grown yet. It goes no
// further than that, since what the file had before may be in use, and does nothing where the
// record promises more than the file had.
func (c *Disk) Cut(d *dir.Dir, had int64) error {
	if c.Bytes > had {
		return nil
	}
	disk, err := OpenFile(c.ID, d)
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	return disk.Cut(had)
}

// Publish attaches the file, unless it is, and publishes the device. If that fails the device
// is detached again.
func (c *Disk) Publish(ctx context.Context, d *dir.Dir, at Target) error {
	disk, err := OpenFile(c.ID, d)
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	if err := c.whole(disk); err != nil {
		return err
	}
	keeps, err := disk.KeepsDiscarded()
	if err != nil {
		return err
	}
	discards := c.Thin && !keeps
	file := fileIn(c.ID, d, disk.ID())
	step := trace.Begin(ctx, "attach loop device")
	device, err := c.attach(disk, file, at, discards)
	err = step.EndWith(err)
	if errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("%w: %w", volume.ErrUnavailable, err)
	}
	if err != nil {
		return DeviceError(err)
	}
	if device.Discard && !discards {
		c.Host.Log.Info("Discards cannot be switched off, because sysfs is read-only: they give space of the volume back to the pool, or on btrfs have it take more",
			"volume", c.ID.String(), "device", device.Name)
	}
	if err := trace.Step(ctx, "mount", func() error {
		return c.Host.Mounts.PublishDevice(c.Host.Dev, device.Name, at.Path)
	}); err != nil {
		return errors.Join(MountError(err), c.Host.DetachUnpublished(ctx, file))
	}
	return nil
}

// attach returns the device for a target. It may be there already: one that only reads is for that target alone, and another one
// may be through an earlier mount of the pool.
func (c *Disk) attach(disk *loop.File, file VolumeFile, at Target, discards bool) (loop.Device, error) {
	if at.ReadOnly {
		if there, ok, err := c.there(file, at); ok || err != nil {
			return there, err
		}
	}
	device, err := c.Host.Devices.Attach(disk, loop.Options{ReadOnly: at.ReadOnly, BlockBytes: c.BlockBytes, Discard: discards, Mounted: c.Host.mounted})
	if errors.Is(err, loop.ErrBusy) {
		if there, ok, thereErr := c.there(file, at); ok || thereErr != nil {
			return there, thereErr
		}
	}
	return device, err
}

// there is the device of the file that is published at a target, if there is one.
func (c *Disk) there(file VolumeFile, at Target) (now loop.Device, ok bool, err error) {
	device, err := c.Host.DeviceAt(at.Path)
	if err != nil || device == nil || device.ReadOnly != at.ReadOnly {
		return loop.Device{}, false, err
	}
	if ok, err = c.Host.IsOf(*device, file); err != nil || !ok {
		return loop.Device{}, false, err
	}
	now, err = c.Host.Devices.Restore(*device)
	return now, true, err
}

// Measure has the facts be those of the file, which keeps its size whether there is a limit or
// not.
func (c *Disk) Measure(d *dir.Dir, _, filesystem dir.Space, facts *health.Facts) dir.Space {
	facts.Unenforced, facts.LimitOff, facts.InodesCounted = false, "", false
	facts.FreeBytes = volume.Unknown // all of its space is set aside
	if c.Thin {
		facts.FreeBytes, facts.SizeBytes = filesystem.FreeBytes, filesystem.SizeBytes
	}
	space := dir.Space{SizeBytes: c.Bytes}
	disk, err := OpenFile(c.ID, d)
	if err != nil {
		facts.IO = errors.Join(facts.IO, err)
		return space
	}
	bytes, err := disk.Size()
	facts.IO = errors.Join(facts.IO, err, disk.Close())
	facts.Short = err == nil && bytes < c.Bytes
	return space
}

// OpenFile opens the file of a block volume. Errors: volume.ErrLost.
func OpenFile(id volume.ID, d *dir.Dir) (*loop.File, error) {
	disk, err := loop.Open(d, FileName)
	return disk, lostFile(id, err)
}

func lostFile(id volume.ID, err error) error {
	if dir.IsMissing(err) || errors.Is(err, dir.ErrNotFile) {
		return fmt.Errorf("%w: block volume %s has no file %s: %w", volume.ErrLost, id, FileName, err)
	}
	return err
}

// FileBytes is the size of the file of a block volume.
func FileBytes(id volume.ID, d *dir.Dir) (int64, error) {
	disk, err := OpenFile(id, d)
	if err != nil {
		return 0, err
	}
	bytes, err := disk.Size()
	return bytes, errors.Join(err, disk.Close())
}

// Extents is how many extents the file of a block volume has: see clone.Extents.
func Extents(d *dir.Dir) (int, error) {
	f, err := d.OpenFile(FileName)
	if err != nil {
		return 0, err
	}
	n, err := clone.Extents(f)
	return n, errors.Join(err, f.Close())
}

// Allocated is the space that the file of a block volume has, in bytes. Users of a thick one
// can give some back, as those of a thin one can.
func Allocated(id volume.ID, d *dir.Dir) (int64, error) {
	disk, err := OpenFile(id, d)
	if err != nil {
		return 0, err
	}
	defer func() { _ = disk.Close() }() // opened for reading
	return disk.Allocated()
}

// Copy makes the file of a block volume in dst, durably, from that in src, as it is at one
// moment. If it is used, what users of a device have written without a flush is in it where the host keeps it
// in memory, since that is flushed first. It returns how long writers had to wait at most, and
// clone.ErrFragmented if that were longer than the limit.
func (c *Disk) Copy(ctx context.Context, src, dst *dir.Dir, m volume.CopyMethod, limit clone.Limit, used bool) (stall time.Duration, err error) {
	if used {
		if err := c.flush(src); err != nil {
			return 0, err
		}
	}
	from, err := src.OpenFile(FileName)
	if err != nil {
		return 0, err
	}
	defer func() { _ = from.Close() }() // opened for reading
	// What was written has no extents before it is flushed.
	if m == volume.ByReference && limit > 0 {
		if err := errors.Join(from.Sync(), limit.Check(from)); err != nil {
			return 0, err
		}
	}
	method := clone.Share
	if m == volume.ByCopy {
		method = clone.Copy
	}
	to, err := makeFor(dst, m)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	err = trace.Step(ctx, "copy the file", func() error {
		began := time.Now()
		if err := clone.File(ctx, to, from, method); err != nil {
			return err
		}
		stall = time.Since(began)
		return to.Sync()
	})
	if m == volume.ByCopy { // nothing is written
		stall = 0
	}
	return stall, err
}

// makeFor makes the file for a copy. What shares blocks is copied on write as its source is, or not.
func makeFor(dst *dir.Dir, m volume.CopyMethod) (*os.File, error) {
	if m != volume.ByCopy {
		return dst.MakeFile(FileName)
	}
	disk, err := loop.Create(dst, FileName)
	if err != nil {
		return nil, err
	}
	f, err := disk.Writable()
	return f, errors.Join(err, disk.Close())
}

// flush writes what the devices of the file have in their page cache into the file: a copy of
// the file alone would not have it.
func (c *Disk) flush(src *dir.Dir) error {
	file, err := FileOf(c.ID, src)
	if err != nil {
		return err
	}
	devices, err := c.Host.DevicesOf(file)
	if err != nil {
		return err
	}
	for _, d := range devices.Attached {
		node, err := c.Host.Dev.OpenNode(d.Name, os.O_RDONLY)
		if err != nil {
			return err
		}
		if err := errors.Join(node.Sync(), node.Close()); err != nil {
			return err
		}
	}
	return nil
}
