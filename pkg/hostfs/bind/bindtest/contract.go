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
	for name, check := range map[string]func(*testing.T, *bench){
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
		t.Run(name, func(t *testing.T) { check(t, newBench(t, fresh(t))) })
	}
}

type bench struct {
	Subject
	root string
	pool *dir.Dir
	vol  *dir.Dir
}

func newBench(t *testing.T, s Subject) *bench {
	t.Helper()
	b := &bench{Subject: s, root: t.TempDir()}
	must.Succeed(t, os.MkdirAll(filepath.Join(b.root, "pool", "vol", "sub"), 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(b.root, "pool", "vol", "data"), []byte("kept"), 0o644))
	must.Succeed(t, os.MkdirAll(filepath.Join(b.root, "pool", "other"), 0o755))
	must.Succeed(t, os.Mkdir(filepath.Join(b.root, "pods"), 0o755))
	b.pool = open(t, filepath.Join(b.root, "pool"))
	b.vol = open(t, filepath.Join(b.root, "pool", "vol"))
	return b
}

func (b *bench) target(t *testing.T, name string) bind.Target {
	t.Helper()
	target, err := bind.ParseTarget(filepath.Join(b.root, "pods", name))
	must.Succeed(t, err)
	t.Cleanup(func() { _ = b.Unpublish(target, nil) })
	return target
}

func (b *bench) publish(t *testing.T, target bind.Target) {
	t.Helper()
	must.Succeed(t, b.Publish(b.vol, target, bind.Flags{}))
}

func (b *bench) names(t *testing.T) map[string][]bind.Publication {
	t.Helper()
	published, err := b.Published(b.pool)
	must.Succeed(t, err)
	return published
}

func (b *bench) expect(t *testing.T, want map[string][]bind.Publication) {
	t.Helper()
	byPath := cmpopts.SortSlices(func(a, b bind.Publication) bool { return a.Path < b.Path })
	if diff := cmp.Diff(want, b.names(t), byPath, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("published (-want +got):\n%s", diff)
	}
}

func publishedIsSeen(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	at, err := b.Open(target)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, at.Close()) }()
	got, err := at.ID()
	must.Succeed(t, err)
	want, err := b.vol.ID()
	must.Succeed(t, err)
	if got != want {
		t.Errorf("the target is %v, want %v", got, want)
	}
	b.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
}

func twiceIsOne(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	b.publish(t, target)
	b.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
}

func otherFlags(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	must.ErrorIs(t, b.Publish(b.vol, target, bind.ReadOnly()), bind.ErrOccupied)
}

func otherDirectory(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	other := open(t, filepath.Join(b.root, "pool", "other"))
	must.ErrorIs(t, b.Publish(other, target, bind.Flags{}), bind.ErrOccupied)
}

func linkTarget(t *testing.T, b *bench) {
	target := b.target(t, "a")
	must.Succeed(t, os.Symlink(filepath.Join(b.root, "pool", "other"), target.String()))
	must.ErrorIs(t, b.Publish(b.vol, target, bind.Flags{}), bind.ErrTarget)
	must.ErrorIs(t, b.Unpublish(target, nil), bind.ErrTarget)
	_, err := b.Open(target)
	must.ErrorIs(t, err, bind.ErrTarget)
	b.expect(t, nil)
}

func fileTarget(t *testing.T, b *bench) {
	target := b.target(t, "a")
	must.Succeed(t, os.WriteFile(target.String(), []byte("x"), 0o644))
	must.ErrorIs(t, b.Publish(b.vol, target, bind.Flags{}), bind.ErrOccupied)
	must.ErrorIs(t, b.Unpublish(target, nil), bind.ErrOccupied)
}

func noParent(t *testing.T, b *bench) {
	target := b.target(t, "none/a")
	must.ErrorIs(t, b.Publish(b.vol, target, bind.Flags{}), bind.ErrTarget)
	_, err := b.Open(target)
	must.ErrorIs(t, err, fs.ErrNotExist)
}

func nothingLeft(t *testing.T, b *bench) {
	must.Succeed(t, b.vol.Close())
	target := b.target(t, "a")
	if err := b.Publish(b.vol, target, bind.Flags{}); err == nil {
		t.Fatal("a closed source was published")
	}
	wantGone(t, target)
}

func unpublishRemoves(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	id, err := b.vol.ID()
	must.Succeed(t, err)
	must.Succeed(t, b.Unpublish(target, &id))
	wantGone(t, target)
	b.expect(t, nil)
	b.wantData(t)
}

func unpublishMissing(t *testing.T, b *bench) {
	must.Succeed(t, b.Unpublish(b.target(t, "a"), nil))
	must.Succeed(t, b.Unpublish(b.target(t, "none/a"), nil))
}

func unpublishUnused(t *testing.T, b *bench) {
	target := b.target(t, "a")
	must.Succeed(t, os.Mkdir(target.String(), 0o750))
	must.Succeed(t, b.Unpublish(target, nil))
	wantGone(t, target)
}

func unpublishKeepsData(t *testing.T, b *bench) {
	target := b.target(t, "a")
	must.Succeed(t, os.Mkdir(target.String(), 0o750))
	must.Succeed(t, os.WriteFile(filepath.Join(target.String(), "precious"), nil, 0o644))
	must.ErrorIs(t, b.Unpublish(target, nil), bind.ErrOccupied)
	if _, err := os.Stat(filepath.Join(target.String(), "precious")); err != nil {
		t.Error(err)
	}
}

func unpublishOther(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	other, err := open(t, filepath.Join(b.root, "pool", "other")).ID()
	must.Succeed(t, err)
	must.ErrorIs(t, b.Unpublish(target, &other), bind.ErrOccupied)
	b.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
}

func unpublishStack(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	b.Stack(t, b.vol, target)
	must.Succeed(t, b.Unpublish(target, nil))
	wantGone(t, target)
	b.expect(t, nil)
	b.wantData(t)
}

func busyStays(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	release := b.Hold(t, target)
	must.ErrorIs(t, b.Unpublish(target, nil), bind.ErrBusy)
	b.wantData(t)
	b.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String()}}})
	release()
	must.Succeed(t, b.Unpublish(target, nil))
	b.wantData(t)
}

func severalTargets(t *testing.T, b *bench) {
	one, two := b.target(t, "a"), b.target(t, "b")
	b.publish(t, one)
	must.Succeed(t, b.Publish(b.vol, two, bind.ReadOnly()))
	b.expect(t, map[string][]bind.Publication{"vol": {{Path: one.String()}, {Path: two.String(), ReadOnly: true}}})
	must.Succeed(t, b.Unpublish(one, nil))
	b.expect(t, map[string][]bind.Publication{"vol": {{Path: two.String(), ReadOnly: true}}})
}

func followsRename(t *testing.T, b *bench) {
	target := b.target(t, "a")
	b.publish(t, target)
	must.Succeed(t, b.pool.Rename("vol", b.pool, "moved"))
	b.expect(t, map[string][]bind.Publication{"moved": {{Path: target.String()}}})
}

func insideIsTold(t *testing.T, b *bench) {
	target := b.target(t, "a")
	must.Succeed(t, b.Publish(open(t, filepath.Join(b.root, "pool", "vol", "sub")), target, bind.Flags{}))
	b.expect(t, map[string][]bind.Publication{"vol": {{Path: target.String(), Inside: "sub"}}})
}

func (b *bench) expectDevices(t *testing.T, dev *dir.Dir, want map[string][]bind.Publication) {
	t.Helper()
	got, err := b.Published(dev)
	must.Succeed(t, err)
	byPath := cmpopts.SortSlices(func(a, b bind.Publication) bool { return a.Path < b.Path })
	if diff := cmp.Diff(want, got, byPath, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("published devices (-want +got):\n%s", diff)
	}
}

func deviceIsTold(t *testing.T, b *bench) {
	dev, target := b.Nodes(t), b.target(t, "a")
	must.Succeed(t, b.PublishDevice(dev, "one", target))
	b.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
	b.expect(t, nil)
	must.Succeed(t, b.Unpublish(target, nil))
	wantGone(t, target)
	b.expectDevices(t, dev, nil)
	if there, err := dev.Exists("one"); !there || err != nil {
		t.Errorf("the node was removed with its publication: %v, %v", there, err)
	}
}

func deviceTwice(t *testing.T, b *bench) {
	dev, target := b.Nodes(t), b.target(t, "a")
	must.Succeed(t, b.PublishDevice(dev, "one", target))
	must.Succeed(t, b.PublishDevice(dev, "one", target))
	b.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
}

func deviceTargets(t *testing.T, b *bench) {
	dev, one, two, other := b.Nodes(t), b.target(t, "a"), b.target(t, "b"), b.target(t, "c")
	must.Succeed(t, b.PublishDevice(dev, "one", one))
	must.Succeed(t, b.PublishDevice(dev, "one", two))
	must.Succeed(t, b.PublishDevice(dev, "two", other))
	must.Succeed(t, b.Unpublish(one, nil))
	b.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: two.String()}}, "two": {{Path: other.String()}}})
}

func deviceOccupies(t *testing.T, b *bench) {
	dev, device, directory := b.Nodes(t), b.target(t, "a"), b.target(t, "b")
	must.Succeed(t, b.PublishDevice(dev, "one", device))
	must.ErrorIs(t, b.PublishDevice(dev, "two", device), bind.ErrOccupied)
	must.ErrorIs(t, b.Publish(b.vol, device, bind.Flags{}), bind.ErrOccupied)
	b.publish(t, directory)
	must.ErrorIs(t, b.PublishDevice(dev, "one", directory), bind.ErrOccupied)
	if _, err := b.Open(device); !errors.Is(err, bind.ErrTarget) {
		t.Errorf("opening the device as a directory: %v, want ErrTarget", err)
	}
	b.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: device.String()}}})
}

func deviceTargetTaken(t *testing.T, b *bench) {
	dev, directory, data, empty := b.Nodes(t), b.target(t, "a"), b.target(t, "b"), b.target(t, "c")
	must.Succeed(t, os.Mkdir(directory.String(), 0o750))
	must.Succeed(t, os.WriteFile(data.String(), []byte("kept"), 0o600))
	must.Succeed(t, os.WriteFile(empty.String(), nil, 0o600))
	must.ErrorIs(t, b.PublishDevice(dev, "one", directory), bind.ErrOccupied)
	must.ErrorIs(t, b.PublishDevice(dev, "one", data), bind.ErrOccupied)
	must.ErrorIs(t, b.PublishDevice(dev, "one", b.target(t, "none/a")), bind.ErrTarget)
	must.Succeed(t, b.PublishDevice(dev, "one", empty))
	if got, err := os.ReadFile(data.String()); string(got) != "kept" {
		t.Errorf("the file at the target: %q, %v", got, err)
	}
}

func deviceTargetLink(t *testing.T, b *bench) {
	dev, target := b.Nodes(t), b.target(t, "a")
	must.Succeed(t, os.Symlink(filepath.Join(b.root, "pool", "vol", "data"), target.String()))
	must.ErrorIs(t, b.PublishDevice(dev, "one", target), bind.ErrTarget)
	b.wantData(t)
}

func noDevice(t *testing.T, b *bench) {
	dev, target := b.Nodes(t), b.target(t, "a")
	for _, name := range []string{"sub", "link", "none", ".", "sub/..", "/dev/null"} {
		if err := b.PublishDevice(dev, name, target); err == nil {
			t.Errorf("%q was published", name)
		}
		wantGone(t, target)
	}
	must.ErrorIs(t, b.PublishDevice(dev, "sub", target), bind.ErrNotDevice)
	must.ErrorIs(t, b.PublishDevice(dev, "none", target), fs.ErrNotExist)
	must.ErrorIs(t, b.PublishDevice(dev, "sub/../one", target), dir.ErrName)
}

func deviceBusy(t *testing.T, b *bench) {
	dev, target := b.Nodes(t), b.target(t, "a")
	must.Succeed(t, b.PublishDevice(dev, "one", target))
	release := b.Hold(t, target)
	must.ErrorIs(t, b.Unpublish(target, nil), bind.ErrBusy)
	b.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
	release()
	must.Succeed(t, b.Unpublish(target, nil))
}

func deviceUnpublishOther(t *testing.T, b *bench) {
	dev, target := b.Nodes(t), b.target(t, "a")
	must.Succeed(t, b.PublishDevice(dev, "one", target))
	other, err := b.vol.ID()
	must.Succeed(t, err)
	must.ErrorIs(t, b.Unpublish(target, &other), bind.ErrOccupied)
	b.expectDevices(t, dev, map[string][]bind.Publication{"one": {{Path: target.String()}}})
}

func deviceUnused(t *testing.T, b *bench) {
	target := b.target(t, "a")
	must.Succeed(t, os.WriteFile(target.String(), nil, 0o600))
	must.Succeed(t, b.Unpublish(target, nil))
	wantGone(t, target)
}

func sameFilesystem(t *testing.T, b *bench) {
	same, err := b.SameFilesystem(b.pool, b.vol)
	must.Succeed(t, err)
	if !same {
		t.Error("a directory and its child are reported on different filesystems")
	}
	same, err = b.SameFilesystem(b.pool, open(t, "/proc"))
	must.Succeed(t, err)
	if same {
		t.Error("/proc is reported on the pool's filesystem")
	}
}

func isFilesystem(t *testing.T, b *bench) {
	for path, want := range map[string]bool{filepath.Join(b.root, "pool"): false, "/proc": true} {
		got, err := b.IsFilesystem(open(t, path))
		must.Succeed(t, err)
		if got != want {
			t.Errorf("IsFilesystem(%s) = %v, want %v", path, got, want)
		}
	}
}

func below(t *testing.T, b *bench) {
	pool, err := b.Locate(b.pool)
	must.Succeed(t, err)
	vol, err := b.Locate(b.vol)
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

func (b *bench) wantData(t *testing.T) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(b.root, "pool", "vol", "data"))
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
