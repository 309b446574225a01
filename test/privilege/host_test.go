package privilege

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	mib = 1 << 20
	// patience is far above what the driver needs for anything that it does in the
	// background, also on an emulated processor.
	patience = time.Minute
)

// A host is a node: kubelet's directories, a pool, and the driver in its container.
type host struct {
	*testing.T
	place   place
	pool    string
	kubelet string // kubelet's own directory
	node    *node.Node
}

// newHost starts the driver on an empty pool, in a container that lacks something.
func newHost(t *testing.T, driver string, p place, mounted string, l lack) *host {
	t.Helper()
	h := &host{T: t, place: p, kubelet: t.TempDir()}
	var err error
	h.pool, err = os.MkdirTemp(mounted, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(h.pool)) })
	// Under systemd all mounts of a host are shared.
	must(t, unix.Mount("tmpfs", h.kubelet, "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, loopfs.Unmount(h.kubelet)) })
	must(t, unix.Mount("", h.kubelet, "", unix.MS_SHARED, ""))
	for _, directory := range []string{h.pods(), h.devices()} {
		must(t, os.MkdirAll(directory, 0o750))
	}
	t.Cleanup(h.cleanUp)

	c := container{
		Driver:       driver,
		Root:         t.TempDir(),
		Mounts:       h.mounts(),
		Capabilities: slices.Clone(privilege.Needed),
		Devices:      []device{loopControl, loopDevices},
	}
	l.takeAway(&c)
	c.Cgroup = deviceGroup(t, c.Devices...)
	encoded, err := json.Marshal(c)
	must(t, err)
	t.Setenv(containerVariable, string(encoded))
	self, err := os.Executable() // which becomes the driver
	must(t, err)
	h.node, err = node.Start(t.Context(), node.Config{
		Binary:  self,
		Name:    "node",
		Version: "test",
		Pools:   []node.Pool{{Name: "local", Path: h.pool}},
		Flags:   []string{"--device-nodes=/host/dev", "--v=4"},
	})
	must(t, err)
	t.Cleanup(func() { must(t, h.node.Close()) })
	return h
}

// mounts are those of the driver's container in deploy/csi, whose pool is another.
func (h *host) mounts() []mount {
	return []mount{
		{Name: socketVolume, Propagation: none},
		{Name: "kubelet-pods", Host: h.pods(), Path: h.pods(), Propagation: bidirectional},
		{Name: "kubelet-devices", Host: h.devices(), Path: h.devices(), Propagation: bidirectional},
		{Name: "dev", Host: "/dev", Path: "/host/dev", Propagation: none, ReadOnly: true},
		{Name: "pool-local", Host: h.pool, Path: h.pool, Propagation: hostToContainer},
		{Name: "sys-fs", Host: "/sys/fs", Path: "/sys/fs", Propagation: hostToContainer},
	}
}

func (h *host) pods() string { return filepath.Join(h.kubelet, "pods") }
func (h *host) devices() string {
	return filepath.Join(h.kubelet, "plugins/kubernetes.io/csi/volumeDevices")
}

// cleanUp takes down what a work that failed has left.
func (h *host) cleanUp() {
	mounts, err := mountns.Below(h.kubelet)
	must(h.T, err)
	for _, mount := range slices.Backward(mounts) {
		if mount != h.kubelet {
			must(h.T, loopfs.Unmount(mount))
		}
	}
	must(h.T, loopfs.Detach(h.pool))
}

func (h *host) controller() csi.ControllerClient { return csi.NewControllerClient(h.node.Conn()) }
func (h *host) csiNode() csi.NodeClient          { return csi.NewNodeClient(h.node.Conn()) }

var parameters = map[string]string{"storagePool": "local"}

func (h *host) create(v volume) error {
	made, err := h.controller().CreateVolume(h.Context(), &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: v.bytes},
		VolumeCapabilities: []*csi.VolumeCapability{v.capability()}, Parameters: parameters,
	})
	if err == nil && h.place.enforced && made.GetVolume().GetVolumeContext()["sizeEnforced"] != "true" {
		err = errors.New("its size is not enforced")
	}
	return err
}

// target is where a pod has a volume.
func (h *host) target(v volume, pod string) string {
	if v.block {
		return filepath.Join(h.devices(), "publish", v.name, pod)
	}
	return filepath.Join(h.pods(), pod, "volumes/kubernetes.io~csi", v.name, "mount")
}

func (h *host) publish(v volume, pod string) error {
	target := h.target(v, pod)
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return err
	}
	_, err := h.csiNode().NodePublishVolume(h.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: v.name, TargetPath: target, VolumeCapability: v.capability(), VolumeContext: parameters,
	})
	return err
}

func (h *host) unpublish(v volume, pod string) error {
	_, err := h.csiNode().NodeUnpublishVolume(h.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.name, TargetPath: h.target(v, pod)})
	return err
}

func (h *host) stats(v volume, pod string) error {
	got, err := h.csiNode().NodeGetVolumeStats(h.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.name, VolumePath: h.target(v, pod)})
	if err == nil && got.GetVolumeCondition().GetAbnormal() {
		err = errors.New(got.GetVolumeCondition().GetMessage())
	}
	return err
}

func (h *host) expand(v volume, pod string) error {
	_, err := h.csiNode().NodeExpandVolume(h.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: v.name, VolumePath: h.target(v, pod), VolumeCapability: v.capability(),
		CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * v.bytes},
	})
	return err
}

func (h *host) delete(v volume) error {
	_, err := h.controller().DeleteVolume(h.Context(), &csi.DeleteVolumeRequest{VolumeId: v.name})
	return err
}

// serving waits until the driver has looked at the pool: it answers before that.
func (h *host) serving(volume) error {
	h.eventually("the pool is looked at", func() bool { return h.log("pool serves") || h.log("pool does not serve") })
	if h.log("pool serves") {
		return nil
	}
	return errors.New("it does not serve")
}

// erased waits until the driver has erased the volume, or given up on it.
func (h *host) erased(v volume) error {
	h.eventually("the trash is empty or stuck", func() bool {
		return len(h.trash(v)) == 0 || h.log("trash could not be removed", v.name)
	})
	if left := h.trash(v); len(left) > 0 {
		return fmt.Errorf("left is %q", left)
	}
	return nil
}

func (h *host) trash(v volume) []string {
	found, err := filepath.Glob(filepath.Join(h.pool, ".hostpath-provisioner/trash/node", v.name+".*"))
	must(h.T, err)
	return found
}

// log tells whether the driver has written a line with all these words.
func (h *host) log(words ...string) bool {
	for line := range strings.Lines(h.node.Log()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return true
		}
	}
	return false
}

// eventually waits for what goes on in the background.
func (h *host) eventually(what string, done func() bool) {
	h.Helper()
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(patience); !done(); <-again.C {
		if time.Now().After(deadline) {
			h.Fatalf("%s: not within %v", what, patience)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
