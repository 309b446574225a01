// Package looptest has an in-memory fake of loop.Kernel, and the contract test that
// both pass.
package looptest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// Fake keeps devices in memory. Like the kernel it keeps their files, gives the lowest
// number that is free, has a size of its own for each until it grows, and refuses
// to detach what is held. Their nodes are empty files, which bindtest.Fake publishes.
type Fake struct {
	// Max is how many devices there can be, 0 for any number.
	Max int
	// BlockBytes is what a device has unless it is asked for another; 0 for 512.
	BlockBytes int64

	// Nodes is what CheckNodes returns.
	Nodes error

	dev     *dir.Dir
	mu      sync.Mutex
	devices map[int]*device
}

type device struct {
	loop.Device
	file *os.File // a handle of its own, as a device keeps its file
	held int
	cut  bool // it shows a part of the file
}

// NewFake takes the directory in which nodes are made.
func NewFake(dev *dir.Dir) *Fake { return &Fake{dev: dev, devices: make(map[int]*device)} }

// OnDeleted is loop.Kernel.OnDeleted.
func (f *Fake) OnDeleted(fileName string) ([]loop.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []loop.Device
	for _, d := range f.sorted() {
		at, err := d.path()
		if err != nil {
			return nil, err
		}
		if was, gone := strings.CutSuffix(at, " (deleted)"); gone && d.Ours && path.Base(was) == fileName {
			found := d.Device
			found.FormerPath = was
			all = append(all, found)
		}
	}
	return all, nil
}

// path is the kernel's name of the file.
func (d *device) path() (string, error) {
	return os.Readlink("/proc/self/fd/" + strconv.Itoa(int(d.file.Fd())))
}

// FilePath is loop.Kernel.FilePath.
func (f *Fake) FilePath(name string) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(name)
	if err != nil {
		return "", err
	}
	at, err := d.path()
	return strings.TrimSuffix(at, " (deleted)"), err
}

// CheckNodes is loop.Kernel.CheckNodes.
func (f *Fake) CheckNodes() error { return f.Nodes }

// Attach is loop.Kernel.Attach.
func (f *Fake) Attach(file *loop.File, o loop.Options) (loop.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	size, err := file.Size()
	if err != nil {
		return loop.Device{}, err
	}
	if size == 0 || size%loop.Unit != 0 || !slices.Contains([]int64{0, 512, 1024, 2048, 4096}, o.BlockBytes) {
		return loop.Device{}, fmt.Errorf("attach %s: %w", file, loop.ErrSize)
	}
	var mounted map[string]bool
	if o.Mounted != nil {
		if mounted, err = o.Mounted(); err != nil {
			return loop.Device{}, err
		}
	}
	foreign := false
	for _, d := range f.sorted() {
		if d.Backing != file.ID() || d.ReadOnly || o.ReadOnly {
			continue
		}
		if d.Ours || mounted[d.Name] {
			d.restore()
			d.Discard = d.Discard && o.Discard
			return d.Device, nil
		}
		foreign = true
	}
	if foreign {
		return loop.Device{}, fmt.Errorf("attach %s: %w", file, loop.ErrForeign)
	}
	block := cmp.Or(o.BlockBytes, f.BlockBytes, 512)
	return f.add(file, loop.Device{SizeBytes: size, BlockBytes: block, ReadOnly: o.ReadOnly, Discard: o.Discard, Ours: true, DirectIO: true}, mounted)
}

func (d *device) restore() {
	d.Ending, d.Ours = false, true
	if info, err := d.file.Stat(); err == nil && d.cut {
		d.SizeBytes, d.cut = info.Size(), false
	}
}

// Restore is loop.Kernel.Restore.
func (f *Fake) Restore(of loop.Device) (loop.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(of.Name)
	if err == nil && d.Backing != of.Backing {
		err = loop.ErrNotAttached
	}
	if err != nil {
		return loop.Device{}, fmt.Errorf("restore %s: %w", of.Name, err)
	}
	d.restore()
	return d.Device, nil
}

// Alter takes the mark off a device and has it show a part of its file, as its users can.
func (f *Fake) Alter(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(name)
	if err != nil {
		return err
	}
	d.Ours, d.cut = false, true
	d.SizeBytes -= loop.Unit
	return nil
}

// AttachForeign attaches a file as another program would.
func (f *Fake) AttachForeign(file *loop.File, readOnly bool) (loop.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	size, err := file.Size()
	if err != nil {
		return loop.Device{}, err
	}
	return f.add(file, loop.Device{SizeBytes: size, BlockBytes: 512, ReadOnly: readOnly, Discard: true}, nil)
}

func (f *Fake) add(file *loop.File, d loop.Device, mounted map[string]bool) (loop.Device, error) {
	number := 0
	for f.devices[number] != nil || mounted[fmt.Sprintf("loop%d", number)] {
		number++
	}
	if f.Max > 0 && number >= f.Max {
		return loop.Device{}, fmt.Errorf("attach %s: %w", file, loop.ErrNoDevice)
	}
	d.Name = fmt.Sprintf("loop%d", number)
	d.Major, d.Minor, d.Backing = 7, uint32(number), file.ID()
	node, err := f.dev.MakeFile(d.Name)
	if err == nil {
		err = node.Close()
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return loop.Device{}, err
	}
	kept, err := os.Open(file.HandlePath())
	if err != nil {
		return loop.Device{}, err
	}
	f.devices[number] = &device{Device: d, file: kept}
	return d, nil
}

// Attached is loop.Kernel.Attached.
func (f *Fake) Attached(fileNames ...string) ([]loop.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []loop.Device
	for _, d := range f.sorted() {
		at, err := d.path()
		if err != nil {
			return nil, err
		}
		if len(fileNames) == 0 || slices.Contains(fileNames, path.Base(strings.TrimSuffix(at, " (deleted)"))) {
			all = append(all, d.Device)
		}
	}
	return all, nil
}

func (f *Fake) sorted() []*device {
	var all []*device
	for _, number := range slices.Sorted(maps.Keys(f.devices)) {
		all = append(all, f.devices[number])
	}
	return all
}

func (f *Fake) named(name string) (*device, error) {
	for _, d := range f.devices {
		if d.Name == name {
			return d, nil
		}
	}
	return nil, fmt.Errorf("%s: %w", name, loop.ErrNotAttached)
}

// Inspect is loop.Kernel.Inspect.
func (f *Fake) Inspect(name string) (loop.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(name)
	if err != nil {
		return loop.Device{}, err
	}
	return d.Device, nil
}

// Grow is loop.Kernel.Grow.
func (f *Fake) Grow(of loop.Device) (loop.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(of.Name)
	switch {
	case err != nil:
		return loop.Device{}, err
	case d.Backing != of.Backing:
		return loop.Device{}, fmt.Errorf("grow %s: %w", of.Name, loop.ErrNotAttached)
	case !d.Ours:
		return loop.Device{}, fmt.Errorf("grow %s: %w", of.Name, loop.ErrForeign)
	}
	info, err := d.file.Stat()
	if err != nil {
		return loop.Device{}, err
	}
	d.SizeBytes = info.Size()
	return d.Device, nil
}

// Detach is loop.Kernel.Detach, but does not wait.
func (f *Fake) Detach(_ context.Context, of loop.Device) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(of.Name)
	switch {
	case err != nil, d.Backing != of.Backing:
		return nil
	case !d.Ours:
		return fmt.Errorf("detach %s: %w", of.Name, loop.ErrForeign)
	case d.held > 0:
		d.Ending = false
		return fmt.Errorf("detach %s: %w", of.Name, loop.ErrBusy)
	}
	return f.remove(d)
}

func (f *Fake) remove(d *device) error {
	delete(f.devices, int(d.Minor))
	return d.file.Close()
}

// Hold keeps a device in use until the returned function is called.
func (f *Fake) Hold(name string) (release func(), err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(name)
	if err != nil {
		return nil, err
	}
	d.held++
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		d.held--
		if d.held == 0 && d.Ending {
			_ = f.remove(d)
		}
	}, nil
}

// End detaches a device, any program's, when no process holds it any more, as
// losetup --detach does.
func (f *Fake) End(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d, err := f.named(name)
	if err != nil {
		return err
	}
	if d.held == 0 {
		return f.remove(d)
	}
	d.Ending = true
	return nil
}

// Close detaches all.
func (f *Fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var errs []error
	for _, d := range f.sorted() {
		errs = append(errs, f.remove(d))
	}
	return errors.Join(errs...)
}
