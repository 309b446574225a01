package volumes

import (
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	mib = 1 << 20
	// patience is far above what the kernel needs for anything that it does in the
	// background, also on an emulated processor.
	patience = 5 * time.Minute
)

var parameters = map[string]string{"storagePool": "local"}

var filesystemAccess = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
}

// A bench is a driver with one pool, and what of it a check has in use.
type bench struct {
	*testing.T
	fs       filesystem
	driver   string // the program
	mounted  string
	pool     string
	targets  string
	node     *node.Node
	facility quota.Facility
	root     *dir.Dir // of the pool

	ids map[string]quota.ID // of the volumes that were made
}

// newBench starts a driver on an empty pool whose sizes it has to keep.
func newBench(t *testing.T, driver string, fs filesystem, mounted string) *bench {
	t.Helper()
	b := &bench{T: t, fs: fs, driver: driver, mounted: mounted, targets: t.TempDir(), ids: make(map[string]quota.ID)}
	var err error
	b.pool, err = os.MkdirTemp(mounted, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(b.pool)) })
	b.root, err = dir.Open(b.pool)
	must(t, err)
	t.Cleanup(func() { must(t, b.root.Close()) })
	b.facility, err = quota.Detect(b.root)
	must(t, err)
	if b.facility.Kind() != fs.kind {
		t.Fatalf("the limits of %s are kept by %s, want %s", mounted, b.facility.Kind(), fs.kind)
	}
	t.Cleanup(b.unmountAll)
	b.start("root")
	return b
}

// start runs the driver; relabel is the pool option of that name.
func (b *bench) start(relabel string) {
	b.Helper()
	var err error
	b.node, err = node.Start(b.Context(), node.Config{
		Binary:  b.driver,
		Name:    "node",
		Version: "test",
		Pools:   []node.Pool{{Name: "local", Path: b.pool, Enforcement: "required", Relabel: relabel}},
	})
	must(b.T, err)
	b.awaitServing()
	n := b.node
	b.Cleanup(func() {
		must(b.T, n.Close())
		if b.Failed() {
			b.Logf("what the driver wrote:\n%s", n.Log())
		}
	})
}

func (b *bench) restart() {
	b.Helper()
	must(b.T, b.node.Stop())
	must(b.T, b.node.Restart(b.Context()))
	b.awaitServing()
}

// awaitServing waits until the pool is open. A driver answers before that if it takes
// long, which reading many records on a slow machine does.
func (b *bench) awaitServing() {
	b.Helper()
	b.eventually("the pool serves", func() bool { return b.capacity() > 0 })
}

// unmountAll takes down what a check that failed has left published.
func (b *bench) unmountAll() {
	mounts, err := mountns.Below(b.targets)
	must(b.T, err)
	for _, mount := range slices.Backward(mounts) {
		must(b.T, loopfs.Unmount(mount))
	}
}

func (b *bench) controller() csi.ControllerClient { return csi.NewControllerClient(b.node.Conn()) }
func (b *bench) kubelet() csi.NodeClient          { return csi.NewNodeClient(b.node.Conn()) }

// create makes a volume and expects the driver to say that its size is kept.
func (b *bench) create(name string, bytes int64) {
	b.Helper()
	must(b.T, b.tryCreate(name, bytes))
	b.ids[name] = b.idOf(name)
}

func (b *bench) tryCreate(name string, bytes int64) error {
	made, err := b.controller().CreateVolume(b.Context(), &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{filesystemAccess},
		Parameters:         parameters,
	})
	v := made.GetVolume()
	if err == nil && (v.GetVolumeId() != name || v.GetCapacityBytes() != bytes || v.GetVolumeContext()["sizeEnforced"] != "true") {
		b.Errorf("the driver made %v, want %s with %d bytes, enforced", v, name, bytes)
	}
	return err
}

func (b *bench) delete(name string) error {
	_, err := b.controller().DeleteVolume(b.Context(), &csi.DeleteVolumeRequest{VolumeId: name})
	return err
}

func (b *bench) target(pod string) string { return filepath.Join(b.targets, pod, "mount") }

// publish makes the directory that kubelet would make, and publishes there. It
// returns the path.
func (b *bench) publish(name, pod string) string {
	b.Helper()
	target := b.target(pod)
	must(b.T, os.MkdirAll(filepath.Dir(target), 0o755))
	_, err := b.kubelet().NodePublishVolume(b.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: name, TargetPath: target, VolumeCapability: filesystemAccess, VolumeContext: parameters,
	})
	must(b.T, err)
	return target
}

func (b *bench) unpublish(name, pod string) {
	b.Helper()
	_, err := b.kubelet().NodeUnpublishVolume(b.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: name, TargetPath: b.target(pod)})
	must(b.T, err)
}

func (b *bench) expand(name, pod string, bytes int64) error {
	grown, err := b.kubelet().NodeExpandVolume(b.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: name, VolumePath: b.target(pod), VolumeCapability: filesystemAccess,
		CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
	})
	if err == nil && grown.GetCapacityBytes() != bytes {
		b.Errorf("the volume has %d bytes, want %d", grown.GetCapacityBytes(), bytes)
	}
	return err
}

// condition is what the driver says of a volume.
func (b *bench) condition(name string) *csi.VolumeCondition {
	b.Helper()
	got, err := b.controller().ControllerGetVolume(b.Context(), &csi.ControllerGetVolumeRequest{VolumeId: name})
	must(b.T, err)
	return got.GetStatus().GetVolumeCondition()
}

// capacity is what the pool can still promise.
func (b *bench) capacity() int64 {
	b.Helper()
	got, err := b.controller().GetCapacity(b.Context(), &csi.GetCapacityRequest{Parameters: parameters})
	must(b.T, err)
	return got.GetAvailableCapacity()
}

// wantSpace expects driver and df to tell a published volume's size, and what of it
// is in use but for the slack.
func (b *bench) wantSpace(name, pod string, size, used int64) {
	b.Helper()
	b.settle()
	got, err := b.kubelet().NodeGetVolumeStats(b.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: name, VolumePath: b.target(pod)})
	must(b.T, err)
	bytes := got.GetUsage()[0]
	if full := bytes.GetAvailable() == 0; bytes.GetUnit() != csi.VolumeUsage_BYTES || got.GetVolumeCondition().GetAbnormal() != full {
		b.Errorf("stats of %s: %v, want bytes, and the condition abnormal if it is full", name, got)
	}
	b.wantNumbers("NodeGetVolumeStats of "+name, bytes.GetTotal(), bytes.GetUsed(), bytes.GetAvailable(), size, used)
	if !b.fs.statfsTellsLimit {
		return
	}
	var s unix.Statfs_t
	must(b.T, unix.Statfs(b.target(pod), &s))
	block := uint64(s.Bsize)
	b.wantNumbers("statfs of "+name, int64(s.Blocks*block), int64((s.Blocks-s.Bfree)*block), int64(s.Bavail*block), size, used)
}

func (b *bench) wantNumbers(what string, size, used, free, wantSize, wantUsed int64) {
	b.Helper()
	if size != wantSize || used < wantUsed-b.fs.slack() || used > wantUsed+b.fs.slack() || free != size-used {
		b.Errorf("%s: %d bytes, %d used and %d free; want %d, %d used", what, size, used, free, wantSize, wantUsed)
	}
}

// settle brings the filesystem's numbers up to date.
func (b *bench) settle() {
	b.Helper()
	if b.fs.kind == quota.Btrfs {
		// This also wakes who clears away removed subvolumes, every 30 seconds else.
		const sync = 0x94<<8 | 8 // BTRFS_IOC_SYNC of linux/btrfs.h
		must(b.T, unix.IoctlSetInt(b.root.Fd(), sync, 0))
		return
	}
	must(b.T, unix.Syncfs(b.root.Fd()))
}

// open opens a volume's directory in the pool.
func (b *bench) open(name string) *dir.Dir {
	b.Helper()
	d, err := b.root.Open(name)
	must(b.T, err)
	return d
}

func (b *bench) idOf(name string) quota.ID {
	b.Helper()
	d := b.open(name)
	defer func() { must(b.T, d.Close()) }()
	id, err := b.facility.IDOf(d)
	must(b.T, err)
	return id
}

// limit is what the kernel holds a volume to.
func (b *bench) limit(name string) quota.Limit {
	b.Helper()
	usage, err := b.facility.Usage(b.root, b.ids[name])
	must(b.T, err)
	return usage.Limit
}

// removeAll deletes the volumes that were made and expects the kernel to forget them.
func (b *bench) removeAll() {
	b.Helper()
	b.together(slices.Collect(maps.Keys(b.ids)), b.delete)
	b.awaitNoTrash()
	for name, id := range b.ids {
		b.eventually("what the kernel knows of "+name+" is gone", func() bool {
			usage, err := b.facility.Usage(b.root, id)
			must(b.T, err)
			if usage.Limit == (quota.Limit{}) && usage.Bytes == 0 {
				return true
			}
			b.settle()
			return false
		})
	}
	// The driver's own directory begins with a dot.
	if left, err := filepath.Glob(filepath.Join(b.pool, "[^.]*")); err != nil || len(left) > 0 {
		b.Errorf("left in the pool: %q, %v", left, err)
	}
	clear(b.ids)
}

func (b *bench) awaitNoTrash() {
	b.Helper()
	trash := filepath.Join(b.pool, ".hostpath-provisioner/trash/node")
	b.eventually("the trash is empty", func() bool { return b.empty(trash) })
}

// empty looks for a single entry: of ten thousand, the others are in nobody's interest.
func (b *bench) empty(path string) bool {
	b.Helper()
	d, err := os.Open(path)
	must(b.T, err)
	defer d.Close()
	_, err = d.Readdirnames(1)
	if !errors.Is(err, io.EOF) {
		must(b.T, err)
	}
	return err != nil
}

// together makes a call for each name, several at once.
func (b *bench) together(names []string, call func(name string) error) {
	b.Helper()
	work := make(chan string)
	var callers sync.WaitGroup
	for range 32 {
		callers.Go(func() {
			for name := range work {
				if err := call(name); err != nil {
					b.Errorf("%s: %v", name, err)
				}
			}
		})
	}
	for _, name := range names {
		work <- name
	}
	close(work)
	callers.Wait()
	if b.Failed() {
		b.FailNow()
	}
}

// eventually waits for what goes on in the background.
func (b *bench) eventually(what string, done func() bool) {
	b.Helper()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(patience); !done(); <-again.C {
		if time.Now().After(deadline) {
			b.Fatalf("%s: not within %v", what, patience)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErrno(t testing.TB, what string, err error, want syscall.Errno) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}
