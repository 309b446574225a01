package bindtest

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Publisher is the interface under test.
type Publisher interface {
	Publish(source *dir.Dir, target bind.Target, flags bind.Flags) error
	PublishDevice(dev *dir.Dir, name string, target bind.Target) error
	Unpublish(target bind.Target, of *dir.ID) error
	Open(target bind.Target) (*dir.Dir, error)
	Published(parent *dir.Dir) (map[string][]bind.Publication, error)
	SameFilesystem(a, b *dir.Dir) (bool, error)
	IsFilesystem(d *dir.Dir) (bool, error)
	Locate(d *dir.Dir) (bind.Place, error)
	MountRoot(d *dir.Dir, id bind.MountID) (bind.Place, error)
}

// A Subject is an implementation under test.
type Subject struct {
	Publisher
	// Stack adds a mount on top; Hold keeps a target busy.
	Stack func(t *testing.T, source *dir.Dir, target bind.Target)
	Hold  func(t *testing.T, target bind.Target) (release func())
	// Nodes creates a directory with the device nodes "one" and "two", the directory
	// "sub" and "link", a symbolic link to the first.
	Nodes func(t *testing.T) *dir.Dir
}

// Contract tests what every Publisher must do.
func Contract(t *testing.T, fresh func(t *testing.T) Subject) {
	for name, check := range map[string]func(*testing.T, *harness){
		"directory appears at its target":               publishedIsSeen,
		"publishing twice makes one mount":              twiceIsOne,
		"publishing again with other flags is refused":  otherFlags,
		"another directory at the target is refused":    otherDirectory,
		"target is a link":                              linkTarget,
		"target is a file":                              fileTarget,
		"target without a parent":                       noParent,
		"refused publish leaves no target":              nothingLeft,
		"unpublishing removes the target":               unpublishRemoves,
		"unpublishing a missing target succeeds":        unpublishMissing,
		"unpublishing removes an unused target":         unpublishUnused,
		"unpublishing keeps a directory with data":      unpublishKeepsData,
		"unpublishing keeps another directory's mount":  unpublishOther,
		"unpublishing removes stacked mounts":           unpublishStack,
		"busy mount and its data stay":                  busyStays,
		"several targets":                               severalTargets,
		"publication follows a renamed directory":       followsRename,
		"mount of a subdirectory is reported":           insideIsTold,
		"published device is reported by name":          deviceIsTold,
		"publishing a device twice makes one mount":     deviceTwice,
		"device with several targets":                   deviceTargets,
		"device's target is occupied":                   deviceOccupies,
		"device over a directory or data is refused":    deviceTargetTaken,
		"device's target is a link":                     deviceTargetLink,
		"not a device":                                  noDevice,
		"busy device stays published":                   deviceBusy,
		"unpublishing keeps another device":             deviceUnpublishOther,
		"unpublishing removes a device's unused target": deviceUnused,
		"same filesystem":                               sameFilesystem,
		"mounted filesystem":                            isFilesystem,
		"directory below another":                       below,
	} {
		t.Run(name, func(t *testing.T) { check(t, newHarness(t, fresh(t))) })
	}
}

type harness struct {
	Subject
	root string
	pool *dir.Dir
	vol  *dir.Dir
}

func newHarness(t *testing.T, s Subject) *harness {
	t.Helper()
	h := &harness{Subject: s, root: t.TempDir()}
	must.Succeed(t, os.MkdirAll(filepath.Join(h.root, "pool", "vol", "sub"), 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(h.root, "pool", "vol", "data"), []byte("kept"), 0o644))
	must.Succeed(t, os.MkdirAll(filepath.Join(h.root, "pool", "other"), 0o755))
	must.Succeed(t, os.Mkdir(filepath.Join(h.root, "pods"), 0o755))
	h.pool = open(t, filepath.Join(h.root, "pool"))
	h.vol = open(t, filepath.Join(h.root, "pool", "vol"))
	return h
}

func (h *harness) target(t *testing.T, name string) bind.Target {
	t.Helper()
	target, err := bind.ParseTarget(filepath.Join(h.root, "pods", name))
	must.Succeed(t, err)
	t.Cleanup(func() { _ = h.Unpublish(target, nil) })
	return target
}

func (h *harness) publish(t *testing.T, target bind.Target) {
	t.Helper()
	must.Succeed(t, h.Publish(h.vol, target, bind.Flags{}))
}

func (h *harness) names(t *testing.T) map[string][]bind.Publication {
	t.Helper()
	published, err := h.Published(h.pool)
	must.Succeed(t, err)
	return published
}

func (h *harness) expect(t *testing.T, want map[string][]bind.Publication) {
	t.Helper()
	byPath := cmpopts.SortSlices(func(a, b bind.Publication) bool { return a.Path < b.Path })
	if diff := cmp.Diff(want, h.names(t), byPath, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("published (-want +got):\n%s", diff)
	}
}

func publishedIsSeen(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	at, err := h.Open(target)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, at.Close()) }()
	got, err := at.ID()
	must.Succeed(t, err)
	want, err := h.vol.ID()
	must.Succeed(t, err)
	if got != want {
		t.Errorf("the target is %v, want %v", got, want)
	}
	h.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
}

func twiceIsOne(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	h.publish(t, target)
	h.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
}

func otherFlags(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	must.ErrorIs(t, h.Publish(h.vol, target, bind.ReadOnly()), bind.ErrOccupied)
}

func otherDirectory(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	other := open(t, filepath.Join(h.root, "pool", "other"))
	must.ErrorIs(t, h.Publish(other, target, bind.Flags{}), bind.ErrOccupied)
}

func linkTarget(t *testing.T, h *harness) {
	target := h.target(t, "a")
	must.Succeed(t, os.Symlink(filepath.Join(h.root, "pool", "other"), target.String()))
	must.ErrorIs(t, h.Publish(h.vol, target, bind.Flags{}), bind.ErrTarget)
	must.ErrorIs(t, h.Unpublish(target, nil), bind.ErrTarget)
	_, err := h.Open(target)
	must.ErrorIs(t, err, bind.ErrTarget)
	h.expect(t, nil)
}

func fileTarget(t *testing.T, h *harness) {
	target := h.target(t, "a")
	must.Succeed(t, os.WriteFile(target.String(), []byte("x"), 0o644))
	must.ErrorIs(t, h.Publish(h.vol, target, bind.Flags{}), bind.ErrOccupied)
	must.ErrorIs(t, h.Unpublish(target, nil), bind.ErrOccupied)
}

func noParent(t *testing.T, h *harness) {
	target := h.target(t, "none/a")
	must.ErrorIs(t, h.Publish(h.vol, target, bind.Flags{}), bind.ErrTarget)
	_, err := h.Open(target)
	must.ErrorIs(t, err, fs.ErrNotExist)
}

func nothingLeft(t *testing.T, h *harness) {
	must.Succeed(t, h.vol.Close())
	target := h.target(t, "a")
	if err := h.Publish(h.vol, target, bind.Flags{}); err == nil {
		t.Fatal("a closed source was published")
	}
	wantGone(t, target)
}

func unpublishRemoves(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	id, err := h.vol.ID()
	must.Succeed(t, err)
	must.Succeed(t, h.Unpublish(target, &id))
	wantGone(t, target)
	h.expect(t, nil)
	h.wantData(t)
}

func unpublishMissing(t *testing.T, h *harness) {
	must.Succeed(t, h.Unpublish(h.target(t, "a"), nil))
	must.Succeed(t, h.Unpublish(h.target(t, "none/a"), nil))
}

func unpublishUnused(t *testing.T, h *harness) {
	target := h.target(t, "a")
	must.Succeed(t, os.Mkdir(target.String(), 0o750))
	must.Succeed(t, h.Unpublish(target, nil))
	wantGone(t, target)
}

func unpublishKeepsData(t *testing.T, h *harness) {
	target := h.target(t, "a")
	must.Succeed(t, os.Mkdir(target.String(), 0o750))
	must.Succeed(t, os.WriteFile(filepath.Join(target.String(), "precious"), nil, 0o644))
	must.ErrorIs(t, h.Unpublish(target, nil), bind.ErrOccupied)
	if _, err := os.Stat(filepath.Join(target.String(), "precious")); err != nil {
		t.Error(err)
	}
}

func unpublishOther(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	other, err := open(t, filepath.Join(h.root, "pool", "other")).ID()
	must.Succeed(t, err)
	must.ErrorIs(t, h.Unpublish(target, &other), bind.ErrOccupied)
	h.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
}

func unpublishStack(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	h.Stack(t, h.vol, target)
	must.Succeed(t, h.Unpublish(target, nil))
	wantGone(t, target)
	h.expect(t, nil)
	h.wantData(t)
}

func busyStays(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	release := h.Hold(t, target)
	must.ErrorIs(t, h.Unpublish(target, nil), bind.ErrBusy)
	h.wantData(t)
	h.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
	release()
	must.Succeed(t, h.Unpublish(target, nil))
	h.wantData(t)
}

func severalTargets(t *testing.T, h *harness) {
	one, two := h.target(t, "a"), h.target(t, "b")
	h.publish(t, one)
	must.Succeed(t, h.Publish(h.vol, two, bind.ReadOnly()))
	h.expect(t, map[string][]bind.Publication{"vol": {{Path: one.String()}, {Path: two.String(), ReadOnly: true}}})
	must.Succeed(t, h.Unpublish(one, nil))
	h.expect(t, map[string][]bind.Publication{"vol": {{Path: two.String(), ReadOnly: true}}})
}

func followsRename(t *testing.T, h *harness) {
	target := h.target(t, "a")
	h.publish(t, target)
	must.Succeed(t, h.pool.Rename("vol", h.pool, "moved"))
	h.expect(t, map[string][]bind.Publication{"moved": {{Path: target.String()}}})
}

func insideIsTold(t *testing.T, h *harness) {
	target := h.target(t, "a")
	must.Succeed(t, h.Publish(open(t, filepath.Join(h.root, "pool", "vol", "sub")), target, bind.Flags{}))
	h.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String(), Inside: "sub"}}})
}

func (h *harness) expectDevices(t *testing.T, dev *dir.Dir, want map[string][]bind.Publication) {
	t.Helper()
	got, err := h.Published(dev)
	must.Succeed(t, err)
	byPath := cmpopts.SortSlices(func(a, b bind.Publication) bool { return a.Path < b.Path })
	if diff := cmp.Diff(want, got, byPath, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("published devices (-want +got):\n%s", diff)
	}
}

func deviceIsTold(t *testing.T, h *harness) {
	dev, target := h.Nodes(t), h.target(t, "a")
	must.Succeed(t, h.PublishDevice(dev, "one", target))
	h.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
	h.expect(t, nil)
	must.Succeed(t, h.Unpublish(target, nil))
	wantGone(t, target)
	h.expectDevices(t, dev, nil)
	if there, err := dev.Exists("one"); !there || err != nil {
		t.Errorf("the node was removed with its publication: %v, %v", there, err)
	}
}

func deviceTwice(t *testing.T, h *harness) {
	dev, target := h.Nodes(t), h.target(t, "a")
	must.Succeed(t, h.PublishDevice(dev, "one", target))
	must.Succeed(t, h.PublishDevice(dev, "one", target))
	h.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
}

func deviceTargets(t *testing.T, h *harness) {
	dev, one, two, other := h.Nodes(t), h.target(t, "a"), h.target(t, "b"), h.target(t, "c")
	must.Succeed(t, h.PublishDevice(dev, "one", one))
	must.Succeed(t, h.PublishDevice(dev, "one", two))
	must.Succeed(t, h.PublishDevice(dev, "two", other))
	must.Succeed(t, h.Unpublish(one, nil))
	h.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: two.String()}}, "two": {{Path: other.String()}}})
}

func deviceOccupies(t *testing.T, h *harness) {
	dev, device, directory := h.Nodes(t), h.target(t, "a"), h.target(t, "b")
	must.Succeed(t, h.PublishDevice(dev, "one", device))
	must.ErrorIs(t, h.PublishDevice(dev, "two", device), bind.ErrOccupied)
	must.ErrorIs(t, h.Publish(h.vol, device, bind.Flags{}), bind.ErrOccupied)
	h.publish(t, directory)
	must.ErrorIs(t, h.PublishDevice(dev, "one", directory), bind.ErrOccupied)
	if _, err := h.Open(device); !errors.Is(err, bind.ErrTarget) {
		t.Errorf("opening the device as a directory: %v, want ErrTarget", err)
	}
	h.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: device.String()}}})
}

func deviceTargetTaken(t *testing.T, h *harness) {
	dev, directory, data, empty := h.Nodes(t), h.target(t, "a"), h.target(t, "b"), h.target(t, "c")
	must.Succeed(t, os.Mkdir(directory.String(), 0o750))
	must.Succeed(t, os.WriteFile(data.String(), []byte("kept"), 0o600))
	must.Succeed(t, os.WriteFile(empty.String(), nil, 0o600))
	must.ErrorIs(t, h.PublishDevice(dev, "one", directory), bind.ErrOccupied)
	must.ErrorIs(t, h.PublishDevice(dev, "one", data), bind.ErrOccupied)
	must.ErrorIs(t, h.PublishDevice(dev, "one", h.target(t, "none/a")), bind.ErrTarget)
	must.Succeed(t, h.PublishDevice(dev, "one", empty))
	if got, err := os.ReadFile(data.String()); string(got) != "kept" {
		t.Errorf("the file at the target: %q, %v", got, err)
	}
}

func deviceTargetLink(t *testing.T, h *harness) {
	dev, target := h.Nodes(t), h.target(t, "a")
	must.Succeed(t, os.Symlink(filepath.Join(h.root, "pool", "vol", "data"), target.String()))
	must.ErrorIs(t, h.PublishDevice(dev, "one", target), bind.ErrTarget)
	h.wantData(t)
}

func noDevice(t *testing.T, h *harness) {
	dev, target := h.Nodes(t), h.target(t, "a")
	for _, name := range []string{"sub", "link", "none", ".", "sub/..", "/dev/null"} {
		if err := h.PublishDevice(dev, name, target); err == nil {
			t.Errorf("%q was published", name)
		}
		wantGone(t, target)
	}
	must.ErrorIs(t, h.PublishDevice(dev, "sub", target), bind.ErrNotDevice)
	must.ErrorIs(t, h.PublishDevice(dev, "none", target), fs.ErrNotExist)
	must.ErrorIs(t, h.PublishDevice(dev, "sub/../one", target), dir.ErrName)
}

func deviceBusy(t *testing.T, h *harness) {
	dev, target := h.Nodes(t), h.target(t, "a")
	must.Succeed(t, h.PublishDevice(dev, "one", target))
	release := h.Hold(t, target)
	must.ErrorIs(t, h.Unpublish(target, nil), bind.ErrBusy)
	h.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
	release()
	must.Succeed(t, h.Unpublish(target, nil))
}

func deviceUnpublishOther(t *testing.T, h *harness) {
	dev, target := h.Nodes(t), h.target(t, "a")
	must.Succeed(t, h.PublishDevice(dev, "one", target))
	other, err := h.vol.ID()
	must.Succeed(t, err)
	must.ErrorIs(t, h.Unpublish(target, &other), bind.ErrOccupied)
	h.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
}

func deviceUnused(t *testing.T, h *harness) {
	target := h.target(t, "a")
	must.Succeed(t, os.WriteFile(target.String(), nil, 0o600))
	must.Succeed(t, h.Unpublish(target, nil))
	wantGone(t, target)
}

func sameFilesystem(t *testing.T, h *harness) {
	same, err := h.SameFilesystem(h.pool, h.vol)
	must.Succeed(t, err)
	if !same {
		t.Error("a directory and its child are reported on different filesystems")
	}
	same, err = h.SameFilesystem(h.pool, open(t, "/proc"))
	must.Succeed(t, err)
	if same {
		t.Error("/proc is reported on the pool's filesystem")
	}
}

func isFilesystem(t *testing.T, h *harness) {
	for path, want := range map[string]bool{filepath.Join(h.root, "pool"): false, "/proc": true} {
		got, err := h.IsFilesystem(open(t, path))
		must.Succeed(t, err)
		if got != want {
			t.Errorf("IsFilesystem(%s) = %v, want %v", path, got, want)
		}
	}
}

func below(t *testing.T, h *harness) {
	pool, err := h.Locate(h.pool)
	must.Succeed(t, err)
	vol, err := h.Locate(h.vol)
	must.Succeed(t, err)
	if got := vol.Below(pool); !slices.Contains(got, "vol") {
		t.Errorf("the volume is below the pool at %q, want it at vol", got)
	}
	for name, got := range map[string][]string{"the pool below its volume": pool.Below(vol), "the pool below itself": pool.Below(pool)} {
		if len(got) > 0 {
			t.Errorf("%s: %q, want nothing", name, got)
		}
	}
}

func (h *harness) wantData(t *testing.T) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(h.root, "pool", "vol", "data"))
	if err != nil || string(got) != "kept" {
		t.Errorf("the volume's data: %q, %v", got, err)
	}
}

func wantGone(t *testing.T, target bind.Target) {
	t.Helper()
	if _, err := os.Lstat(target.String()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is still there: %v", target, err)
	}
}

func open(t *testing.T, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}
