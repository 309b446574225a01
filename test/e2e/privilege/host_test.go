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

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

const mib = 1 << 20

// A host is a node: kubelet's directories, a pool, and the driver in its container.
type host struct {
	*drivertest.Driver
	place   place
	pool    string
	kubelet string // kubelet's own directory
}

// newHost starts the driver on an empty pool, in a container that lacks something.
func newHost(t *testing.T, program string, p place, mounted string, l lack) *host {
	t.Helper()
	h := &host{place: p, pool: drivertest.NewPool(t, mounted), kubelet: t.TempDir()}
	// Under systemd all mounts of a host are shared. Unmounted with all that is below.
	must.Succeed(t, unix.Mount("tmpfs", h.kubelet, "tmpfs", 0, ""))
	t.Cleanup(func() { must.Succeed(t, drivertest.UnmountBelow(h.kubelet)) })
	must.Succeed(t, unix.Mount("", h.kubelet, "", unix.MS_SHARED, ""))
	for _, directory := range []string{h.pods(), h.devices()} {
		must.Succeed(t, os.MkdirAll(directory, 0o750))
	}

	c := container{
		Driver:       program,
		Root:         t.TempDir(),
		Mounts:       h.mounts(),
		Capabilities: slices.Concat(privilege.Needed, privilege.ForErasing),
		Devices:      []device{loopControl, loopDevices},
	}
	l.takeAway(&c)
	c.Cgroup = deviceGroup(t, c.Devices...)
	encoded, err := json.Marshal(c)
	must.Succeed(t, err)
	t.Setenv(containerVariable, string(encoded))
	self, err := os.Executable() // which becomes the driver
	must.Succeed(t, err)
	h.Driver = drivertest.Launch(t, drivertest.Config{
		Binary: self,
		Pools:  []drivertest.PoolConfig{{Name: "local", Path: h.pool}},
		Flags:  []string{"--device-nodes=/host/dev", "--v=4"},
	})
	h.Targets = h.kubelet
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

// of is kubelet, where it has volumes of that kind.
func (h *host) of(v drivertest.Volume) *drivertest.Client {
	c := h.Client
	if c.Targets = h.pods(); v.Block {
		c.Targets = h.devices()
	}
	return &c
}

func (h *host) create(v drivertest.Volume) error {
	made, err := h.Create(h.Context(), v)
	if err == nil && h.place.enforced && made.GetVolume().GetVolumeContext()["sizeEnforced"] != "true" {
		err = errors.New("its size is not enforced")
	}
	return err
}

// pod is the one that uses a volume.
const pod = "pod"

func (h *host) target(v drivertest.Volume) string { return h.of(v).Target(pod) }

func (h *host) publish(v drivertest.Volume) error { return h.of(v).Publish(h.Context(), v, pod) }

func (h *host) unpublish(v drivertest.Volume) error {
	return h.of(v).Unpublish(h.Context(), v.ID, pod)
}

func (h *host) measure(v drivertest.Volume) error {
	got, err := h.of(v).Stats(h.Context(), v.ID, pod)
	if err == nil && oldcsi.Condition(got).GetAbnormal() {
		err = errors.New(oldcsi.Condition(got).GetMessage())
	}
	return err
}

func (h *host) expand(v drivertest.Volume) error {
	v.Bytes *= 2
	return must.Err(h.of(v).Expand(h.Context(), v, pod))
}

func (h *host) remove(v drivertest.Volume) error { return h.Delete(h.Context(), v.ID) }

// serving waits until the driver has checked the pool: it answers before that.
func (h *host) serving(drivertest.Volume) error {
	h.Eventually("the pool is checked", func() bool { return h.log("Pool serves") || h.log("Pool does not serve") })
	if h.log("Pool serves") {
		return nil
	}
	return errors.New("it does not serve")
}

// erased waits until the driver has erased the volume, or given up on it.
func (h *host) erased(v drivertest.Volume) error {
	h.Eventually("the trash is empty or stuck", func() bool {
		return len(h.trash(v)) == 0 || h.log("Failed to erase trash", v.ID)
	})
	if left := h.trash(v); len(left) > 0 {
		return fmt.Errorf("left is %q", left)
	}
	return nil
}

func (h *host) trash(v drivertest.Volume) []string {
	found := must.Value(filepath.Glob(filepath.Join(h.pool, ".hostpath-provisioner/trash", drivertest.NodeName, v.ID+".*")))(h)
	return found
}

// log reports whether the driver has written a line with all these words.
func (h *host) log(words ...string) bool {
	for line := range strings.Lines(h.Process.Log()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return true
		}
	}
	return false
}
