package pool_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// An arena is a node whose mounts and devices are the kernel's, and a directory outside
// of its pool in which everything is a canary: on a filesystem where each read shows.
type arena struct {
	*pool.Set
	t       *testing.T
	root    string
	outside string
	mounts  *bind.Kernel
	loops   *loop.Kernel
	configs []poolconfig.Config
	options pool.Options

	swapped atomic.Int64     // how often something was exchanged
	during  map[string]int64 // the same, by the call that was made meanwhile
}

func newArena(t *testing.T, s swap) *arena {
	t.Helper()
	a := &arena{t: t, during: make(map[string]int64), outside: testenv.Tmpfs(t, 64*mib)}
	if s.counted {
		a.root = testenv.CountingBtrfs(t, 256*mib)
	} else {
		a.root = testenv.Tmpfs(t, 64*mib)
	}
	must.Succeed(t, syscall.Mount("", a.outside, "", syscall.MS_REMOUNT|syscall.MS_STRICTATIME, ""))
	must.Succeed(t, os.Mkdir(a.path("pods"), 0o755))
	for _, d := range []string{"pvc-1/sub", "pvc-9", "a"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(a.outside, d), 0o755))
	}
	for _, file := range []string{"canary", "a/canary", "pvc-1/canary", "~s-1/canary", "disk.img", "pvc-2/disk.img", "~s-2/disk.img", "pvc-1.json"} {
		must.Succeed(t, os.MkdirAll(filepath.Dir(filepath.Join(a.outside, file)), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(a.outside, file), make([]byte, mib), 0o644))
	}
	dev, err := dir.Open("/dev")
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, dev.Close()) })
	a.mounts, err = bind.NewKernel()
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, a.mounts.Close()) })
	a.loops = loop.NewKernel(dev)
	node, err := volume.ParseNodeID("node-1")
	must.Succeed(t, err)
	a.configs, err = poolconfig.Parse(fmt.Sprintf(`[{"name":"local","path":"pool","relabel":"recursive","shared":%v}]`, s.shared), a.root)
	must.Succeed(t, err)
	a.options = pool.Options{Node: node, Mounts: a.mounts, Labels: label.Kernel{}, Devices: a.loops, Dev: dev,
		CheckEvery: 10 * time.Millisecond, SyncEvery: 20 * time.Millisecond, RetryEvery: 10 * time.Millisecond}
	a.start()
	t.Cleanup(a.end)
	return a
}

func (a *arena) start() {
	a.t.Helper()
	a.Set = pool.Start(a.configs, a.options)
	must.Succeed(a.t, a.Wait(a.t.Context()))
}

// restart is a new process on the same disk.
func (a *arena) restart() {
	a.t.Helper()
	must.Succeed(a.t, a.Close(a.t.Context()))
	a.start()
}

func (a *arena) path(elements ...string) string {
	return filepath.Join(append([]string{a.root}, elements...)...)
}

func (a *arena) target(name string) bind.Target {
	target := must.Value(bind.ParseTarget(a.path("pods", name)))(a.t)
	return target
}

// end leaves no mount and no device behind, whatever happened.
func (a *arena) end() {
	must.Succeed(a.t, a.Close(context.WithoutCancel(a.t.Context())))
	for _, under := range []string{a.root, a.outside} {
		points := must.Value(mountns.Below(under))(a.t)
		for _, point := range points {
			if point != under {
				must.Succeed(a.t, syscall.Unmount(point, syscall.MNT_DETACH))
			}
		}
	}
	must.Succeed(a.t, errors.Join(a.detach(a.root), a.detach(a.outside)))
}

// detach takes the devices off what lies on a filesystem.
func (a *arena) detach(filesystem string) (err error) {
	for _, d := range a.devicesOn(filesystem) {
		err = errors.Join(err, a.loops.Detach(context.WithoutCancel(a.t.Context()), d))
	}
	return err
}

func (a *arena) devicesOn(filesystem string) (found []loop.Device) {
	var st syscall.Stat_t
	must.Succeed(a.t, syscall.Stat(filesystem, &st))
	all := must.Value(a.loops.Attached())(a.t)
	for _, d := range all {
		if d.Backing.Dev == st.Dev {
			found = append(found, d)
		}
	}
	return found
}

// A swap is a path, below the root, that is exchanged again and again with a decoy: a
// link to something outside, or what make makes.
type swap struct {
	path, to string
	make     func(path string) error
	// followed: the link is one that publishing follows, since kubelet's directory may
	// be one. Then targets are made and mounted outside, and nothing else is touched.
	followed bool
	shared   bool // the pool
	counted  bool // on a filesystem that enforces sizes
}

func node240(path string) error { return unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(240, 1))) } // local use: no such device

var swaps = map[string]swap{
	"the pool":                          {path: "pool"},
	"the driver's directory":            {path: "pool/.hostpath-provisioner"},
	"the records":                       {path: "pool/.hostpath-provisioner/volumes"},
	"a record":                          {path: "pool/.hostpath-provisioner/volumes/pvc-1.json", to: "pvc-1.json"},
	"the format":                        {path: "pool/.hostpath-provisioner/format", to: "canary"},
	"what is being made":                {path: "pool/.hostpath-provisioner/creating"},
	"what this node is making":          {path: "pool/.hostpath-provisioner/creating/node-1"},
	"what is being erased":              {path: "pool/.hostpath-provisioner/trash"},
	"what this node is erasing":         {path: "pool/.hostpath-provisioner/trash/node-1"},
	"a volume":                          {path: "pool/pvc-1", to: "pvc-1"},
	"a block volume":                    {path: "pool/pvc-2", to: "pvc-2"},
	"a block volume and a file":         {path: "pool/pvc-2", make: func(path string) error { return unix.Mknod(path, unix.S_IFREG|0o600, 0) }},
	"the file of a block volume":        {path: "pool/pvc-2/disk.img", to: "disk.img"},
	"that and a device":                 {path: "pool/pvc-2/disk.img", make: node240},
	"that and a FIFO":                   {path: "pool/pvc-2/disk.img", make: func(path string) error { return unix.Mkfifo(path, 0o600) }},
	"what is published":                 {path: "pool/.hostpath-provisioner/published", shared: true},
	"what this node has published":      {path: "pool/.hostpath-provisioner/published/node-1", shared: true},
	"where a volume is published":       {path: "pool/.hostpath-provisioner/published/node-1/pvc-1", to: "canary", shared: true},
	"the snapshots":                     {path: "pool/.hostpath-provisioner/snapshots"},
	"a snapshot":                        {path: "pool/.hostpath-provisioner/snapshots/~s-1", to: "pvc-1"},
	"the record of a snapshot":          {path: "pool/.hostpath-provisioner/volumes/~s-1.json", to: "pvc-1.json"},
	"the file of a disk's snapshot":     {path: "pool/.hostpath-provisioner/snapshots/~s-2/disk.img", to: "disk.img"},
	"that file and a FIFO":              {path: "pool/.hostpath-provisioner/snapshots/~s-2/disk.img", make: func(path string) error { return unix.Mkfifo(path, 0o600) }},
	"a directory that is copied":        {path: "pool/pvc-5/sub", to: "a"},
	"a file that is copied":             {path: "pool/pvc-5/sub/file", to: "canary"},
	"what is restored":                  {path: "pool/pvc-6", to: "pvc-1"},
	"the snapshots, with quotas":        {path: "pool/.hostpath-provisioner/snapshots", counted: true},
	"a snapshot, with quotas":           {path: "pool/.hostpath-provisioner/snapshots/~s-1", to: "pvc-1", counted: true},
	"the pool, with quotas":             {path: "pool", counted: true},
	"a volume, with quotas":             {path: "pool/pvc-1", to: "pvc-1", counted: true},
	"what is made, with quotas":         {path: "pool/.hostpath-provisioner/creating/node-1", counted: true},
	"what is erased, with quotas":       {path: "pool/.hostpath-provisioner/trash/node-1", counted: true},
	"a target":                          {path: "pods/a", to: "a"},
	"a target and a FIFO":               {path: "pods/a", make: func(path string) error { return unix.Mkfifo(path, 0o600) }},
	"the directory of targets":          {path: "pods", followed: true},
	"a target of a device":              {path: "pods/b", to: "disk.img"},
	"a target of a device and a device": {path: "pods/b", make: node240},
}

func TestSwappedPathsDoNotEscapePool(t *testing.T) {
	during, all := make(map[string]int64), 0
	for name, s := range swaps {
		t.Run(name, func(t *testing.T) {
			a := newArena(t, s)
			a.makeAll(s)
			before := canaries(t, a.outside)
			a.attack(s)
			if s.followed {
				a.unpublishAll()
				for _, path := range []string{"", "a", "b", "c", "d"} {
					delete(before, filepath.Join(a.outside, path))
				}
			}
			a.wantUntouched(before)
			a.wantWhole()
			for call, swapped := range a.during {
				during[call] += swapped
			}
			all++
		})
	}
	t.Logf("swaps during calls: %v", during)
	if all < len(swaps) {
		return // -run has chosen some, or one has failed
	}
	for _, call := range calls {
		if during[call] == 0 {
			t.Errorf("nothing was swapped during %s", call)
		}
	}
}

// A pool that was closed can be unmounted at once, also if its background work could not be entered from memory.
func TestClosedPoolHoldsNothing(t *testing.T) {
	a := newArena(t, swap{})
	a.makeAll(swap{path: "pool"})
	defer a.exchange(swaps["the records"])()
	for range 60 {
		must.Succeed(t, a.Close(t.Context()))
		for _, held := range descriptors(t) {
			if strings.HasPrefix(held, a.path("pool")) {
				t.Fatalf("%s is still open", held)
			}
		}
		a.start()
	}
}

// descriptors are the paths of what this process has open.
func descriptors(t *testing.T) (paths []string) {
	t.Helper()
	for _, fd := range must.Value(os.ReadDir("/proc/self/fd"))(t) {
		if path, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil { // that of the directory itself was closed
			paths = append(paths, path)
		}
	}
	return paths
}

// calls are those that resolve a path.
var calls = []string{"Create", "Publish", "PublishInline", "Expand", "Stats", "Volume", "List", "Inspect", "Start", "Unpublish", "Delete",
	"Snapshot", "Restore", "FindSnapshot", "Snapshots", "DeleteSnapshot"}

// attack makes all calls while something is swapped: for some time, and until it was.
func (a *arena) attack(s swap) {
	a.t.Helper()
	stop := a.exchange(s)
	defer stop()
	began := time.Now()
	for round := 0; time.Since(began) < a.bound() || a.swapped.Load() == 0; round++ {
		a.callAll(round, s)
		a.count("Inspect", func() {
			inspect.Run(a.t.Context(), a.configs, inspect.Options{Node: a.options.Node, Mounts: a.mounts, Devices: a.loops, Dev: a.options.Dev})
		})
		// The pool itself may be a link. To where, a process learns when it starts.
		if round%5 == 0 && s.path != "pool" {
			a.count("Start", a.restart)
		}
		if a.swapped.Load() == 0 && time.Since(began) > time.Minute {
			a.t.Error("nothing was swapped")
			return
		}
	}
}

// bound is how long one thing is swapped.
func (a *arena) bound() time.Duration {
	if testing.Short() {
		return 300 * time.Millisecond
	}
	return 2 * time.Second
}

// exchange begins to swap, and stop ends it with the real thing at its path. Calls
// remove and make what is swapped, so that the two are distinguished by their kinds.
func (a *arena) exchange(s swap) (stop func()) {
	path, decoy := a.path(s.path), a.path("decoy")
	if s.make == nil {
		to := filepath.Join(a.outside, s.to)
		s.make = func(path string) error { return os.Symlink(to, path) }
	}
	must.Succeed(a.t, s.make(decoy))
	fake := kind(decoy)
	end := make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() {
		for {
			if kind(path) != fake && kind(decoy) != fake {
				a.removeMounted(decoy)
				_ = s.make(decoy)
			}
			if unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, decoy, unix.RENAME_EXCHANGE) == nil { // one may have gone
				a.swapped.Add(1)
			}
			select {
			case <-end:
				return
			default:
			}
		}
	})
	return func() {
		close(end)
		work.Wait()
		if kind(path) == fake {
			// A device that is published at the real thing makes that look like another.
			a.unmountBelow(path)
		}
		if kind(path) == fake {
			// A directory that went away while it was mounted on has the mount.
			a.unmountBelow(decoy)
			// At once: of what is missing for a moment, the driver makes another.
			err := unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, decoy, unix.RENAME_EXCHANGE)
			if errors.Is(err, fs.ErrNotExist) { // nothing real is left
				err = os.Remove(path)
			}
			must.Succeed(a.t, err)
		}
		a.removeMounted(decoy)
	}
}

// removeMounted removes a path that calls may have mounted something on.
func (a *arena) removeMounted(path string) {
	a.unmountBelow(path)
	if err := os.RemoveAll(path); err != nil {
		a.t.Error(err)
	}
}

func (a *arena) unmountBelow(path string) {
	points, err := mountns.Below(path)
	for _, point := range points {
		err = errors.Join(err, syscall.Unmount(point, syscall.MNT_DETACH))
	}
	if err != nil {
		a.t.Error(err)
	}
}

// missing is the kind of what is not there.
const missing = ^fs.FileMode(0)

func kind(path string) fs.FileMode {
	info, err := os.Lstat(path)
	if err != nil {
		return missing
	}
	return info.Mode().Type()
}

// makeAll makes the volume and the block volume of the calls, and one that is copied: not in a pool that is swapped, which
// the calls are to leave empty now and then.
func (a *arena) makeAll(s swap) {
	a.t.Helper()
	all := map[string]volume.Mode{"pvc-1": volume.ModeMount, "pvc-2": volume.ModeBlock}
	if s.path != "pool" {
		all["pvc-5"] = volume.ModeMount
	}
	for name, mode := range all {
		unlock := a.hold(name)
		must.Succeed(a.t, must.Err(a.Create(a.t.Context(), pool.Request{ID: id(a.t, name), Mode: mode, Range: volume.Range{Required: mib}})))
		unlock()
	}
	if s.path == "pool" {
		return
	}
	must.Succeed(a.t, os.Mkdir(a.path("pool", "pvc-5", "sub"), 0o755))
	must.Succeed(a.t, os.WriteFile(a.path("pool", "pvc-5", "sub", "file"), []byte("data"), 0o644))
}

// hold takes the lock of a volume or of a snapshot, which calls have and the pool's checks take too.
func (a *arena) hold(name string) (unlock func()) {
	a.t.Helper()
	of := must.Value(volume.ParseEntry(name))(a.t)
	a.eventually("lock "+name, func() (err error) {
		unlock, err = a.Lock(of)
		return err
	})
	return unlock
}

// callAll makes every call, whatever it answers, and checks what was published.
// Devices take their time: they are left to the swaps that are about them, and to one
// round in ten of the others.
func (a *arena) callAll(round int, s swap) {
	if !strings.Contains(s.path, "pvc-2") && !strings.Contains(s.path, "pods/b") && !strings.Contains(s.path, "~s-2") {
		a.callOn("pvc-1", "a", volume.ModeMount, s)
		if s.ofCopies() || round%4 == 1 {
			source := "pvc-5"
			if strings.Contains(s.path, "pvc-1") {
				source = "pvc-1"
			}
			a.copyOf(source, "~s-1", volume.ModeMount, s)
		}
		if strings.Contains(s.path, "pvc-1") || s.counted || round%10 > 0 {
			return
		}
	}
	a.callOn("pvc-2", "b", volume.ModeBlock, s)
	a.copyOf("pvc-2", "~s-2", volume.ModeBlock, s)
}

// ofCopies reports whether the swap is about making copies.
func (s swap) ofCopies() bool {
	return strings.Contains(s.path, "snapshots") || strings.Contains(s.path, "~s-1") || strings.Contains(s.path, "pvc-5") || strings.Contains(s.path, "pvc-6")
}

// copyOf makes a snapshot of a volume and a volume of that, whatever the calls answer, and expects
// nothing in it that is from outside.
func (a *arena) copyOf(name, snapshot string, mode volume.Mode, s swap) {
	ctx, of, copied := a.t.Context(), id(a.t, name), id(a.t, "pvc-6")
	taken, err := volume.ParseEntry(snapshot)
	must.Succeed(a.t, err)
	request := pool.Request{ID: of, Mode: mode, Range: volume.Range{Required: mib}}
	unlock := a.hold(name)
	_, _ = a.Create(ctx, request)
	unlock()
	unlock = a.hold(snapshot)
	a.count("Snapshot", func() {
		_, _ = a.Snapshots().Create(ctx, pool.SnapshotRequest{ID: taken, Source: of, Way: pool.CopyWay{WhenWritten: volume.Accept}})
	})
	unlock()
	a.count("FindSnapshot", func() { _, _ = a.Snapshots().Find(ctx, taken) })
	a.count("Snapshots", func() { a.Snapshots().List(ctx, volume.ID{}, of, 10) })
	awaitTick(a.t, a.root)
	unlock = a.hold("pvc-6")
	request.ID, request.Source = copied, &pool.Source{ID: taken}
	a.count("Restore", func() { _, err = a.Create(ctx, request) })
	if err == nil && !strings.Contains(s.path, "pvc-6") {
		a.wantNoCanaryBelow("pvc-6")
	}
	a.count("Delete", func() { _ = a.Delete(ctx, copied) })
	unlock()
	unlock = a.hold(snapshot)
	a.count("DeleteSnapshot", func() { _ = a.Snapshots().Delete(ctx, taken) })
	unlock()
}

// awaitTick waits until what changes on a filesystem gets another ctime than what has changed so far,
// which a copy would take for a change under its eyes.
func awaitTick(t *testing.T, filesystem string) {
	t.Helper()
	name := filepath.Join(filesystem, "tick")
	var first, now syscall.Stat_t
	for first.Ctim == now.Ctim {
		must.Succeed(t, os.WriteFile(name, nil, 0o600))
		if must.Succeed(t, syscall.Stat(name, &now)); first.Ino == 0 {
			first = now
		}
	}
	must.Succeed(t, os.Remove(name))
}

// wantNoCanaryBelow says that no directory of a volume has what is outside. What was copied of a link is
// one, which is not followed.
func (a *arena) wantNoCanaryBelow(name string) {
	_ = filepath.WalkDir(a.path("pool", name), func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == "canary" {
			a.t.Errorf("%s was copied from outside", path)
		}
		return err
	})
}

func (a *arena) callOn(name, at string, mode volume.Mode, s swap) {
	ctx, vol, target := a.t.Context(), id(a.t, name), a.target(at)
	unlock, err := a.Publications().Lock(pool.Publication{ID: vol, Target: target, SingleTarget: true})
	if err != nil {
		return // the pool is being checked
	}
	defer unlock()
	request := pool.Request{ID: vol, Mode: mode, Range: volume.Range{Required: mib}}
	published := func(err error) {
		if err == nil && !s.followed {
			a.wantNoCanaryAt(at)
		}
	}
	a.count("Create", func() { _, _ = a.Create(ctx, request) })
	a.count("Publish", func() {
		published(a.Publications().Publish(ctx, pool.Publication{ID: vol, Target: target, Mode: mode}))
	})
	a.count("Expand", func() { _, _ = a.Expand(ctx, vol, target, mode, volume.Range{Required: 2 * mib}) })
	a.count("Stats", func() { _, _ = a.Publications().Stats(ctx, vol, target) })
	a.count("Volume", func() { _, _ = a.Volume(ctx, vol) })
	a.count("List", func() { a.List(ctx, volume.ID{}, 10) })
	_, _ = a.Capacity(ctx, volume.PoolName{}, false)
	a.count("Unpublish", func() { _ = a.Publications().Unpublish(ctx, vol, target) })
	a.count("Delete", func() { _ = a.Delete(ctx, vol) })
	if mode == volume.ModeBlock {
		return
	}
	a.count("PublishInline", func() {
		published(a.Publications().PublishInline(ctx, request, pool.Publication{ID: vol, Target: target}))
	})
	a.count("Unpublish", func() { _ = a.Publications().Unpublish(ctx, vol, target) })
}

// count notes how often something is swapped during a call.
func (a *arena) count(name string, call func()) {
	before := a.swapped.Load()
	call()
	a.during[name] += a.swapped.Load() - before
}

// wantNoCanaryAt says that what was mounted last is not from outside.
func (a *arena) wantNoCanaryAt(target string) {
	if points, err := mountns.Below(a.path("pods", target)); err == nil && len(points) > 0 {
		if _, err := os.Lstat(filepath.Join(points[0], "canary")); err == nil {
			a.t.Errorf("%s carries the canary", points[0])
		}
	}
	if devices := a.devicesOn(a.outside); len(devices) > 0 {
		a.t.Errorf("files outside are devices: %+v", devices)
	}
}

// canaries are what can be seen of all that is outside without touching it, the times
// of the last access included.
func canaries(t *testing.T, outside string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	// Reading a directory is an access: the first walk does it, and the times are taken
	// after that.
	var paths []string
	must.Succeed(t, filepath.WalkDir(outside, func(path string, _ fs.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	}))
	for _, path := range paths {
		all[path] = canary(path)
	}
	return all
}

// wantUntouched says that nothing outside was touched, mounted or made a device.
func (a *arena) wantUntouched(before map[string]string) {
	a.t.Helper()
	a.wantSame(before)
	if points, err := mountns.Below(a.outside); err != nil || len(points) != 1 {
		a.t.Errorf("mounts at %q (%v), want none outside", points, err)
	}
	if devices := a.devicesOn(a.outside); len(devices) > 0 {
		a.t.Errorf("files outside are devices: %+v", devices)
	}
}

func (a *arena) wantSame(before map[string]string) {
	a.t.Helper()
	after := make(map[string]string)
	for path := range before {
		after[path] = canary(path)
	}
	if diff := cmp.Diff(before, after); diff != "" {
		a.t.Errorf("what is outside was touched (-before +after):\n%s", diff)
	}
}

func canary(path string) string {
	var st syscall.Stat_t
	if err := syscall.Lstat(path, &st); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("inode %d, mode %o, %d links, %d bytes, accessed %d, modified %d, changed %d",
		st.Ino, st.Mode, st.Nlink, st.Size, st.Atim.Nano(), st.Mtim.Nano(), st.Ctim.Nano())
}

// unpublishAll takes the targets off that were made outside.
func (a *arena) unpublishAll() {
	for vol, name := range map[string]string{"pvc-1": "a", "pvc-2": "b"} {
		target := must.Value(bind.ParseTarget(filepath.Join(a.outside, name)))(a.t)
		unlock := a.hold(vol)
		if err := a.Publications().Unpublish(a.t.Context(), id(a.t, vol), target); err != nil && !errors.Is(err, volume.ErrInUse) {
			a.t.Error(err)
		}
		unlock()
	}
}

// wantWhole says that the pool is as good as ever once nothing is swapped any more.
func (a *arena) wantWhole() {
	a.t.Helper()
	for _, c := range []struct {
		name, target string
		mode         volume.Mode
	}{{"pvc-3", "c", volume.ModeMount}, {"pvc-4", "d", volume.ModeBlock}} {
		unlock := a.hold(c.name)
		a.eventually("make "+c.name, func() error {
			return must.Err(a.Create(a.t.Context(), pool.Request{ID: id(a.t, c.name), Mode: c.mode, Range: volume.Range{Required: mib}}))
		})
		must.Succeed(a.t, a.Publications().Publish(a.t.Context(), pool.Publication{ID: id(a.t, c.name), Target: a.target(c.target), Mode: c.mode}))
		must.Succeed(a.t, a.Publications().Unpublish(a.t.Context(), id(a.t, c.name), a.target(c.target)))
		must.Succeed(a.t, a.Delete(a.t.Context(), id(a.t, c.name)))
		unlock()
	}
}

// eventually tries again while the pool is checked.
func (a *arena) eventually(what string, do func() error) {
	a.t.Helper()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	end := time.After(time.Minute)
	for {
		err := do()
		if err == nil {
			return
		}
		select {
		case <-again.C:
		case <-end:
			a.t.Fatalf("%s: %v", what, err)
		}
	}
}

// taken are things at a target that no volume can be published at, and what a call for
// a directory and one for a device answer.
var taken = map[string]struct {
	make             func(a *arena, path string) error
	directory, block error
}{
	"a link to a directory": {func(a *arena, path string) error { return os.Symlink(filepath.Join(a.outside, "a"), path) }, volume.ErrInvalid, volume.ErrInvalid},
	"a link to a file":      {func(a *arena, path string) error { return os.Symlink(filepath.Join(a.outside, "disk.img"), path) }, volume.ErrInvalid, volume.ErrInvalid},
	"a link to nowhere":     {func(_ *arena, path string) error { return os.Symlink("nowhere", path) }, volume.ErrInvalid, volume.ErrInvalid},
	"a file":                {func(_ *arena, path string) error { return os.WriteFile(path, []byte("data"), 0o600) }, volume.ErrExists, volume.ErrExists},
	"a FIFO":                {func(_ *arena, path string) error { return unix.Mkfifo(path, 0o600) }, volume.ErrExists, volume.ErrExists},
	"a socket":              {func(_ *arena, path string) error { return unix.Mknod(path, unix.S_IFSOCK|0o600, 0) }, volume.ErrExists, volume.ErrExists},
	"a device":              {func(_ *arena, path string) error { return node240(path) }, volume.ErrExists, volume.ErrExists},
	"the mount of a file": {func(a *arena, path string) error {
		return errors.Join(os.WriteFile(path, nil, 0o600), syscall.Mount(filepath.Join(a.outside, "disk.img"), path, "", syscall.MS_BIND, ""))
	}, volume.ErrExists, volume.ErrExists},
	"the mount of a directory": {func(a *arena, path string) error {
		return errors.Join(os.Mkdir(path, 0o755), syscall.Mount(filepath.Join(a.outside, "a"), path, "", syscall.MS_BIND, ""))
	}, volume.ErrExists, volume.ErrExists},
}

func TestOtherFilesAtTargetAreKept(t *testing.T) {
	for name, c := range taken {
		t.Run(name, func(t *testing.T) {
			a := newArena(t, swap{})
			a.makeAll(swap{})
			must.Succeed(t, c.make(a, a.path("pods", "a")))
			pods := files(t, a.path("pods"))
			outside := canaries(t, a.outside)
			points := must.Value(mountns.Below(a.root))(t)
			for vol, want := range map[string]error{"pvc-1": c.directory, "pvc-2": c.block} {
				mode := map[string]volume.Mode{"pvc-1": volume.ModeMount, "pvc-2": volume.ModeBlock}[vol]
				unlock := a.hold(vol)
				wantError(t, a.Publications().Publish(t.Context(), pool.Publication{ID: id(t, vol), Target: a.target("a"), Mode: mode}), want)
				if len(points) == 1 { // what is mounted is unmounted, so that pods can end
					if err := a.Publications().Unpublish(t.Context(), id(t, vol), a.target("a")); !errors.Is(err, volume.ErrInUse) && !errors.Is(err, volume.ErrInvalid) {
						t.Errorf("unpublish: %v, want it refused", err)
					}
				}
				unlock()
			}
			a.wantSame(outside)
			if diff := cmp.Diff(pods, files(t, a.path("pods"))); diff != "" {
				t.Errorf("the target was changed (-before +after):\n%s", diff)
			}
			if after, err := mountns.Below(a.root); err != nil || !cmp.Equal(points, after) {
				t.Errorf("mounts at %q (%v), want %q", after, err, points)
			}
			if devices := a.devicesOn(a.root); len(devices) > 0 {
				t.Errorf("devices are left: %+v", devices)
			}
		})
	}
}
