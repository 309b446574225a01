package loop

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

const (
	// attempts bounds how often Attach retries when others take the free device first.
	attempts = 64
	// longestPause ends the pauses of Detach, which double from a millisecond:
	// half a second in all.
	longestPause = 256 * time.Millisecond
)

// Kernel attaches devices of the loop driver.
type Kernel struct {
	dev *dir.Dir
	// pause waits between two tries to detach, and free finds a device for Attach: tests
	// put their own in.
	pause func(ctx context.Context, d time.Duration) error
	free  func(c control, refused map[int]bool) (int, error)

	taking sync.Mutex // a free device

	mu sync.Mutex
	// silent counts the abandoned inspections per device that did not answer in time.
	silent map[string]int
}

// NewKernel takes the directory of device nodes, which must stay open: the host's /dev,
// where the kernel creates the nodes of new devices (devtmpfs).
func NewKernel(dev *dir.Dir) *Kernel {
	return &Kernel{dev: dev, pause: pause, free: control.free, silent: make(map[string]int)}
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// Attach makes the file a device, or returns the one that it is: ours, of the same
// ReadOnly, with whatever block it has. Errors: ErrNoDevice; ErrForeign where the
// device is to be writable and another's is; ErrSize for a file whose size is not a
// multiple of Unit, and for a block that no device has; ErrBusy for a device that is
// about to end and cannot be kept from it.
func (k *Kernel) Attach(f *File, o Options) (Device, error) {
	d, err := k.attach(f, o)
	if err != nil {
		return Device{}, fmt.Errorf("attach %s to a loop device: %w", f, err)
	}
	return d, nil
}

func (k *Kernel) attach(f *File, o Options) (Device, error) {
	if err := check(f, o); err != nil {
		return Device{}, err
	}
	attached, err := k.Attached(path.Base(f.String()))
	if err != nil {
		return Device{}, err
	}
	var altered, writable []Device
	for _, d := range attached {
		switch {
		case d.Silent && sameName(d, f):
			return Device{}, fmt.Errorf("%w: %s", ErrSilent, d.Name)
		case d.Backing != f.id && d.Backing.MayBe(f.id) && k.formerly(d, f):
			return Device{}, fmt.Errorf("%w: %s, through an earlier mount of the filesystem", ErrBusy, d.Name)
		case d.Backing != f.id || d.ReadOnly || o.ReadOnly:
		case d.Ours:
			writable = append(writable, d)
		default:
			altered = append(altered, d)
		}
	}
	for _, d := range writable {
		if kept, err := k.keep(d, o); !errors.Is(err, ErrNotAttached) {
			return kept, err
		}
	}
	mounted, err := o.mounted()
	if err != nil {
		return Device{}, err
	}
	for _, d := range altered {
		if !mounted[d.Name] {
			return Device{}, fmt.Errorf("%w: %s", ErrForeign, d.Name)
		}
		if kept, err := k.keep(d, o); !errors.Is(err, ErrNotAttached) {
			return kept, err
		}
	}
	return k.make(f, o, mounted)
}

func (o Options) mounted() (map[string]bool, error) {
	if o.Mounted == nil {
		return nil, nil
	}
	return o.Mounted()
}

// sameName reports whether a device may be that of a file: it has its name, in a directory of
// the same name.
func sameName(d Device, f *File) bool {
	in, name := path.Split(f.String())
	return d.HadPath(path.Base(in), name)
}

// formerly reports whether a device may be that of a file through an earlier mount of its filesystem.
func (k *Kernel) formerly(d Device, f *File) bool {
	former, err := k.FilePath(d.Name)
	if d.FormerPath = former; err != nil || !sameName(d, f) { // it may have ended since
		return false
	}
	anew, err := dir.MayBeMountedAnew(int(f.f.Fd()))
	return anew || err != nil
}

func check(f *File, o Options) error {
	size, err := f.Size()
	if err != nil {
		return err
	}
	if size == 0 || size%Unit != 0 {
		return fmt.Errorf("%w: %d bytes", ErrSize, size)
	}
	switch o.BlockBytes {
	case 0, 512, 1024, 2048, 4096:
		return nil
	}
	return fmt.Errorf("%w: a block of %d bytes", ErrSize, o.BlockBytes)
}

// keep makes sure that a device which was found stays, and is as the options say as
// far as that can be changed.
func (k *Kernel) keep(d Device, o Options) (Device, error) {
	node, found, err := k.hold(d.Name)
	if err != nil {
		return Device{}, err
	}
	defer func() { _ = node.close() }()
	switch {
	case found.Backing != d.Backing:
		return Device{}, fmt.Errorf("%s: %w", d.Name, ErrNotAttached)
	case found.Ending || !found.Ours:
		if err := node.restore(); err != nil {
			return Device{}, err
		}
	}
	if o.Discard {
		return node.inspect()
	}
	return node.ignoring()
}

// Restore undoes what the users of a device can change of it: it is Ours again, and stays. The caller knows that it is this
// package's. Errors: ErrNotAttached where it is not that of the file any more, and ErrBusy.
func (k *Kernel) Restore(d Device) (Device, error) {
	now, err := k.keep(d, Options{Discard: true}) // discards are as they are
	if err != nil {
		return Device{}, fmt.Errorf("restore %s: %w", d.Name, err)
	}
	return now, nil
}

func (k *Kernel) make(f *File, o Options, mounted map[string]bool) (Device, error) {
	block := o.BlockBytes
	if block == 0 {
		var err error
		if block, err = f.BlockBytes(); err != nil {
			return Device{}, err
		}
	}
	// Without LO_FLAGS_PARTSCAN: partition tables are the user's business, not the
	// kernel's (it reads them all the same if loop.max_part says so).
	//
	// The device keeps what it is given: nothing that allows more than it needs, or
	// the filesystem could not be mounted read-only for a device that only reads.
	mode, flags := unix.O_RDWR, uint32(unix.LO_FLAGS_DIRECT_IO)
	if o.ReadOnly {
		mode, flags = unix.O_RDONLY, flags|unix.LO_FLAGS_READ_ONLY
	}
	backing, err := f.reopen(mode)
	if err != nil {
		return Device{}, err
	}
	defer func() { _ = backing.Close() }()
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: uint32(block), Info: unix.LoopInfo64{Flags: flags}}
	copy(config.Info.File_name[:], mark)

	control, err := k.control()
	if err != nil {
		return Device{}, err
	}
	defer func() { _ = control.close() }()
	refused := make(map[int]bool)
	for name := range mounted {
		if number, ok := numberOf(name); ok {
			refused[number] = true
		}
	}
	for range attempts {
		node, err := k.take(control, refused, mode, &config)
		// EBUSY: another process took it, or holds it. ENXIO: it is being removed.
		if errors.Is(err, unix.EBUSY) || errors.Is(err, ErrNotAttached) {
			continue
		}
		if err != nil {
			return Device{}, err
		}
		defer func() { _ = node.close() }()
		if o.Discard {
			return node.inspect()
		}
		return node.ignoring()
	}
	return Device{}, fmt.Errorf("%w: other processes took %d in a row", ErrNoDevice, attempts)
}

// take attaches to a free device, one call at a time: each replaces what is free. What it cannot attach it removes again.
func (k *Kernel) take(c control, refused map[int]bool, mode int, config *unix.LoopConfig) (node, error) {
	k.taking.Lock()
	defer k.taking.Unlock()
	number, err := k.free(c, refused)
	if err != nil {
		return node{}, err
	}
	n, err := k.open(nodeName(number), mode)
	if err == nil {
		// One step: there is no instant at which the device has the file but not the mark.
		if err = unix.IoctlLoopConfigure(n.fd(), config); err == nil {
			return n, nil
		}
		err = errors.Join(&fs.PathError{Op: "LOOP_CONFIGURE", Path: n.name, Err: err}, n.close())
	}
	_ = c.remove(number) // another process may have it by now
	return node{}, err
}

// filesystemGone reports whether an error means a dead filesystem, rather than something else
// about the device. A FUSE filesystem answers ECONNABORTED to who waits while its
// process ends, and to all later if it was aborted; NFS answers ESTALE, ETIMEDOUT or
// EHOSTDOWN.
func filesystemGone(err error) bool {
	for _, gone := range []error{unix.ESTALE, unix.EIO, unix.ENOTCONN, unix.ECONNABORTED, unix.ESHUTDOWN, unix.ETIMEDOUT, unix.EHOSTDOWN} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}

// Grow makes a device as large as its file is now, while it is in use, and returns it
// as it is then. Errors: ErrNotAttached where it is not that of the file any more, and
// ErrForeign.
func (k *Kernel) Grow(d Device) (Device, error) {
	node, now, err := k.hold(d.Name)
	if err != nil {
		return Device{}, err
	}
	defer func() { _ = node.close() }()
	switch {
	case now.Gone, now.Backing != d.Backing:
		return Device{}, fmt.Errorf("grow %s: %w", d.Name, ErrNotAttached)
	case !now.Ours:
		return Device{}, fmt.Errorf("grow %s: %w", d.Name, ErrForeign)
	}
	if err := unix.IoctlSetInt(node.fd(), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return Device{}, &fs.PathError{Op: "LOOP_SET_CAPACITY", Path: d.Name, Err: err}
	}
	return node.inspect()
}

// Detach takes a device off its file. One that is not attached to it any more is no
// error. Errors: ErrForeign for another's, ErrGone, ErrSilent, and ErrBusy for one that a process has open,
// which then stays attached. Those that only check devices as they come and go, as
// udev does, get half a second to let go of it, or as long as ctx has.
//
// A mount of the node does not keep the device: it would show the next file that gets
// the same one. See to it that it is published nowhere.
//
// Of a device that is Gone it is unknown whose it is, and whether it was open: that it is
// the caller's own has to be known, and it goes with its last user.
func (k *Kernel) Detach(ctx context.Context, d Device) error {
	for wait := time.Millisecond; ; wait *= 2 {
		err := k.detach(ctx, d, wait > time.Millisecond)
		if err == nil {
			return nil
		}
		// The kernel does not report when the last user closes a device: ask again.
		if errors.Is(err, ErrBusy) && wait <= longestPause && k.pause(ctx, wait) == nil {
			continue
		}
		if errors.Is(err, ErrBusy) {
			if err = k.retain(d); err == nil {
				return nil
			}
		}
		return fmt.Errorf("detach %s: %w", d.Name, err)
	}
}

// detach returns ErrBusy for a device that others have open. It ends with the last of them then, unless it is
// retained: there may always be one when this asks, and be none in between.
func (k *Kernel) detach(ctx context.Context, d Device, again bool) error {
	now, err := k.clear(d)
	switch {
	case errors.Is(err, ErrNotAttached) && !again:
		return nil
	case errors.Is(err, ErrNotAttached):
		now = d
	case err != nil:
		return err
	}
	return k.remove(ctx, now.Name)
}

// clear detaches a device, and returns what it was. It returns ErrNotAttached where it is not that of the file any more.
func (k *Kernel) clear(d Device) (now Device, err error) {
	found, now, err := k.hold(d.Name)
	if err != nil {
		return Device{}, err
	}
	defer func() { _ = found.close() }()
	switch {
	case now.Gone && !d.Gone:
		return Device{}, ErrGone
	case now.Backing != d.Backing, now.Gone && now.FormerPath != d.FormerPath:
		return Device{}, ErrNotAttached
	case !now.Ours && !now.Gone:
		return Device{}, ErrForeign
	}
	// Others cannot mount it meanwhile, or give it another file. Only now: what is another's by now they may mount.
	claimed, err := k.open(d.Name, unix.O_RDONLY|unix.O_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return Device{}, ErrBusy
	}
	if err != nil {
		return Device{}, err
	}
	if err := found.close(); err != nil {
		return Device{}, errors.Join(err, claimed.close())
	}
	err = claimed.clear()
	if now.Gone && errors.Is(err, ErrBusy) {
		err = nil // it cannot be restored
	}
	return now, err
}

// retain keeps a device from ending with its last user, and returns ErrBusy; nil for one that has ended.
func (k *Kernel) retain(d Device) error {
	node, now, err := k.hold(d.Name)
	if errors.Is(err, ErrNotAttached) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = node.close() }()
	switch {
	case now.Backing != d.Backing:
		return nil
	case now.Ending:
		return errors.Join(ErrBusy, node.restore())
	}
	return ErrBusy
}

// remove has the kernel forget a device that is free. One that refused discards would
// go on doing so for the program that gets it next, and that cannot be taken back (seen with
// Linux 6.18). A program that has got it already, or does not let go of it, keeps it.
func (k *Kernel) remove(ctx context.Context, name string) error {
	number, ok := numberOf(name)
	if !ok {
		return fmt.Errorf("%s: %w", name, ErrNotAttached)
	}
	control, err := k.control()
	if err != nil {
		return err
	}
	defer func() { _ = control.close() }()
	for wait := time.Millisecond; ; wait *= 2 {
		err := control.remove(number)
		if !errors.Is(err, ErrBusy) {
			return err
		}
		if hasFile(name) || wait > longestPause/16 || k.pause(ctx, wait) != nil {
			return nil
		}
	}
}
