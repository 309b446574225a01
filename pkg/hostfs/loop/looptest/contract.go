package looptest

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Devices is what the contract is about.
type Devices interface {
	Attach(f *loop.File, o loop.Options) (loop.Device, error)
	Attached(fileNames ...string) ([]loop.Device, error)
	Inspect(name string) (loop.Device, error)
	FilePath(name string) (string, error)
	Grow(d loop.Device) (loop.Device, error)
	Detach(ctx context.Context, d loop.Device) error
	Restore(d loop.Device) (loop.Device, error)
	OnDeleted(fileName string) ([]loop.Device, error)
}

// A Subject is one implementation under test.
type Subject struct {
	Devices
	// Root is an empty directory to make files in, and Dev that of the nodes.
	Root, Dev *dir.Dir
	// Again is what a program has that is started anew.
	Again func(t *testing.T) Devices
	// Foreign attaches a file as another program does, until the test ends.
	Foreign func(t *testing.T, f *loop.File, readOnly bool) loop.Device
	// Hold keeps a device open, as a user of it does.
	Hold func(t *testing.T, d loop.Device) (release func())
	// End has a device detached when no process holds it any more.
	End func(t *testing.T, d loop.Device)
	// Alter takes the mark off a device and has it show its file without the first loop.Unit, as a user of it can.
	Alter func(t *testing.T, d loop.Device)
}

const mib = 1 << 20

// Contract is what every implementation keeps.
func Contract(t *testing.T, fresh func(t *testing.T) Subject) {
	for name, check := range map[string]func(*testing.T, *harness){
		"attached device is described":                  attachedTells,
		"attaching twice makes one device":              twiceIsOne,
		"read-only devices are not shared":              readOnly,
		"altered device is restored":                    restored,
		"altered device is kept while mounted":          alteredWhileMounted,
		"device that ended while mounted is not reused": endedWhileMounted,
		"each file has its own device":                  ownDevices,
		"device is found after a restart":               foundAgain,
		"device survives unlink of its file":            unlinked,
		"detach, and detach again":                      detached,
		"reused device is not detached":                 reused,
		"busy device stays attached":                    busy,
		"device grows with its file":                    grow,
		"detached device does not grow":                 growDetached,
		"foreign device is reported, never modified":    foreign,
		"foreign read-only device is ignored":           foreignReadOnly,
		"attach keeps an ending device":                 ending,
		"ended device is attached again":                ended,
		"bad file size is refused":                      size,
		"block size":                                    block,
		"discards only on request":                      discard,
		"concurrent attaches":                           atOnce,
		"device has a node":                             node,
	} {
		t.Run(name, func(t *testing.T) { check(t, &harness{Subject: fresh(t)}) })
	}
}

type harness struct{ Subject }

// file makes a file of a size, whose devices are detached when the test ends.
func (h *harness) file(t *testing.T, name string, bytes int64) *loop.File {
	t.Helper()
	f, err := loop.Create(h.Root, name)
	must.Succeed(t, err)
	t.Cleanup(func() {
		for _, d := range h.of(t, f) {
			if d.Ours {
				must.Succeed(t, h.Detach(context.WithoutCancel(t.Context()), d))
			}
		}
		must.Succeed(t, f.Close())
	})
	must.Succeed(t, f.Grow(t.Context(), bytes, loop.Thin))
	return f
}

func (h *harness) attach(t *testing.T, f *loop.File, o loop.Options) loop.Device {
	t.Helper()
	d, err := h.Attach(f, o)
	must.Succeed(t, err)
	return d
}

// of are the devices of a file.
func (h *harness) of(t *testing.T, f *loop.File) []loop.Device {
	t.Helper()
	all, err := h.Attached()
	must.Succeed(t, err)
	var devices []loop.Device
	for _, d := range all {
		if d.Backing == f.ID() {
			devices = append(devices, d)
		}
	}
	return devices
}

func (h *harness) expect(t *testing.T, f *loop.File, want ...loop.Device) {
	t.Helper()
	if diff := cmp.Diff(want, h.of(t, f)); diff != "" {
		t.Errorf("devices of %s (-want +got):\n%s", f, diff)
	}
}

func attachedTells(t *testing.T, h *harness) {
	f := h.file(t, "a", 2*mib)
	h.expect(t, f)
	d := h.attach(t, f, loop.Options{})
	want := loop.Device{
		Name: d.Name, Major: 7, Minor: d.Minor, // whichever was free
		BlockBytes: d.BlockBytes, DirectIO: d.DirectIO, // whatever the filesystem allows
		Backing: f.ID(), SizeBytes: 2 * mib, Ours: true,
	}
	if diff := cmp.Diff(want, d); diff != "" {
		t.Errorf("device (-want +got):\n%s", diff)
	}
	h.expect(t, f, d)
	got, err := h.Inspect(d.Name)
	if got != d || err != nil {
		t.Errorf("Inspect = %+v, %v; want %+v", got, err, d)
	}
}

func twiceIsOne(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	if again := h.attach(t, f, loop.Options{}); again != d {
		t.Errorf("the second time %+v, want %+v", again, d)
	}
	h.expect(t, f, d)
}

func readOnly(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	r := h.attach(t, f, loop.Options{ReadOnly: true})
	w := h.attach(t, f, loop.Options{})
	if !r.ReadOnly || w.ReadOnly || r.Name == w.Name || r.BlockBytes != w.BlockBytes {
		t.Errorf("devices %+v and %+v, want two, of which the first is read-only", r, w)
	}
	other := h.attach(t, f, loop.Options{ReadOnly: true})
	if !other.ReadOnly || other.Name == r.Name {
		t.Errorf("the second time %+v, want another than %+v", other, r)
	}
	must.Succeed(t, h.Detach(t.Context(), w))
	must.Succeed(t, h.Detach(t.Context(), other))
	h.expect(t, f, r)
}

// mounted has these devices mounted.
func mounted(devices ...loop.Device) func() (map[string]bool, error) {
	names := make(map[string]bool)
	for _, d := range devices {
		names[d.Name] = true
	}
	return func() (map[string]bool, error) { return names, nil }
}

// alter returns what is seen of a device that was altered.
func (h *harness) alter(t *testing.T, d loop.Device) loop.Device {
	t.Helper()
	h.Alter(t, d)
	d.Ours, d.SizeBytes = false, d.SizeBytes-loop.Unit
	return d
}

func restored(t *testing.T, h *harness) {
	f, other := h.file(t, "a", mib), h.file(t, "b", mib)
	d := h.attach(t, f, loop.Options{})
	altered := h.alter(t, d)
	h.expect(t, f, altered)
	stale := altered
	stale.Backing = other.ID()
	_, err := h.Restore(stale)
	must.ErrorIs(t, err, loop.ErrNotAttached)
	h.expect(t, f, altered)
	got, err := h.Restore(altered)
	must.Succeed(t, err)
	if got != d {
		t.Errorf("restored to %+v, want %+v", got, d)
	}
	h.expect(t, f, d)
	must.Succeed(t, h.Detach(t.Context(), got))
	_, err = h.Restore(got)
	must.ErrorIs(t, err, loop.ErrNotAttached)
}

func alteredWhileMounted(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	h.Alter(t, d)
	_, err := h.Attach(f, loop.Options{})
	must.ErrorIs(t, err, loop.ErrForeign)
	if got := h.attach(t, f, loop.Options{Mounted: mounted(d)}); got != d {
		t.Errorf("attached %+v, want %+v", got, d)
	}
	h.expect(t, f, d)
}

func endedWhileMounted(t *testing.T, h *harness) {
	f, other := h.file(t, "a", mib), h.file(t, "b", mib)
	d := h.attach(t, f, loop.Options{})
	must.Succeed(t, h.Detach(t.Context(), d))
	for _, readOnly := range []bool{false, true} {
		if got := h.attach(t, other, loop.Options{ReadOnly: readOnly, Mounted: mounted(d)}); got.Name == d.Name {
			t.Errorf("another file got %s, which is mounted", got.Name)
		}
	}
}

func ownDevices(t *testing.T, h *harness) {
	one, two := h.file(t, "a", mib), h.file(t, "b", mib)
	d, e := h.attach(t, one, loop.Options{}), h.attach(t, two, loop.Options{})
	h.expect(t, one, d)
	h.expect(t, two, e)
	must.Succeed(t, h.Detach(t.Context(), d))
	h.expect(t, one)
	h.expect(t, two, e)
}

func foundAgain(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	elsewhere, err := h.Root.Make("elsewhere")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, elsewhere.Close()) }()
	must.Succeed(t, h.Root.Rename("a", elsewhere, "b"))
	h.file(t, "a", mib) // has the name, and is not the file

	moved, err := loop.Open(elsewhere, "b")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, moved.Close()) }()
	again := harness{h.Subject}
	again.Devices = h.Again(t)
	again.expect(t, f, d)
	if got := again.attach(t, moved, loop.Options{}); got != d {
		t.Errorf("attached %+v, want %+v", got, d)
	}
	must.Succeed(t, again.Detach(t.Context(), d))
	h.expect(t, f)
}

func unlinked(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	kept := h.file(t, "kept", mib)
	h.attach(t, kept, loop.Options{})
	path := h.Root.String() + "/a"
	for range 2 {
		if got, err := h.FilePath(d.Name); err != nil || got != path {
			t.Errorf("FilePath = %s, %v; want %s", got, err, path)
		}
		if err := h.Root.Remove("a"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	h.expect(t, f, d)
	d.FormerPath = path
	for name, want := range map[string][]loop.Device{"a": {d}, "kept": nil, "other": nil} {
		found, err := h.OnDeleted(name)
		must.Succeed(t, err)
		found = slices.DeleteFunc(found, func(other loop.Device) bool { return other.Name != d.Name })
		if diff := cmp.Diff(want, found, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("devices on deleted files with the name %s (-want +got):\n%s", name, diff)
		}
	}
	must.Succeed(t, h.Detach(t.Context(), d))
	h.expect(t, f)
}

func detached(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	must.Succeed(t, h.Detach(t.Context(), d))
	h.expect(t, f)
	if got, err := h.Inspect(d.Name); err == nil && got.Backing == f.ID() || err != nil && !errors.Is(err, loop.ErrNotAttached) {
		t.Errorf("Inspect = %+v, %v; want ErrNotAttached", got, err)
	}
	must.Succeed(t, h.Detach(t.Context(), d))
	_, err := h.Inspect("loop1048575")
	must.ErrorIs(t, err, loop.ErrNotAttached)
	_, err = h.FilePath("loop1048575")
	must.ErrorIs(t, err, loop.ErrNotAttached)
}

func reused(t *testing.T, h *harness) {
	f, other := h.file(t, "a", mib), h.file(t, "b", mib)
	d := h.attach(t, f, loop.Options{})
	stale := d
	stale.Backing = other.ID()
	must.Succeed(t, h.Detach(t.Context(), stale))
	h.expect(t, f, d)
	_, err := h.Grow(stale)
	must.ErrorIs(t, err, loop.ErrNotAttached)
}

func busy(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	release := h.Hold(t, d)
	must.ErrorIs(t, h.Detach(t.Context(), d), loop.ErrBusy)
	h.expect(t, f, d)
	release()
	h.expect(t, f, d)
	must.Succeed(t, h.Detach(t.Context(), d))
	h.expect(t, f)
}

func grow(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	release := h.Hold(t, d)
	defer release()
	must.Succeed(t, f.Grow(t.Context(), 3*mib, loop.Thick))
	h.expect(t, f, d)
	got, err := h.Grow(d)
	must.Succeed(t, err)
	d.SizeBytes = 3 * mib
	if got != d {
		t.Errorf("grown to %+v, want %+v", got, d)
	}
	h.expect(t, f, d)
}

func growDetached(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	must.Succeed(t, h.Detach(t.Context(), d))
	_, err := h.Grow(d)
	must.ErrorIs(t, err, loop.ErrNotAttached)
}

func foreign(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.Foreign(t, f, false)
	if d.Ours || d.ReadOnly {
		t.Errorf("another's device is %+v", d)
	}
	h.expect(t, f, d)
	_, err := h.Attach(f, loop.Options{})
	must.ErrorIs(t, err, loop.ErrForeign)
	_, err = h.Grow(d)
	must.ErrorIs(t, err, loop.ErrForeign)
	must.ErrorIs(t, h.Detach(t.Context(), d), loop.ErrForeign)
	h.expect(t, f, d)
	if r := h.attach(t, f, loop.Options{ReadOnly: true}); !r.Ours {
		t.Errorf("attached %+v, want one of ours", r)
	}
}

func foreignReadOnly(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	theirs := h.Foreign(t, f, true)
	for _, readOnly := range []bool{false, true} {
		if d := h.attach(t, f, loop.Options{ReadOnly: readOnly}); !d.Ours || d.Name == theirs.Name || d.ReadOnly != readOnly {
			t.Errorf("attached %+v, want one of ours", d)
		}
	}
}

func ending(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	release := h.Hold(t, d)
	h.End(t, d)
	about := d
	about.Ending = true
	h.expect(t, f, about)
	if got := h.attach(t, f, loop.Options{}); got != d {
		t.Errorf("attached %+v, want %+v", got, d)
	}
	release()
	h.expect(t, f, d)
}

func ended(t *testing.T, h *harness) {
	f := h.file(t, "a", mib)
	d := h.attach(t, f, loop.Options{})
	release := h.Hold(t, d)
	h.End(t, d)
	release()
	// The kernel does not report when a program that opens all devices has closed it.
	for deadline := time.Now().Add(10 * time.Second); len(h.of(t, f)) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s still has the devices %+v", f, h.of(t, f))
		}
	}
	h.expect(t, f, h.attach(t, f, loop.Options{}))
}

func size(t *testing.T, h *harness) {
	f, err := loop.Create(h.Root, "a")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, f.Close()) }()
	_, err = h.Attach(f, loop.Options{})
	must.ErrorIs(t, err, loop.ErrSize)
	for _, bytes := range []int64{-loop.Unit, 0, 1, loop.Unit + 512} {
		must.ErrorIs(t, f.Grow(t.Context(), bytes, loop.Thin), loop.ErrSize)
	}
	must.Succeed(t, f.Grow(t.Context(), 2*loop.Unit, loop.Thin))
	must.ErrorIs(t, f.Grow(t.Context(), loop.Unit, loop.Thin), loop.ErrSize)
	for _, block := range []int64{-512, 1, 511, 513, 8192} {
		_, err = h.Attach(f, loop.Options{BlockBytes: block})
		must.ErrorIs(t, err, loop.ErrSize)
	}
	h.expect(t, f)
}

func block(t *testing.T, h *harness) {
	for _, bytes := range []int64{512, 4096} {
		f := h.file(t, strconv.FormatInt(bytes, 10), mib)
		if d := h.attach(t, f, loop.Options{BlockBytes: bytes}); d.BlockBytes != bytes {
			t.Errorf("a block of %d bytes, want %d", d.BlockBytes, bytes)
		}
	}
}

func discard(t *testing.T, h *harness) {
	kept, given := h.file(t, "kept", mib), h.file(t, "given", mib)
	if d := h.attach(t, kept, loop.Options{}); d.Discard {
		t.Error("a device takes discards that was not asked to")
	}
	if d := h.attach(t, given, loop.Options{Discard: true}); !d.Discard {
		t.Error("a device that was asked to take discards does not")
	}
	if d := h.attach(t, given, loop.Options{}); d.Discard {
		t.Error("a device takes discards although they were not asked for the second time")
	}
}

func atOnce(t *testing.T, h *harness) {
	const files = 12 // more than the eight that the kernel has from the start
	var wg sync.WaitGroup
	all := make([]*loop.File, files)
	for i := range all {
		all[i] = h.file(t, strconv.Itoa(i), mib)
	}
	names := make([]string, files)
	for i, f := range all {
		wg.Go(func() {
			d, err := h.Attach(f, loop.Options{ReadOnly: i%2 == 0})
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
			for _, d := range h.of(t, f) {
				if err := h.Detach(t.Context(), d); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, f := range all {
		h.expect(t, f)
	}
}

func node(t *testing.T, h *harness) {
	d := h.attach(t, h.file(t, "a", mib), loop.Options{})
	if there, err := h.Dev.Exists(d.Name); !there || err != nil {
		t.Errorf("%s has no node in %s: %v", d.Name, h.Dev, err)
	}
}
