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
	device, err := loopfs.Attach(image)
	must.Succeed(m, err)
	m.device = device.Name()
	m.Cleanup(func() { must.Succeed(m, device.Close()) })
}

func (m *mount) begin() {
	m.Helper()
	m.mount()
	m.Cleanup(func() {
		mounts, err := mountns.Below(m.at)
		must.Succeed(m, err)
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

// A world is a driver with a pool that something happens to, and another pool.
type world struct {
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

// newWorld starts a driver with volumes that are published, and others that are not.
func newWorld(t *testing.T, driver string, m *mount) *world {
	t.Helper()
	enforcement := ""
	if m.enforced {
		enforcement = "required"
	}
	local := drivertest.PoolConfig{Name: "local", Path: m.at, Enforcement: enforcement}
	other := drivertest.PoolConfig{Name: "other", Path: t.TempDir()}
	w := &world{mount: m}
	t.Cleanup(func() { must.Succeed(t, w.detach()) })
	w.Driver = drivertest.Start(t, drivertest.Config{
		Binary: driver,
		Pools:  []drivertest.PoolConfig{local, other},
		Flags:  []string{"--metrics-address=127.0.0.1:0", "--v=4"},
	})
	w.pool = &drivertest.Pool{Driver: w.Driver, PoolConfig: local, Largest: 2 * grown}
	w.other = &drivertest.Pool{Driver: w.Driver, PoolConfig: other}
	w.before = w.capacity()
	for _, v := range []drivertest.Volume{tree, idle, doomed, raw, spare, doomedDisk} {
		w.Must(w.create(v))
		w.Must(w.fill(v))
	}
	w.Must(w.publish(tree))
	w.Must(w.publish(raw))
	attached, err := w.pool.Attached()
	w.Must(err)
	w.device = attached[0]
	return w
}

// detach takes down what a test that failed has left of the device: the kernel knows its
// file by another path once the pool was unmounted.
func (w *world) detach() error {
	if !w.attached() {
		return nil
	}
	return loopfs.DetachDevice("/dev/" + w.device.Name)
}

// attached reports whether the device of the volume raw has its file.
func (w *world) attached() bool {
	file, err := os.ReadFile("/sys/block/" + w.device.Name + "/loop/backing_file")
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
func (w *world) find(id string) *drivertest.Kept {
	for i := range w.acknowledged {
		if w.acknowledged[i].ID == id {
			return &w.acknowledged[i]
		}
	}
	return nil
}

// create, and what follows, make a call and note what its answer promises.
func (w *world) create(v drivertest.Volume) error { return w.createIn(w.Context(), v) }

func (w *world) createIn(ctx context.Context, v drivertest.Volume) error {
	_, err := w.Create(ctx, v)
	if err == nil && w.find(v.ID) == nil {
		w.acknowledged = append(w.acknowledged, drivertest.Kept{Volume: v})
	}
	return err
}

func (w *world) delete(v drivertest.Volume) error {
	err := w.Delete(w.Context(), v.ID)
	if err == nil {
		w.acknowledged = slices.DeleteFunc(w.acknowledged, func(k drivertest.Kept) bool { return k.ID == v.ID })
	}
	return err
}

// publish publishes for a pod of the volume's name.
func (w *world) publish(v drivertest.Volume) error {
	err := w.Publish(w.Context(), v, v.ID)
	if k := w.find(v.ID); err == nil && k != nil {
		k.Pods = []string{v.ID}
	}
	return err
}

func (w *world) unpublish(v drivertest.Volume) error {
	err := w.Unpublish(w.Context(), v.ID, v.ID)
	if k := w.find(v.ID); err == nil && k != nil {
		k.Pods = nil
	}
	return err
}

func (w *world) expand(v drivertest.Volume) error {
	v.Bytes = grown
	_, err := w.Expand(w.Context(), v, v.ID)
	if k := w.find(v.ID); err == nil && k != nil {
		k.Bytes = grown
	}
	return err
}

func (w *world) capacity() int64 {
	w.Helper()
	got, err := w.Capacity(w.Context(), "local")
	w.Must(err)
	return got
}

// content is what users have written.
const content = "written by a user, and not to be lost\n"

func (w *world) file(v drivertest.Volume) string {
	if v.Block {
		return w.pool.Image(v.ID)
	}
	return filepath.Join(w.mount.at, v.ID, "file")
}

// fill writes to a volume that is not published.
func (w *world) fill(v drivertest.Volume) error {
	f, err := os.OpenFile(w.file(v), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(content)
	return errors.Join(err, f.Sync(), f.Close())
}

// holds expects what users have written to be there.
func (w *world) holds(v drivertest.Volume) error {
	f, err := os.Open(w.file(v))
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
func (w *world) wantWhole(when string) {
	w.Helper()
	w.wantKept(when)
	if err := w.pool.Lists(w.acknowledged); err != nil {
		w.Fatalf("%s:\n%v", when, err)
	}
}

// wantKept is wantWhole for volumes that cannot be in order.
func (w *world) wantKept(when string) {
	w.Helper()
	w.AwaitNoTrash(w.mount.at)
	problems := []error{w.pool.Holds(w.acknowledged), w.pool.MountedAndAttached(w.acknowledged), w.pool.Unleaked(), w.promisedIsSum()}
	for _, v := range w.acknowledged {
		problems = append(problems, w.pool.InOrder(v))
	}
	for _, v := range []drivertest.Volume{tree, idle, doomed, raw, spare, doomedDisk} {
		if w.find(v.ID) != nil {
			problems = append(problems, w.holds(v))
		}
	}
	if err := errors.Join(problems...); err != nil {
		w.Fatalf("%s:\n%v", when, err)
	}
}

// promisedIsSum expects the ledger to be the sum of the records.
func (w *world) promisedIsSum() error {
	var sum int64
	for _, v := range w.acknowledged {
		sum += v.Bytes
	}
	if got := w.Metric("hostpath_pool_promised_bytes", "local"); got != float64(sum) {
		return fmt.Errorf("%v bytes are promised, and the volumes have %d", got, sum)
	}
	return nil
}

// wantWork expects the pool to serve: a volume can live its life there.
func (w *world) wantWork(pool string) {
	w.Helper()
	for _, block := range []bool{false, true} {
		v := drivertest.Volume{ID: fmt.Sprintf("pvc-life-%v", block), Pool: pool, Block: block, Bytes: small}
		ctx := w.Context()
		_, created := w.Create(ctx, v)
		w.Must(created)
		w.Must(w.Publish(ctx, v, v.ID))
		_, measured := w.Stats(ctx, v.ID, v.ID)
		w.Must(measured)
		v.Bytes = grown
		_, expanded := w.Expand(ctx, v, v.ID)
		w.Must(expanded)
		w.Must(w.Unpublish(ctx, v.ID, v.ID))
		w.Must(w.Delete(ctx, v.ID))
	}
}

// end expects the pool to serve again, with no restart, and as it did at the beginning.
func (w *world) end() {
	w.Helper()
	w.AwaitServing()
	w.wantWhole("after the fault")
	w.wantWork("local")
	w.wantWork("other")
	w.Restart()
	w.wantWhole("started again")
	for len(w.acknowledged) > 0 {
		v := w.acknowledged[0]
		w.Must(w.unpublish(v.Volume))
		w.Must(w.delete(v.Volume))
	}
	w.wantWhole("after all was removed")
	w.Eventually("the pool has what it had at first", func() bool {
		w.Must(w.pool.Settle())
		got := w.capacity()
		return got > w.before-capacitySlack && got < w.before+capacitySlack
	})
}

// capacitySlack is what a filesystem keeps of what was in use for a while, and the step
// in which capacity is reported.
const capacitySlack = 16 * mib
