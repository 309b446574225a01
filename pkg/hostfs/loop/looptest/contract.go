package looptest

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// Devices is what the contract is about.
type Devices interface {
	Attach(f *loop.File, o loop.Options) (loop.Device, error)
	Attached() ([]loop.Device, error)
	Inspect(name string) (loop.Device, error)
	Grow(d loop.Device) (loop.Device, error)
	Detach(ctx context.Context, d loop.Device) error
}

// A Subject is one implementation under test.
type Subject struct {
	Devices
	// Root is an empty directory to make files in, and Dev that of the nodes.
	Root, Dev *dir.Dir
	// Again is what a program has that is started anew.
	Again func(t *testing.T) Devices
	// Foreign attaches a file as somebody else does, until the test ends.
	Foreign func(t *testing.T, f *loop.File, readOnly bool) loop.Device
	// Hold keeps a device open, as a user of it does.
	Hold func(t *testing.T, d loop.Device) (release func())
	// End has a device detached when nobody holds it any more.
	End func(t *testing.T, d loop.Device)
}

const mib = 1 << 20

// Contract is what every implementation keeps.
func Contract(t *testing.T, fresh func(t *testing.T) Subject) {
	for name, check := range map[string]func(*testing.T, *bench){
		"an attached device tells what it is":                      attachedTells,
		"attaching twice is one device":                            twiceIsOne,
		"a device that cannot be written is one of its own":        readOnly,
		"files have devices of their own":                          ownDevices,
		"a device is found after a restart, by any name":           foundAgain,
		"a device outlives the name of its file":                   unlinked,
		"a detached device is gone, and detaching again is none":   detached,
		"a device that got another file is left alone":             reused,
		"a device in use stays attached":                           busy,
		"a device grows with its file":                             grow,
		"what is not attached does not grow":                       growDetached,
		"another's device is told and left alone":                  foreign,
		"another's device that cannot be written hinders nobody":   foreignReadOnly,
		"a device that was about to end stays when it is attached": ending,
		"a device that ends is attached anew":                      ended,
		"a file without whole blocks is refused":                   size,
		"a device has the block that was asked for":                block,
		"discards are refused unless they are asked for":           discard,
		"files are attached at once":                               atOnce,
		"a device has a node":                                      node,
	} {
		t.Run(name, func(t *testing.T) { check(t, &bench{Subject: fresh(t)}) })
	}
}

type bench struct{ Subject }

// file makes a file of a size, whose devices are detached when the test ends.
func (b *bench) file(t *testing.T, name string, bytes int64) *loop.File {
	t.Helper()
	f, err := loop.Create(b.Root, name)
	must(t, err)
	t.Cleanup(func() {
		for _, d := range b.of(t, f) {
			if d.Ours {
				must(t, b.Detach(context.WithoutCancel(t.Context()), d))
			}
		}
		must(t, f.Close())
	})
	must(t, f.Grow(t.Context(), bytes, loop.Thin))
	return f
}

func (b *bench) attach(t *testing.T, f *loop.File, o loop.Options) loop.Device {
	t.Helper()
	d, err := b.Attach(f, o)
	must(t, err)
	return d
}

// of are the devices of a file.
func (b *bench) of(t *testing.T, f *loop.File) []loop.Device {
	t.Helper()
	all, err := b.Attached()
	must(t, err)
	var devices []loop.Device
	for _, d := range all {
		if d.Backing == f.ID() {
			devices = append(devices, d)
		}
	}
	return devices
}

func (b *bench) expect(t *testing.T, f *loop.File, want ...loop.Device) {
	t.Helper()
	if diff := cmp.Diff(want, b.of(t, f)); diff != "" {
		t.Errorf("devices of %s (-want +got):\n%s", f, diff)
	}
}

func attachedTells(t *testing.T, b *bench) {
	f := b.file(t, "a", 2*mib)
	b.expect(t, f)
	d := b.attach(t, f, loop.Options{})
	want := loop.Device{
		Name: d.Name, Major: 7, Minor: d.Minor, // whichever was free
		BlockBytes: d.BlockBytes, DirectIO: d.DirectIO, // whatever the filesystem allows
		Backing: f.ID(), SizeBytes: 2 * mib, Ours: true,
	}
	if diff := cmp.Diff(want, d); diff != "" {
		t.Errorf("device (-want +got):\n%s", diff)
	}
	b.expect(t, f, d)
	got, err := b.Inspect(d.Name)
	if got != d || err != nil {
		t.Errorf("Inspect = %+v, %v; want %+v", got, err, d)
	}
}

func twiceIsOne(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	if again := b.attach(t, f, loop.Options{}); again != d {
		t.Errorf("the second time %+v, want %+v", again, d)
	}
	b.expect(t, f, d)
}

func readOnly(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	r := b.attach(t, f, loop.Options{ReadOnly: true})
	w := b.attach(t, f, loop.Options{})
	if !r.ReadOnly || w.ReadOnly || r.Name == w.Name || r.BlockBytes != w.BlockBytes {
		t.Errorf("devices %+v and %+v, want two, of which the first is read-only", r, w)
	}
	if again := b.attach(t, f, loop.Options{ReadOnly: true}); again != r {
		t.Errorf("the second time %+v, want %+v", again, r)
	}
	must(t, b.Detach(t.Context(), w))
	b.expect(t, f, r)
}

func ownDevices(t *testing.T, b *bench) {
	one, two := b.file(t, "a", mib), b.file(t, "b", mib)
	d, e := b.attach(t, one, loop.Options{}), b.attach(t, two, loop.Options{})
	b.expect(t, one, d)
	b.expect(t, two, e)
	must(t, b.Detach(t.Context(), d))
	b.expect(t, one)
	b.expect(t, two, e)
}

func foundAgain(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	elsewhere, err := b.Root.Make("elsewhere")
	must(t, err)
	defer func() { must(t, elsewhere.Close()) }()
	must(t, b.Root.Rename("a", elsewhere, "b"))
	b.file(t, "a", mib) // has the name, and is not the file

	moved, err := loop.Open(elsewhere, "b")
	must(t, err)
	defer func() { must(t, moved.Close()) }()
	again := bench{b.Subject}
	again.Devices = b.Again(t)
	again.expect(t, f, d)
	if got := again.attach(t, moved, loop.Options{}); got != d {
		t.Errorf("attached %+v, want %+v", got, d)
	}
	must(t, again.Detach(t.Context(), d))
	b.expect(t, f)
}

func unlinked(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	must(t, b.Root.Remove("a"))
	b.expect(t, f, d)
}

func detached(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	must(t, b.Detach(t.Context(), d))
	b.expect(t, f)
	if got, err := b.Inspect(d.Name); err == nil && got.Backing == f.ID() || err != nil && !errors.Is(err, loop.ErrNotAttached) {
		t.Errorf("Inspect = %+v, %v; want ErrNotAttached", got, err)
	}
	must(t, b.Detach(t.Context(), d))
	_, err := b.Inspect("loop1048575")
	wantError(t, err, loop.ErrNotAttached)
}

func reused(t *testing.T, b *bench) {
	f, other := b.file(t, "a", mib), b.file(t, "b", mib)
	d := b.attach(t, f, loop.Options{})
	stale := d
	stale.Backing = other.ID()
	must(t, b.Detach(t.Context(), stale))
	b.expect(t, f, d)
	_, err := b.Grow(stale)
	wantError(t, err, loop.ErrNotAttached)
}

func busy(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	release := b.Hold(t, d)
	wantError(t, b.Detach(t.Context(), d), loop.ErrBusy)
	b.expect(t, f, d)
	release()
	b.expect(t, f, d)
	must(t, b.Detach(t.Context(), d))
	b.expect(t, f)
}

func grow(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	release := b.Hold(t, d)
	defer release()
	must(t, f.Grow(t.Context(), 3*mib, loop.Thick))
	b.expect(t, f, d)
	got, err := b.Grow(d)
	must(t, err)
	d.SizeBytes = 3 * mib
	if got != d {
		t.Errorf("grown to %+v, want %+v", got, d)
	}
	b.expect(t, f, d)
}

func growDetached(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	must(t, b.Detach(t.Context(), d))
	_, err := b.Grow(d)
	wantError(t, err, loop.ErrNotAttached)
}

func foreign(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.Foreign(t, f, false)
	if d.Ours || d.ReadOnly {
		t.Errorf("another's device is %+v", d)
	}
	b.expect(t, f, d)
	_, err := b.Attach(f, loop.Options{})
	wantError(t, err, loop.ErrForeign)
	_, err = b.Grow(d)
	wantError(t, err, loop.ErrForeign)
	wantError(t, b.Detach(t.Context(), d), loop.ErrForeign)
	b.expect(t, f, d)
	if r := b.attach(t, f, loop.Options{ReadOnly: true}); !r.Ours {
		t.Errorf("attached %+v, want one of ours", r)
	}
}

func foreignReadOnly(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	theirs := b.Foreign(t, f, true)
	for _, readOnly := range []bool{false, true} {
		if d := b.attach(t, f, loop.Options{ReadOnly: readOnly}); !d.Ours || d.Name == theirs.Name || d.ReadOnly != readOnly {
			t.Errorf("attached %+v, want one of ours", d)
		}
	}
}

func ending(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	release := b.Hold(t, d)
	b.End(t, d)
	about := d
	about.Ending = true
	b.expect(t, f, about)
	if got := b.attach(t, f, loop.Options{}); got != d {
		t.Errorf("attached %+v, want %+v", got, d)
	}
	release()
	b.expect(t, f, d)
}

func ended(t *testing.T, b *bench) {
	f := b.file(t, "a", mib)
	d := b.attach(t, f, loop.Options{})
	release := b.Hold(t, d)
	b.End(t, d)
	release()
	// The kernel does not tell when whoever looks at all devices has let go of it.
	for deadline := time.Now().Add(10 * time.Second); len(b.of(t, f)) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s still has the devices %+v", f, b.of(t, f))
		}
	}
	b.expect(t, f, b.attach(t, f, loop.Options{}))
}

func size(t *testing.T, b *bench) {
	f, err := loop.Create(b.Root, "a")
	must(t, err)
	defer func() { must(t, f.Close()) }()
	_, err = b.Attach(f, loop.Options{})
	wantError(t, err, loop.ErrSize)
	for _, bytes := range []int64{-loop.Unit, 0, 1, loop.Unit + 512} {
		wantError(t, f.Grow(t.Context(), bytes, loop.Thin), loop.ErrSize)
	}
	must(t, f.Grow(t.Context(), 2*loop.Unit, loop.Thin))
	wantError(t, f.Grow(t.Context(), loop.Unit, loop.Thin), loop.ErrSize)
	for _, block := range []int64{-512, 1, 511, 513, 8192} {
		_, err = b.Attach(f, loop.Options{BlockBytes: block})
		wantError(t, err, loop.ErrSize)
	}
	b.expect(t, f)
}

func block(t *testing.T, b *bench) {
	for _, bytes := range []int64{512, 4096} {
		f := b.file(t, strconv.FormatInt(bytes, 10), mib)
		if d := b.attach(t, f, loop.Options{BlockBytes: bytes}); d.BlockBytes != bytes {
			t.Errorf("a block of %d bytes, want %d", d.BlockBytes, bytes)
		}
	}
}

func discard(t *testing.T, b *bench) {
	kept, given := b.file(t, "kept", mib), b.file(t, "given", mib)
	if d := b.attach(t, kept, loop.Options{}); d.Discard {
		t.Error("a device takes discards that was not asked to")
	}
	if d := b.attach(t, given, loop.Options{Discard: true}); !d.Discard {
		t.Error("a device that was asked to take discards does not")
	}
	if d := b.attach(t, given, loop.Options{}); d.Discard {
		t.Error("a device takes discards although they were not asked for the second time")
	}
}

func atOnce(t *testing.T, b *bench) {
	const files = 12 // more than the eight that the kernel has from the start
	var wg sync.WaitGroup
	all := make([]*loop.File, files)
	for i := range all {
		all[i] = b.file(t, strconv.Itoa(i), mib)
	}
	names := make([]string, files)
	for i, f := range all {
		wg.Go(func() {
			d, err := b.Attach(f, loop.Options{ReadOnly: i%2 == 0})
			if err != nil || d.Backing != f.ID() {
				t.Errorf("attached %+v, %v", d, err)
			}
			names[i] = d.Name
		})
	}
	wg.Wait()
	seen := make(map[string]bool)
	for _, name := range names {
		if seen[name] {
			t.Errorf("%s was given twice", name)
		}
		seen[name] = true
	}
	for _, f := range all {
		wg.Go(func() {
			for _, d := range b.of(t, f) {
				if err := b.Detach(t.Context(), d); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, f := range all {
		b.expect(t, f)
	}
}

func node(t *testing.T, b *bench) {
	d := b.attach(t, b.file(t, "a", mib), loop.Options{})
	if there, err := b.Dev.Exists(d.Name); !there || err != nil {
		t.Errorf("%s has no node in %s: %v", d.Name, b.Dev, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantError(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("error %v, want %v", got, want)
	}
}
