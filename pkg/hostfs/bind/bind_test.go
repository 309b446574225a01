package bind_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestFakeContract(t *testing.T) {
	bindtest.Contract(t, func(t *testing.T) bindtest.Subject {
		fake := &bindtest.Fake{}
		t.Cleanup(func() { must.Succeed(t, fake.Close()) })
		return bindtest.Subject{
			Publisher: fake,
			Stack:     func(t *testing.T, source *dir.Dir, target bind.Target) { must.Succeed(t, fake.Stack(source, target)) },
			Hold:      func(_ *testing.T, target bind.Target) func() { return fake.Hold(target) },
			Nodes: func(t *testing.T) *dir.Dir {
				return nodes(t, t.TempDir(), func(path string) error { return os.WriteFile(path, nil, 0o600) })
			},
		}
	})
}

func TestKernelContract(t *testing.T) {
	testenv.NeedRoot(t)
	bindtest.Contract(t, func(t *testing.T) bindtest.Subject {
		return bindtest.Subject{Publisher: kernel(t), Stack: stack, Hold: hold, Nodes: deviceNodes}
	})
}

func kernel(t *testing.T) *bind.Kernel {
	t.Helper()
	k, err := bind.NewKernel()
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, k.Close()) })
	return k
}

func stack(t *testing.T, source *dir.Dir, target bind.Target) {
	t.Helper()
	must.Succeed(t, syscall.Mount(source.HandlePath(), target.String(), "", syscall.MS_BIND, ""))
}

func hold(t *testing.T, target bind.Target) func() {
	t.Helper()
	// O_PATH: the node's device may not exist.
	fd, err := unix.Open(target.String(), unix.O_PATH|unix.O_CLOEXEC, 0)
	must.Succeed(t, err)
	return func() { must.Succeed(t, unix.Close(fd)) }
}

// deviceNodes creates nodes of missing devices, on a nodev mount.
func deviceNodes(t *testing.T) *dir.Dir {
	t.Helper()
	path := testenv.Tmpfs(t, 1<<20)
	minor := uint32(1 << 19)
	d := nodes(t, path, func(path string) error {
		minor++
		return unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(240, minor))) // 240: local use
	})
	must.Succeed(t, syscall.Mount("", path, "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_NODEV, ""))
	return d
}

func nodes(t *testing.T, path string, mknod func(path string) error) *dir.Dir {
	t.Helper()
	must.Succeed(t, mknod(filepath.Join(path, "one")))
	must.Succeed(t, mknod(filepath.Join(path, "two")))
	must.Succeed(t, os.Mkdir(filepath.Join(path, "sub"), 0o755))
	must.Succeed(t, os.Symlink("one", filepath.Join(path, "link")))
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func TestParseTarget(t *testing.T) {
	for _, good := range []string{"/a", "/var/lib/kubelet/pods/x/mount", "/a/", "/a b/c"} {
		if _, err := bind.ParseTarget(good); err != nil {
			t.Errorf("ParseTarget(%q): %v", good, err)
		}
	}
	for _, bad := range []string{"", "/", "//", "a", "./a", "/a/../b", "/..", "/a/.", "/a//b", "/a\x00b", "/" + strings.Repeat("x", 4096)} {
		if target, err := bind.ParseTarget(bad); !errors.Is(err, bind.ErrTarget) {
			t.Errorf("ParseTarget(%q) = %q, %v; want ErrTarget", bad, target, err)
		}
	}
}

func TestParseFlags_errorNamesAllUnknown(t *testing.T) {
	_, err := bind.ParseFlags([]string{"ro", "uid=0", "noexec", "bind"})
	if !errors.Is(err, bind.ErrFlag) || !strings.Contains(err.Error(), `"uid=0", "bind"`) {
		t.Errorf("error %v, want one that names uid=0 and bind", err)
	}
}

// A harness is a volume on its own filesystem and a directory for targets.
type harness struct {
	kernel *bind.Kernel
	volume *dir.Dir
	pods   string
}

func newHarness(t *testing.T) harness {
	t.Helper()
	testenv.NeedRoot(t)
	volume := filepath.Join(testenv.Tmpfs(t, 1<<20), "volume")
	must.Succeed(t, os.Mkdir(volume, 0o777))
	must.Succeed(t, os.WriteFile(filepath.Join(volume, "program"), []byte("#!/bin/true\n"), 0o755))
	d, err := dir.Open(volume)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	return harness{kernel: kernel(t), volume: d, pods: t.TempDir()}
}

func (h harness) publish(t *testing.T, name string, flags ...string) bind.Target {
	t.Helper()
	target, err := bind.ParseTarget(filepath.Join(h.pods, name))
	must.Succeed(t, err)
	parsed, err := bind.ParseFlags(flags)
	must.Succeed(t, err)
	must.Succeed(t, h.kernel.Publish(h.volume, target, parsed))
	t.Cleanup(func() { must.Succeed(t, h.kernel.Unpublish(target, nil)) })
	return target
}

func TestPublish_flags(t *testing.T) {
	for _, c := range []struct {
		flags []string
		set   int64
		clear int64
	}{
		{nil, 0, syscall.MS_RDONLY | syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC},
		{[]string{"ro"}, syscall.MS_RDONLY, 0},
		{[]string{"ro", "rw"}, 0, syscall.MS_RDONLY},
		{[]string{"nosuid", "nodev", "noexec"}, syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC, syscall.MS_RDONLY},
		{[]string{"nosuid", "suid", "nodev", "dev", "noexec", "exec"}, 0, syscall.MS_NOSUID | syscall.MS_NODEV | syscall.MS_NOEXEC},
		{[]string{"noatime"}, syscall.MS_NOATIME, 0},
		{[]string{"strictatime"}, 0, syscall.MS_NOATIME},
		{[]string{"nodiratime"}, syscall.MS_NODIRATIME, 0},
	} {
		t.Run(strings.Join(c.flags, ","), func(t *testing.T) {
			h := newHarness(t)
			target := h.publish(t, "a", c.flags...)
			var st syscall.Statfs_t
			must.Succeed(t, syscall.Statfs(target.String(), &st))
			if st.Flags&c.set != c.set || st.Flags&c.clear != 0 {
				t.Errorf("mount flags %#x, want %#x set and %#x clear", st.Flags, c.set, c.clear)
			}
			// Publishing again adds no mount.
			h.publish(t, "a", c.flags...)
		})
	}
}

func TestPublish_readOnly(t *testing.T) {
	h := newHarness(t)
	readOnly, writable := h.publish(t, "ro", "ro"), h.publish(t, "rw")
	if err := os.WriteFile(filepath.Join(readOnly.String(), "file"), nil, 0o644); !errors.Is(err, syscall.EROFS) {
		t.Errorf("writing through the read-only publication: %v, want EROFS", err)
	}
	must.Succeed(t, os.WriteFile(filepath.Join(writable.String(), "file"), nil, 0o644))
}

// Kubelet publishes again what its running pods have when it was restarted. Meanwhile the pool can have been mounted otherwise.
func TestPublish_againAfterPoolWasRemounted(t *testing.T) {
	h := newHarness(t)
	plain, named, readOnly := h.publish(t, "plain"), h.publish(t, "named", "exec"), h.publish(t, "ro", "ro")
	pool := filepath.Dir(h.volume.String())
	must.Succeed(t, syscall.Mount("", pool, "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_NOEXEC|syscall.MS_NOATIME, ""))
	for target, names := range map[bind.Target][]string{plain: nil, named: {"exec"}, readOnly: {"ro"}} {
		flags, err := bind.ParseFlags(names)
		must.Succeed(t, err)
		must.Succeed(t, h.kernel.Publish(h.volume, target, flags))
	}
	must.ErrorIs(t, h.kernel.Publish(h.volume, readOnly, bind.Flags{}), bind.ErrOccupied)
	noexec, err := bind.ParseFlags([]string{"noexec"})
	must.Succeed(t, err)
	must.ErrorIs(t, h.kernel.Publish(h.volume, plain, noexec), bind.ErrOccupied)
}

func TestPublish_parentBehindLink(t *testing.T) {
	h := newHarness(t)
	link := filepath.Join(t.TempDir(), "kubelet")
	must.Succeed(t, os.Symlink(h.pods, link))
	target, err := bind.ParseTarget(filepath.Join(link, "a"))
	must.Succeed(t, err)
	must.Succeed(t, h.kernel.Publish(h.volume, target, bind.Flags{}))
	must.Succeed(t, h.kernel.Unpublish(target, nil))
}

func TestPublish_doesNotPropagateIntoPool(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, os.Mkdir(filepath.Join(h.volume.String(), "sub"), 0o755))
	// A pool is on a shared mount under systemd.
	must.Succeed(t, syscall.Mount("", filepath.Dir(h.volume.String()), "", syscall.MS_SHARED, ""))
	target := h.publish(t, "a")
	below := filepath.Join(target.String(), "sub")
	must.Succeed(t, syscall.Mount("tmpfs", below, "tmpfs", 0, ""))
	defer func() { must.Succeed(t, syscall.Unmount(below, 0)) }()
	var inPool, mounted syscall.Stat_t
	must.Succeed(t, syscall.Stat(filepath.Join(h.volume.String(), "sub"), &inPool))
	must.Succeed(t, syscall.Stat(below, &mounted))
	if inPool.Dev == mounted.Dev {
		t.Error("a mount below the publication appeared in the pool")
	}
}

// A hostPath volume at the pool's own path has such a mount.
func TestIsFilesystem_bindMount(t *testing.T) {
	h := newHarness(t)
	path := h.volume.String()
	must.Succeed(t, syscall.Mount(path, path, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(path, syscall.MNT_DETACH)) }()
	for at, want := range map[string]bool{path: false, filepath.Dir(path): true} {
		d, err := dir.Open(at)
		must.Succeed(t, err)
		got, err := h.kernel.IsFilesystem(d)
		must.Succeed(t, errors.Join(err, d.Close()))
		if got != want {
			t.Errorf("IsFilesystem(%s) = %v, want %v", at, got, want)
		}
	}
}

// In a container, what the host has mounted below a volume counts, and volumes do not.
func TestIsFilesystem_mountBelowVolume(t *testing.T) {
	k, root := kernel(t), testenv.Tmpfs(t, 1<<20) // the host
	container := t.TempDir()
	at := func(elements ...string) string { return filepath.Join(append([]string{root}, elements...)...) }
	for _, name := range []string{"disk/exports", "pool/csi", "pool/other", "pool/volume", "pool/late"} {
		must.Succeed(t, os.MkdirAll(at(name), 0o755))
	}
	mount := func(from, to string) {
		must.Succeed(t, syscall.Mount(from, to, "", syscall.MS_BIND, ""))
		t.Cleanup(func() { must.Succeed(t, syscall.Unmount(to, syscall.MNT_DETACH)) })
	}
	isFilesystem := func(path string) bool {
		d, err := dir.Open(path)
		must.Succeed(t, err)
		defer func() { must.Succeed(t, d.Close()) }()
		is, err := k.IsFilesystem(d)
		must.Succeed(t, err)
		return is
	}
	volume := filepath.Join(container, "pool")
	must.Succeed(t, os.Mkdir(volume, 0o755))
	mount(at("pool"), volume)                                    // kubelet
	mount(at("pool", "volume"), filepath.Join(volume, "volume")) // kubelet, a volume in a volume
	mount(at("disk", "exports"), filepath.Join(volume, "csi"))   // by propagation
	mount(filepath.Join(volume, "late"), filepath.Join(volume, "late"))
	mount(at("disk", "exports"), filepath.Join(volume, "late")) // the second on it
	for name, want := range map[string]bool{".": false, "csi": true, "other": false, "volume": false, "late": true} {
		if got := isFilesystem(filepath.Join(volume, name)); got != want {
			t.Errorf("IsFilesystem(%s) = %v, want %v", name, got, want)
		}
	}
}

// A directory is visible wherever its filesystem, or a part with the directory, is mounted.
func TestLocate(t *testing.T) {
	h := newHarness(t)
	root := t.TempDir()
	at := func(elements ...string) string { return filepath.Join(append([]string{root}, elements...)...) }
	for _, name := range []string{"outer/inside", "outer/disk", "outer-2", "disk", "own", "seen"} {
		must.Succeed(t, os.MkdirAll(at(name), 0o755))
	}
	mount := func(from, to, kind string, flags uintptr) {
		must.Succeed(t, syscall.Mount(from, to, kind, flags, ""))
		t.Cleanup(func() { must.Succeed(t, syscall.Unmount(to, 0)) })
	}
	mount("tmpfs", at("disk"), "tmpfs", 0)
	must.Succeed(t, os.Mkdir(at("disk", "dir"), 0o755))
	mount(at("disk"), at("outer", "disk"), "", syscall.MS_BIND)
	mount(at("outer", "inside"), at("seen"), "", syscall.MS_BIND)
	mount(at("outer"), at("outer", "inside"), "", syscall.MS_BIND) // in itself
	mount(at("own"), at("own"), "", syscall.MS_BIND)
	for _, test := range []struct{ inner, outer, below string }{
		{"seen", "outer", "inside"},
		{"disk/dir", "outer", "disk/dir"},
		{"disk", "outer", "disk"},
		{"outer/disk/dir", "disk", "dir"},
		{"outer/inside", "outer", "inside"},
		{"outer-2", "outer", ""},
		{"outer", "disk", ""},
		{"own", "outer", ""},
		{"outer", "own", ""},
	} {
		inner, outer := h.locate(t, at(test.inner)), h.locate(t, at(test.outer))
		if got := inner.Below(outer); (len(got) > 0) != (test.below != "") || len(got) > 0 && !slices.Contains(got, test.below) {
			t.Errorf("%s is below %s at %q, want %q", test.inner, test.outer, got, test.below)
		}
	}
}

// A directory mounted inside itself a dozen times has exponentially many paths.
func TestLocate_manyMountsInside(t *testing.T) {
	h := newHarness(t)
	root := t.TempDir()
	must.Succeed(t, os.Mkdir(filepath.Join(root, "inner"), 0o755))
	for i := range 12 {
		to := filepath.Join(root, strconv.Itoa(i))
		must.Succeed(t, os.Mkdir(to, 0o755))
		must.Succeed(t, syscall.Mount(root, to, "", syscall.MS_BIND, ""))
		t.Cleanup(func() { must.Succeed(t, syscall.Unmount(to, 0)) })
	}
	if got := h.locate(t, filepath.Join(root, "inner")).Below(h.locate(t, root)); !slices.Contains(got, "inner") || !slices.Contains(got, "7/inner") {
		t.Errorf("the inner directory is visible at %q", got)
	}
}

func (h *harness) locate(t *testing.T, path string) bind.Place {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	place, err := h.kernel.Locate(d)
	must.Succeed(t, errors.Join(err, d.Close()))
	return place
}

func TestIsFilesystem_btrfsSubvolume(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := testenv.LoopFS(t, "btrfs", 128<<20)
	if out, err := exec.CommandContext(t.Context(), "btrfs", "subvolume", "create", root+"/sub").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	at := t.TempDir()
	must.Succeed(t, syscall.Mount(root+"/sub", at, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(at, 0)) }()
	d, err := dir.Open(at)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	if got, err := kernel(t).IsFilesystem(d); !got || err != nil {
		t.Errorf("IsFilesystem of a mounted subvolume = %v, %v; want true", got, err)
	}
}

// The root of a btrfs and its subvolumes differ in st_dev, and a pool may be mounted twice.
func TestWithin(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := testenv.LoopFS(t, "btrfs", 128<<20)
	pool := filepath.Join(root, "pool")
	must.Succeed(t, os.MkdirAll(filepath.Join(root, "sibling"), 0o755))
	must.Succeed(t, os.MkdirAll(filepath.Join(pool, "directory", "sub"), 0o755))
	if out, err := exec.CommandContext(t.Context(), "btrfs", "subvolume", "create", pool+"/subvolume").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	again := t.TempDir()
	must.Succeed(t, syscall.Mount(pool, again, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(again, 0)) }()
	// What is mounted of the pool elsewhere is in it too, although ".." does not lead there.
	publication := t.TempDir()
	must.Succeed(t, syscall.Mount(pool+"/directory", publication, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(publication, 0)) }()
	sibling := t.TempDir()
	must.Succeed(t, syscall.Mount(root+"/sibling", sibling, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(sibling, 0)) }()
	// What is mounted in the pool from elsewhere is not, although ".." leads there.
	elsewhere := filepath.Join(pool, "elsewhere")
	must.Succeed(t, os.Mkdir(elsewhere, 0o755), os.Mkdir(filepath.Join(root, "sibling", "sub"), 0o755))
	must.Succeed(t, syscall.Mount(root+"/sibling", elsewhere, "", syscall.MS_BIND, ""))
	defer func() { must.Succeed(t, syscall.Unmount(elsewhere, 0)) }()
	k := kernel(t)
	opened, err := dir.Open(pool)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, opened.Close()) }()
	id, err := opened.ID()
	must.Succeed(t, err)
	place, err := k.Locate(opened)
	must.Succeed(t, err)
	for path, want := range map[string]int{
		publication + "/target":     1,
		publication + "/sub/target": 1,
		sibling + "/target":         -1,
		elsewhere + "/target":       -1,
		elsewhere + "/sub/target":   -1,
		pool:                        1, again: 1,
		pool + "/target":               1,
		pool + "/directory":            1,
		pool + "/directory/sub/target": 1,
		pool + "/subvolume/target":     1,
		again + "/target":              1,
		again + "/subvolume/target":    1,
		root + "/target":               -1,
		root + "/sibling/target":       -1,
		root + "/missing/target":       -1,
		t.TempDir() + "/target":        -1,
	} {
		target, err := bind.ParseTarget(path)
		must.Succeed(t, err)
		held, release, err := target.Hold()
		must.Succeed(t, err)
		for _, at := range []bind.Target{target, held} {
			got, err := at.Within([]bind.Root{{}, {ID: id, At: place}}, k.MountRoot)
			if got != want || err != nil {
				t.Errorf("%s is within %d, %v; want %d", path, got, err, want)
			}
		}
		release()
	}
}

// The kernel gives the numbers of mounts in the mount table again.
func TestWithinTakesNoMountForAnother(t *testing.T) {
	h := newHarness(t)
	inside, sibling := filepath.Join(h.volume.String(), "inside"), filepath.Join(filepath.Dir(h.volume.String()), "sibling")
	must.Succeed(t, os.Mkdir(inside, 0o755), os.Mkdir(sibling, 0o755))
	id, err := h.volume.ID()
	must.Succeed(t, err)
	at, err := h.kernel.Locate(h.volume)
	must.Succeed(t, err)
	pods := t.TempDir()
	target, err := bind.ParseTarget(pods + "/target")
	must.Succeed(t, err)
	for range 3 {
		for source, want := range map[string]int{sibling: -1, inside: 0} {
			must.Succeed(t, syscall.Mount(source, pods, "", syscall.MS_BIND, ""))
			for range 2 { // found in the table, and known
				if got, err := target.Within([]bind.Root{{ID: id, At: at}}, h.kernel.MountRoot); got != want || err != nil {
					t.Errorf("through a mount of %s: within %d, %v; want %d", source, got, err, want)
				}
			}
			must.Succeed(t, syscall.Unmount(pods, 0))
		}
	}
}

// A link into the pool that takes the parent's place after Within has found none is not followed.
func TestHeldTargetKeepsItsParent(t *testing.T) {
	h := newHarness(t)
	pods, away := filepath.Join(h.pods, "pods"), filepath.Join(h.pods, "away")
	must.Succeed(t, os.Mkdir(pods, 0o755))
	target, err := bind.ParseTarget(filepath.Join(pods, "a"))
	must.Succeed(t, err)
	held, release, err := target.Hold()
	must.Succeed(t, err)
	defer release()
	must.Succeed(t, os.Rename(pods, away), os.Symlink(h.volume.String(), pods))
	own, err := h.volume.ID()
	must.Succeed(t, err)
	for at, want := range map[bind.Target]int{held: -1, target: 0} {
		if got, err := at.Within([]bind.Root{{ID: own}}, h.kernel.MountRoot); got != want || err != nil {
			t.Errorf("within %d, %v; want %d", got, err, want)
		}
	}

	must.Succeed(t, h.kernel.Publish(h.volume, held, bind.Flags{}))
	must.Succeed(t, h.kernel.Publish(h.volume, held, bind.Flags{})) // the same again
	if _, err := os.Stat(filepath.Join(away, "a", "program")); err != nil {
		t.Errorf("the parent that was held: %v", err)
	}
	if there, err := h.volume.Exists("a"); there || err != nil {
		t.Errorf("the volume has the target: %v, %v", there, err)
	}
	must.Succeed(t, h.kernel.Unpublish(held, &own))
	if left, err := os.ReadDir(away); len(left) > 0 || err != nil {
		t.Errorf("after Unpublish the parent has %v, %v", left, err)
	}
}

func TestPublishDevice(t *testing.T) {
	h := newHarness(t)
	dev := deviceNodes(t)
	target, err := bind.ParseTarget(filepath.Join(h.pods, "device"))
	must.Succeed(t, err)
	must.Succeed(t, h.kernel.PublishDevice(dev, "one", target))
	t.Cleanup(func() { must.Succeed(t, h.kernel.Unpublish(target, nil)) })

	// ENXIO: there is no such device. EACCES would mean a nodev mount.
	if _, err := os.Open(target.String()); !errors.Is(err, syscall.ENXIO) {
		t.Errorf("opening the device: %v, want ENXIO", err)
	}
	var at, node unix.Stat_t
	must.Succeed(t, unix.Stat(target.String(), &at))
	must.Succeed(t, unix.Stat(filepath.Join(dev.String(), "one"), &node))
	if at.Rdev != node.Rdev || at.Mode != node.Mode {
		t.Errorf("at the target: device %#x with mode %o, want %#x with %o", at.Rdev, at.Mode, node.Rdev, node.Mode)
	}
	// The flags of dev may differ after a restart of the driver.
	must.Succeed(t, syscall.Mount("", dev.String(), "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_NOEXEC, ""))
	must.Succeed(t, h.kernel.PublishDevice(dev, "one", target))
	// A nodev mount is not a valid publication.
	must.Succeed(t, syscall.Mount("", target.String(), "", syscall.MS_REMOUNT|syscall.MS_BIND|syscall.MS_NODEV, ""))
	if err := h.kernel.PublishDevice(dev, "one", target); !errors.Is(err, bind.ErrOccupied) {
		t.Errorf("publishing over a nodev mount: %v, want ErrOccupied", err)
	}
}

// A file with data that replaces the empty file of a device is kept.
func TestUnpublish_swappedFileWithDataIsKept(t *testing.T) {
	k, root := kernel(t), t.TempDir()
	at, decoy := filepath.Join(root, "target"), filepath.Join(root, "decoy")
	target, err := bind.ParseTarget(at)
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(decoy, []byte("data"), 0o600))
	stop := swapped(t, at, decoy)
	for began := time.Now(); time.Since(began) < time.Second; {
		makeMissing(t, at, decoy)
		if err := k.Unpublish(target, nil); err != nil && !errors.Is(err, bind.ErrOccupied) {
			t.Error(err)
		}
	}
	stop()
	var found []string
	for _, path := range []string{at, decoy} {
		if data, err := os.ReadFile(path); err == nil && string(data) == "data" {
			found = append(found, path)
		}
	}
	if len(found) != 1 {
		t.Errorf("the data is at %q, want it at one of two", found)
	}
}

// swapped exchanges two names until it is stopped, and fails if no exchange succeeded.
func swapped(t *testing.T, a, b string) (stop func()) {
	t.Helper()
	end, times := make(chan struct{}), 0
	var work sync.WaitGroup
	work.Go(func() {
		for {
			select {
			case <-end:
				return
			default:
				if unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE) == nil { // one may be missing
					times++
				}
			}
		}
	})
	return func() {
		close(end)
		work.Wait()
		if times == 0 {
			t.Error("nothing was swapped")
		}
	}
}

// makeMissing creates an empty file for each missing name.
func makeMissing(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600)
		if err == nil {
			err = f.Close()
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			t.Error(err)
		}
	}
}

// A call may have been interrupted after it renamed the file of a device.
func TestUnpublish_resumes(t *testing.T) {
	for name, c := range map[string]struct {
		before, after map[string]string
		want          error
	}{
		"empty file":                       {map[string]string{".unpublished-a": ""}, nil, nil},
		"empty file, new empty target":     {map[string]string{".unpublished-a": "", "a": ""}, nil, nil},
		"file with data":                   {map[string]string{".unpublished-a": "data"}, map[string]string{"a": "data"}, bind.ErrOccupied},
		"file with data, new empty target": {map[string]string{".unpublished-a": "data", "a": ""}, map[string]string{".unpublished-a": "data", "a": ""}, bind.ErrOccupied},
		"file of another target":           {map[string]string{".unpublished-b": ""}, map[string]string{".unpublished-b": ""}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, data := range c.before {
				must.Succeed(t, os.WriteFile(filepath.Join(root, file), []byte(data), 0o600))
			}
			target, err := bind.ParseTarget(filepath.Join(root, "a"))
			must.Succeed(t, err)
			if err := kernel(t).Unpublish(target, nil); !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
			after := make(map[string]string)
			all, err := os.ReadDir(root)
			must.Succeed(t, err)
			for _, entry := range all {
				data, err := os.ReadFile(filepath.Join(root, entry.Name()))
				must.Succeed(t, err)
				after[entry.Name()] = string(data)
			}
			if diff := cmp.Diff(c.after, after, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("files (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUnpublish_longestName(t *testing.T) {
	target, err := bind.ParseTarget(filepath.Join(t.TempDir(), strings.Repeat("x", unix.NAME_MAX)))
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(target.String(), nil, 0o600))
	must.Succeed(t, kernel(t).Unpublish(target, nil))
	if _, err := os.Lstat(target.String()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file: %v, want it removed", err)
	}
}

// The disk may hang, so a handle from OpenCached must stay O_PATH.
func TestPublished_doesNotReadDirectory(t *testing.T) {
	d, err := dir.OpenCached(t.TempDir())
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	k := kernel(t)
	_, err = k.Published(d)
	must.Succeed(t, err)
	_, err = k.Locate(d)
	must.Succeed(t, err)
	_, err = k.IsFilesystem(d)
	must.Succeed(t, err)
	flags, err := unix.FcntlInt(uintptr(d.Fd()), unix.F_GETFL, 0)
	must.Succeed(t, err)
	if flags&unix.O_PATH == 0 {
		t.Error("it was opened for reading")
	}
}

// A pod moves a directory of its volume that kubelet has mounted for it (subPath) so deep that no buffer holds the line of it.
func TestPublished_buriedSubPath(t *testing.T) {
	testenv.NeedRoot(t)
	k := kernel(t)
	path := testenv.Tmpfs(t, 16<<20)
	must.Succeed(t, os.MkdirAll(filepath.Join(path, "volume", "a"), 0o777), os.Mkdir(filepath.Join(path, "other"), 0o777))
	pool, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, pool.Close()) })
	mount := func(source string) (at string) {
		at = t.TempDir()
		must.Succeed(t, syscall.Mount(filepath.Join(path, source), at, "", syscall.MS_BIND, ""))
		t.Cleanup(func() { must.Succeed(t, syscall.Unmount(at, 0)) })
		return at
	}
	sub := mount("volume/a")
	testenv.Bury(t, filepath.Join(path, "volume", "a"))
	other := mount("other")
	published, err := k.Published(pool)
	must.Succeed(t, err)
	want := map[string][]bind.Publication{"volume": {{Path: sub}}, "other": {{Path: other}}}
	if diff := cmp.Diff(want, published, cmpopts.IgnoreFields(bind.Publication{}, "Inside")); diff != "" {
		t.Error(diff)
	}
	if got := published["volume"]; len(got) == 1 && !strings.HasPrefix(got[0].Inside, "\n\n") {
		t.Errorf("what is inside the volume is mounted as %.20q", got[0].Inside)
	}
	if same, err := k.SameFilesystem(pool, pool); err != nil || !same {
		t.Errorf("the pool is on one filesystem: %t, %v", same, err)
	}
}

// The disk with kubelet's directory goes, and that of the volume does not. What is mounted is taken off; the directory below
// can neither be removed nor looked at.
func TestUnpublish_deadFilesystemOfTarget(t *testing.T) {
	h := newHarness(t)
	h.pods = testenv.LoopFS(t, "xfs", 320<<20)
	target, err := bind.ParseTarget(filepath.Join(h.pods, "target"))
	must.Succeed(t, err)
	must.Succeed(t, h.kernel.Publish(h.volume, target, bind.Flags{}))
	testenv.ShutDown(t, h.pods)
	done := make(chan error, 1)
	go func() { done <- h.kernel.Unpublish(target, nil) }()
	select {
	case err := <-done:
		must.ErrorIs(t, err, syscall.EIO)
	case <-time.After(time.Minute):
		t.Fatal("unpublishing does not end")
	}
	if mounted, err := mountns.Below(target.String()); err != nil || len(mounted) != 0 {
		t.Errorf("mounted are %v, %v", mounted, err)
	}
}

// The kernel reports mounts that come and go, and not that what is mounted moves.
func TestPublished_movedAwayAndBack(t *testing.T) {
	h := newHarness(t)
	target := h.publish(t, "target")
	pool, err := dir.Open(filepath.Dir(h.volume.String()))
	must.Succeed(t, err)
	defer func() { must.Succeed(t, pool.Close()) }()
	name := filepath.Base(h.volume.String())
	must.Succeed(t, pool.Rename(name, pool, "aside"))
	published, err := h.kernel.Published(pool)
	must.Succeed(t, err)
	if len(published["aside"]) != 1 {
		t.Errorf("moved away, it is published at %v", published)
	}
	must.Succeed(t, pool.Rename("aside", pool, name))
	published, err = h.kernel.Published(pool)
	must.Succeed(t, err)
	if got := published[name]; len(got) != 1 || got[0].Path != target.String() {
		t.Errorf("moved back, it is published at %v", published)
	}
}
