package blocks

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	mib = 1 << 20
	// patience is far above what the driver needs for anything that it does in the
	// background, also on an emulated processor.
	patience = 5 * time.Minute
)

var parameters = map[string]string{"storagePool": "local"}

var access = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
}

// A bench is a driver with one pool, and what of it a check has in use.
type bench struct {
	*testing.T
	driver  string // the program
	mounted string // the pool's filesystem
	pool    string
	targets string
	node    *node.Node
	volumes []string
}

// newBench starts a driver on an empty pool.
func newBench(t *testing.T, driver string, fs filesystem, mounted, allocation string) *bench {
	t.Helper()
	b := &bench{T: t, driver: driver, mounted: mounted, targets: t.TempDir()}
	var err error
	b.pool, err = os.MkdirTemp(mounted, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(b.pool)) })
	// What a check that failed has left.
	t.Cleanup(func() { must(t, loopfs.Detach(b.pool)) })
	t.Cleanup(b.unmountAll)
	b.start(fs.enforcement, allocation)
	return b
}

func (b *bench) start(enforcement, allocation string) {
	b.Helper()
	var err error
	b.node, err = node.Start(b.Context(), node.Config{
		Binary:  b.driver,
		Name:    "node",
		Version: "test",
		Pools:   []node.Pool{{Name: "local", Path: b.pool, Enforcement: enforcement, Allocation: allocation}},
	})
	must(b.T, err)
	n := b.node
	b.Cleanup(func() {
		must(b.T, n.Close())
		if b.Failed() {
			b.Logf("what the driver wrote:\n%s", n.Log())
		}
	})
	b.awaitServing()
}

func (b *bench) restart() {
	b.Helper()
	must(b.T, b.node.Stop())
	must(b.T, b.node.Restart(b.Context()))
	b.awaitServing()
}

func (b *bench) crash() {
	b.Helper()
	must(b.T, b.node.Kill())
	must(b.T, b.node.Restart(b.Context()))
	b.awaitServing()
}

// awaitServing waits until the pool is open: a driver on a slow machine answers before.
func (b *bench) awaitServing() {
	b.Helper()
	b.eventually("the pool serves", func() bool {
		_, err := b.controller().CreateVolume(b.Context(), &csi.CreateVolumeRequest{Parameters: parameters})
		return status.Code(err) != codes.Unavailable
	})
}

func (b *bench) unmountAll() {
	mounts, err := mountns.Below(b.targets)
	must(b.T, err)
	for _, mount := range slices.Backward(mounts) {
		must(b.T, loopfs.Unmount(mount))
	}
}

func (b *bench) controller() csi.ControllerClient { return csi.NewControllerClient(b.node.Conn()) }
func (b *bench) kubelet() csi.NodeClient          { return csi.NewNodeClient(b.node.Conn()) }

// create makes a volume, whose size is kept whatever the pool is on.
func (b *bench) create(name string, bytes int64) {
	b.Helper()
	made, err := b.controller().CreateVolume(b.Context(), &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{access},
		Parameters:         parameters,
	})
	must(b.T, err)
	v := made.GetVolume()
	if v.GetVolumeId() != name || v.GetCapacityBytes() != bytes || v.GetVolumeContext()["sizeEnforced"] != "true" {
		b.Errorf("the driver made %v, want %s with %d bytes, enforced", v, name, bytes)
	}
	b.volumes = append(b.volumes, name)
}

func (b *bench) delete(name string) error {
	_, err := b.controller().DeleteVolume(b.Context(), &csi.DeleteVolumeRequest{VolumeId: name})
	return err
}

func (b *bench) target(pod string) string { return filepath.Join(b.targets, pod, "device") }

// publish publishes as kubelet does, in a directory that is there, and answers the path.
func (b *bench) publish(name, pod string) string {
	b.Helper()
	must(b.T, b.tryPublish(name, pod, false))
	return b.target(pod)
}

func (b *bench) tryPublish(name, pod string, readOnly bool) error {
	if err := os.MkdirAll(filepath.Dir(b.target(pod)), 0o755); err != nil {
		return err
	}
	_, err := b.kubelet().NodePublishVolume(b.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: name, TargetPath: b.target(pod), VolumeCapability: access, VolumeContext: parameters, Readonly: readOnly,
	})
	return err
}

func (b *bench) unpublish(name, pod string) {
	b.Helper()
	must(b.T, b.tryUnpublish(name, pod))
}

func (b *bench) tryUnpublish(name, pod string) error {
	_, err := b.kubelet().NodeUnpublishVolume(b.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: name, TargetPath: b.target(pod)})
	return err
}

func (b *bench) expand(name, pod string, bytes int64) error {
	grown, err := b.kubelet().NodeExpandVolume(b.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: name, VolumePath: b.target(pod), VolumeCapability: access,
		CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
	})
	if err == nil && grown.GetCapacityBytes() != bytes {
		b.Errorf("the volume has %d bytes, want %d", grown.GetCapacityBytes(), bytes)
	}
	return err
}

// wantInOrder expects the driver to find nothing wrong with a published volume, and to
// tell its size.
func (b *bench) wantInOrder(name, pod string, bytes int64) {
	b.Helper()
	got, err := b.kubelet().NodeGetVolumeStats(b.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: name, VolumePath: b.target(pod)})
	must(b.T, err)
	usage := got.GetUsage()
	if got.GetVolumeCondition().GetAbnormal() || len(usage) != 1 || usage[0].GetTotal() != bytes || usage[0].GetUnit() != csi.VolumeUsage_BYTES {
		b.Errorf("stats of %s: %v, want %d bytes, in order", name, got, bytes)
	}
}

// wantDevices expects that many devices on files of the pool. What looks at devices as
// they come and go may keep one for an instant.
func (b *bench) wantDevices(want int) []string {
	b.Helper()
	found, err := loopfs.Devices(b.pool)
	must(b.T, err)
	if len(found) != want {
		b.Errorf("the devices on files of the pool are %q, want %d", found, want)
	}
	return found
}

// removeAll deletes the volumes that were made and expects nothing to be left.
func (b *bench) removeAll() {
	b.Helper()
	for _, name := range b.volumes {
		must(b.T, b.delete(name))
	}
	b.wantDevices(0)
	if mounts, err := mountns.Below(b.targets); err != nil || len(mounts) > 0 {
		b.Errorf("still published: %q, %v", mounts, err)
	}
	b.eventually("the trash is empty", func() bool {
		left, err := filepath.Glob(filepath.Join(b.pool, ".hostpath-provisioner/trash/*/*"))
		must(b.T, err)
		return len(left) == 0
	})
	// The driver's own directory begins with a dot.
	if left, err := filepath.Glob(filepath.Join(b.pool, "[^.]*")); err != nil || len(left) > 0 {
		b.Errorf("left in the pool: %q, %v", left, err)
	}
}

// together makes a call for each name, several at once.
func (b *bench) together(names []string, call func(name string) error) {
	b.Helper()
	var callers sync.WaitGroup
	for _, name := range names {
		callers.Go(func() {
			if err := call(name); err != nil {
				b.Errorf("%s: %v", name, err)
			}
		})
	}
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

func (b *bench) wantCode(what string, err error, want codes.Code) {
	b.Helper()
	if got := status.Code(err); got != want {
		b.Errorf("%s: %v, want %v", what, err, want)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErrno(t testing.TB, what string, err error, want ...syscall.Errno) {
	t.Helper()
	if !slices.ContainsFunc(want, func(e syscall.Errno) bool { return errors.Is(err, e) }) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}
