package faults

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// A mount is a filesystem that can be mounted, unmounted, and mounted again.
type mount struct {
	testing.TB
	filesystem
	device string
	at     string
}

// newMount makes a filesystem and mounts it until the test ends.
func newMount(t testing.TB, fs filesystem) *mount {
	t.Helper()
	m := &mount{TB: t, filesystem: fs, at: filepath.Join(t.TempDir(), "pool")}
	must.Succeed(t, os.Mkdir(m.at, 0o755))
	image := m.format()
	m.attach(image)
	must.Succeed(t, os.Remove(image))
	m.begin()
	return m
}

// newFaultyMount is newMount for a filesystem on a disk that can fail.
func newFaultyMount(t testing.TB, fs filesystem) (*mount, *disk.Disk) {
	t.Helper()
	m := &mount{TB: t, filesystem: fs, at: filepath.Join(t.TempDir(), "pool")}
	must.Succeed(t, os.Mkdir(m.at, 0o755))
	image := m.format()
	d := disk.New(t, image, t.TempDir())
	must.Succeed(t, os.Remove(image))
	m.attach(d.Path)
	m.begin()
	// Before anything is taken down that waits for the disk.
	t.Cleanup(d.Heal)
	return m, d
}

func (m *mount) format() string {
	m.Helper()
	image, err := loopfs.Format(m.Context(), m.TempDir(), m.kind, m.bytes, m.mkfs...)
	if errors.Is(err, loopfs.ErrMissing) {
		testenv.Missing(m, err.Error())
	}
	must.Succeed(m, err)
	return image
}

func (m *mount) attach(image string) {
	m.Helper()
	device := must.Value(loopfs.Attach(image))(m)
	m.device = device.Name()
	m.Cleanup(func() { must.Succeed(m, device.Close()) })
}

func (m *mount) begin() {
	m.Helper()
	m.mount()
	m.Cleanup(func() {
		mounts := must.Value(mountns.Below(m.at))(m)
		for range mounts {
			must.Succeed(m, loopfs.Unmount(m.at))
		}
	})
	if m.kind == "btrfs" && m.enforced {
		must.Succeed(m, loopfs.SwitchQuotasOn(m.Context(), m.at))
	}
	must.Succeed(m, os.MkdirAll(m.foreign(), 0o700))
}

// foreign is a directory of others in the pool. Mkfs of ext4 makes one of that name too.
func (m *mount) foreign() string { return filepath.Join(m.at, "lost+found") }

func (m *mount) mount() {
	m.Helper()
	must.Succeed(m, loopfs.MountDevice(m.Context(), m.device, m.at, m.kind, m.options...))
}

// unmount takes the filesystem off its place, and leaves it to who still uses it.
func (m *mount) unmount() {
	m.Helper()
	must.Succeed(m, unix.Unmount(m.at, unix.MNT_DETACH))
}

// unmountAll takes it off every place, so that nothing of it stays in memory.
func (m *mount) unmountAll() error {
	return loopfs.Unmount(m.at)
}

func (m *mount) remount(flags uintptr) {
	m.Helper()
	must.Succeed(m, unix.Mount("", m.at, "", unix.MS_REMOUNT|flags, ""))
}

// A harness is a driver with a pool that something happens to, and another pool.
type harness struct {
	*drivertest.Driver
	mount *mount
	pool  *drivertest.Pool
	other *drivertest.Pool
	// acknowledged are the volumes of the pool that there have to be.
	acknowledged []drivertest.Kept
	before       int64             // what the pool could promise when it was empty
	device       drivertest.Device // of the volume raw
}

const (
	small = 4 * mib
	grown = 8 * mib
)

// newHarness starts a driver with volumes that are published, and others that are not.
func newHarness(t *testing.T, driver string, m *mount) *harness {
	t.Helper()
	enforcement := ""
	if m.enforced {
		enforcement = "required"
	}
	local := drivertest.PoolConfig{Name: "local", Path: m.at, Enforcement: enforcement}
	other := drivertest.PoolConfig{Name: "other", Path: t.TempDir()}
	h := &harness{mount: m}
	t.Cleanup(func() { must.Succeed(t, h.detach()) })
	h.Driver = drivertest.Start(t, drivertest.Config{
		Binary: driver,
		Pools:  []drivertest.PoolConfig{local, other},
		Flags:  []string{"--metrics-address=127.0.0.1:0", "--v=4"},
	})
	h.pool = &drivertest.Pool{Driver: h.Driver, PoolConfig: local, Largest: 2 * grown}
	h.other = &drivertest.Pool{Driver: h.Driver, PoolConfig: other}
	h.before = h.MustCapacity("local")
	for _, v := range []drivertest.Volume{tree, idle, doomed, raw, spare, doomedDisk} {
		h.Must(h.create(v))
		h.Must(h.fill(v))
	}
	h.Must(h.publish(tree))
	h.Must(h.publish(raw))
	attached := must.Value(h.pool.Attached())(h)
	h.device = attached[0]
	return h
}

// detach takes down what a test that failed has left of the device: the kernel knows its
// file by another path once the pool was unmounted.
func (h *harness) detach() error {
	if !h.attached() {
		return nil
	}
	return loopfs.DetachDevice("/dev/" + h.device.Name)
}

// attached reports whether the device of the volume raw has its file.
func (h *harness) attached() bool {
	file, err := os.ReadFile("/sys/block/" + h.device.Name + "/loop/backing_file")
	return err == nil && strings.HasSuffix(string(file), "/"+raw.ID+"/disk.img\n")
}

// The volumes that there are before the fault.
var (
	tree       = volume("pvc-tree", false)       // published
	idle       = volume("pvc-idle", false)       // to be published during the fault
	doomed     = volume("pvc-doomed", false)     // to be deleted
	raw        = volume("pvc-raw", true)         // published
	spare      = volume("pvc-spare", true)       // to be published
	doomedDisk = volume("pvc-doomed-disk", true) // to be deleted
	late       = volume("pvc-late", false)       // to be made
	lateDisk   = volume("pvc-late-disk", true)   // to be made
)

func volume(id string, block bool) drivertest.Volume {
	return drivertest.Volume{ID: id, Pool: "local", Block: block, Bytes: small}
}

// find answers nil for a volume that was not acknowledged.
func (h *harness) find(id string) *drivertest.Kept {
	for i := range h.acknowledged {
		if h.acknowledged[i].ID == id {
			return &h.acknowledged[i]
		}
	}
	return nil
}

// create, and what follows, make a call and note what its answer promises.
func (h *harness) create(v drivertest.Volume) error { return h.createIn(h.Context(), v) }

func (h *harness) createIn(ctx context.Context, v drivertest.Volume) error {
	_, err := h.Create(ctx, v)
	if err == nil && h.find(v.ID) == nil {
		h.acknowledged = append(h.acknowledged, drivertest.Kept{Volume: v})
	}
	return err
}

func (h *harness) delete(v drivertest.Volume) error {
	err := h.Delete(h.Context(), v.ID)
	if err == nil {
		h.acknowledged = slices.DeleteFunc(h.acknowledged, func(k drivertest.Kept) bool { return k.ID == v.ID })
	}
	return err
}

// publish publishes for a pod of the volume's name.
func (h *harness) publish(v drivertest.Volume) error {
	err := h.Publish(h.Context(), v, v.ID)
	if k := h.find(v.ID); err == nil && k != nil {
		k.Pods = []string{v.ID}
	}
	return err
}

func (h *harness) unpublish(v drivertest.Volume) error {
	err := h.Unpublish(h.Context(), v.ID, v.ID)
	if k := h.find(v.ID); err == nil && k != nil {
		k.Pods = nil
	}
	return err
}

func (h *harness) expand(v drivertest.Volume) error {
	v.Bytes = grown
	_, err := h.Expand(h.Context(), v, v.ID)
	if k := h.find(v.ID); err == nil && k != nil {
		k.Bytes = grown
	}
	return err
}

// content is what users have written.
const content = "written by a user, and not to be lost\n"

func (h *harness) file(v drivertest.Volume) string {
	if v.Block {
		return h.pool.Image(v.ID)
	}
	return filepath.Join(h.mount.at, v.ID, "file")
}

// fill writes to a volume that is not published.
func (h *harness) fill(v drivertest.Volume) error {
	f, err := os.OpenFile(h.file(v), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Sync(), f.Close())
}

// holds expects what users have written to be there.
func (h *harness) holds(v drivertest.Volume) error {
	f, err := os.Open(h.file(v))
	if err != nil {
		return err
	}
	defer f.Close()
	got := make([]byte, len(content))
	if _, err := f.Read(got); err != nil || !bytes.Equal(got, []byte(content)) {
		return fmt.Errorf("%s has %q, %v", f.Name(), got, err)
	}
	return nil
}

// wantWhole expects all that was acknowledged to be there and in order, and nothing else.
func (h *harness) wantWhole(when string) {
	h.Helper()
	h.wantKept(when)
	if err := h.pool.Lists(h.acknowledged); err != nil {
		h.Fatalf("%s:\n%v", when, err)
	}
}

// wantKept is wantWhole for volumes that cannot be in order.
func (h *harness) wantKept(when string) {
	h.Helper()
	h.AwaitNoTrash(h.mount.at)
	problems := []error{h.pool.Holds(h.acknowledged), h.pool.MountedAndAttached(h.acknowledged), h.pool.Unleaked(), h.promisedIsSum()}
	for _, v := range h.acknowledged {
		problems = append(problems, h.pool.InOrder(v))
	}
	for _, v := range []drivertest.Volume{tree, idle, doomed, raw, spare, doomedDisk} {
		if h.find(v.ID) != nil {
			problems = append(problems, h.holds(v))
		}
	}
	if err := errors.Join(problems...); err != nil {
		h.Fatalf("%s:\n%v", when, err)
	}
}

// promisedIsSum expects the ledger to be the sum of the records.
func (h *harness) promisedIsSum() error {
	var sum int64
	for _, v := range h.acknowledged {
		sum += v.Bytes
	}
	if got := h.Metric("hostpath_pool_promised_bytes", "local"); got != float64(sum) {
		return fmt.Errorf("%v bytes are promised, and the volumes have %d", got, sum)
	}
	return nil
}

// wantWork expects the pool to serve: a volume can live its life there.
func (h *harness) wantWork(pool string) {
	h.Helper()
	for _, block := range []bool{false, true} {
		v := drivertest.Volume{ID: fmt.Sprintf("pvc-life-%v", block), Pool: pool, Block: block, Bytes: small}
		ctx := h.Context()
		h.Must(must.Err(h.Create(ctx, v)))
		h.Must(h.Publish(ctx, v, v.ID))
		h.Must(must.Err(h.Stats(ctx, v.ID, v.ID)))
		v.Bytes = grown
		h.Must(must.Err(h.Expand(ctx, v, v.ID)))
		h.Must(h.Unpublish(ctx, v.ID, v.ID))
		h.Must(h.Delete(ctx, v.ID))
	}
}

// end expects the pool to serve again, with no restart, and as it did at the beginning.
func (h *harness) end() {
	h.Helper()
	h.AwaitServing()
	h.wantWhole("after the fault")
	h.wantWork("local")
	h.wantWork("other")
	h.Restart()
	h.wantWhole("started again")
	for len(h.acknowledged) > 0 {
		v := h.acknowledged[0]
		h.Must(h.unpublish(v.Volume))
		h.Must(h.delete(v.Volume))
	}
	h.wantWhole("after all was removed")
	h.Eventually("the pool has what it had at first", func() bool {
		h.Must(h.pool.Settle())
		got := h.MustCapacity("local")
		return got > h.before-capacitySlack && got < h.before+capacitySlack
	})
}

// capacitySlack is what a filesystem keeps of what was in use for a while, and the step
// in which capacity is reported.
const capacitySlack = 16 * mib
