package crash

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// capacitySlack is what the filesystem itself may take or give, and the step in which
// capacity is told. No volume is as small.
const capacitySlack = 4 * mib

// A record is what the driver has written of a volume, as docs/layout.md tells.
type record struct {
	ID        string `json:"id"`
	UID       string `json:"uid"`
	Mode      string `json:"mode"`
	Bytes     int64  `json:"bytes"`
	Quota     string `json:"quota"`
	ProjectID uint64 `json:"projectID"`
	Inline    bool   `json:"inline"`
	Thin      bool   `json:"thin"`
}

// wantState expects the victim to be in one of some states, the pool to be in order for
// that, and the volumes of others to be as they were.
func (w *world) wantState(where string, possible ...state) {
	w.Helper()
	is := w.look()
	w.now = is
	if !slices.Contains(possible, is) {
		w.Errorf("%s: the volume is %+v, want one of %+v", where, is, possible)
	}
	all := w.expected(is)
	problems := []error{w.inPool(all), w.listed(all), w.mountedAndAttached(all), w.capacityIs(is), w.unleaked()}
	for _, v := range all {
		problems = append(problems, w.inOrder(v))
	}
	if err := errors.Join(problems...); err != nil {
		w.Errorf("%s: the volume is %+v, but:\n%v", where, is, err)
	}
}

// A volume is one that there should be.
type volume struct {
	id string
	state
}

func (w *world) expected(victimIs state) []volume {
	var all []volume
	for _, o := range others {
		all = append(all, volume{o.id, state{bytes: o.bytes, block: o.block, published: true}})
	}
	if victimIs != (state{}) {
		all = append(all, volume{victim, victimIs})
	}
	return all
}

// look finds what there is of the victim, by what the disk and the kernel have.
func (w *world) look() state {
	w.Helper()
	var is state
	r, err := w.record(victim)
	if errors.Is(err, os.ErrNotExist) {
		return is
	}
	w.Must(err)
	is.bytes, is.block, is.inline = r.Bytes, r.Mode == "block", r.Inline
	is.published = slices.Contains(w.mounts(), w.Target(victim))
	return is
}

func (w *world) record(id string) (record, error) {
	var r record
	content, err := os.ReadFile(w.own("volumes", id+".json"))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(content, &r)
}

func (w *world) mounts() []string {
	w.Helper()
	mounts, err := mountns.Below(w.Targets)
	w.Must(err)
	return mounts
}

// inPool expects the pool to have these volumes and nothing else.
func (w *world) inPool(all []volume) error {
	var records []string
	volumes := []string{".hostpath-provisioner"}
	published := []string(nil)
	for _, v := range all {
		records = append(records, v.id+".json")
		volumes = append(volumes, v.id)
		if v.published && w.place.shared {
			published = append(published, v.id)
		}
	}
	own := []string{"format", "lock", "staging", "trash", "volumes"}
	if published != nil {
		own = append(own, "published")
	}
	var problems []error
	for path, want := range map[string][]string{
		w.pool:                                  volumes,
		w.own():                                 own,
		w.own("volumes"):                        records,
		w.own("staging"):                        {drivertest.NodeName},
		w.own("staging", drivertest.NodeName):   nil,
		w.own("trash"):                          {drivertest.NodeName},
		w.own("trash", drivertest.NodeName):     nil,
		w.own("published", drivertest.NodeName): published,
	} {
		got := w.names(path)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			problems = append(problems, fmt.Errorf("%s holds %q, want %q", path, got, want))
		}
	}
	return errors.Join(problems...)
}

// listed expects the driver to tell of these volumes, all of them in order.
func (w *world) listed(all []volume) error {
	got, err := w.List(w.Context(), 0)
	if err != nil {
		return err
	}
	wanted := make(map[string]volume)
	for _, v := range all {
		wanted[v.id] = v
	}
	var problems []error
	for _, e := range got {
		id, status := e.GetVolume().GetVolumeId(), e.GetStatus()
		v, want := wanted[id]
		delete(wanted, id)
		switch {
		case !want:
			problems = append(problems, fmt.Errorf("%s is listed", id))
		case e.GetVolume().GetCapacityBytes() != v.bytes:
			problems = append(problems, fmt.Errorf("%s is listed with %d bytes, want %d", id, e.GetVolume().GetCapacityBytes(), v.bytes))
		case status.GetVolumeCondition().GetAbnormal():
			problems = append(problems, fmt.Errorf("%s is abnormal: %s", id, status.GetVolumeCondition().GetMessage()))
		case (len(status.GetPublishedNodeIds()) == 1) != v.published:
			problems = append(problems, fmt.Errorf("%s is published on %q, want that: %v", id, status.GetPublishedNodeIds(), v.published))
		}
	}
	for id := range wanted {
		problems = append(problems, fmt.Errorf("%s is not listed", id))
	}
	return errors.Join(problems...)
}

// mountedAndAttached expects one mount of each volume that is published, and one device
// of each such block volume.
func (w *world) mountedAndAttached(all []volume) error {
	var mounts []string
	devices := make(map[string]bool)
	for _, v := range all {
		if v.published {
			mounts = append(mounts, w.Target(v.id))
		}
		if v.published && v.block {
			devices[filepath.Join(w.pool, v.id, "disk.img")] = true
		}
	}
	var problems []error
	got := w.mounts()
	slices.Sort(got)
	slices.Sort(mounts)
	if !slices.Equal(got, mounts) {
		problems = append(problems, fmt.Errorf("mounted are %q, want %q", got, mounts))
	}
	for _, d := range w.devices() {
		if !devices[d.file] {
			problems = append(problems, fmt.Errorf("%s is attached to %s", d.name, d.file))
		}
		delete(devices, d.file)
	}
	for file := range devices {
		problems = append(problems, fmt.Errorf("no device is attached to %s", file))
	}
	return errors.Join(problems...)
}

// A device is a loop device on a file of the pool.
type device struct{ name, file string }

func (w *world) devices() []device {
	w.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	w.Must(err)
	var all []device
	for _, file := range files {
		// A device may go while it is looked at; then it is not one of these.
		content, _ := os.ReadFile(file)
		if backing := strings.TrimSpace(string(content)); strings.HasPrefix(backing, w.pool+"/") {
			all = append(all, device{name: strings.Split(file, "/")[3], file: backing})
		}
	}
	return all
}

// inOrder expects a volume to be what its record says, and its content to be there.
func (w *world) inOrder(v volume) error {
	r, err := w.record(v.id)
	if err != nil {
		return err
	}
	mode, permissions := "mount", os.FileMode(0o777)
	if v.block {
		mode, permissions = "block", 0o700
	}
	var problems []error
	if r.ID != v.id || r.Mode != mode || r.Bytes != v.bytes || r.Inline != v.inline || r.UID == "" || r.Thin != (v.block && w.place.thin) {
		problems = append(problems, fmt.Errorf("the record of %s is %+v", v.id, r))
	}
	info, err := os.Stat(filepath.Join(w.pool, v.id))
	if err != nil {
		return err
	}
	if info.Mode().Perm() != permissions {
		problems = append(problems, fmt.Errorf("the mode of %s is %v, want %v", v.id, info.Mode(), permissions))
	}
	problems = append(problems, w.limited(v, r), w.labelled(v))
	if v.block {
		problems = append(problems, w.diskInOrder(v))
	}
	if v.published {
		problems = append(problems, w.usable(v))
	}
	return errors.Join(problems...)
}

// limited expects the kernel to keep the size of a volume, by an id of its own.
func (w *world) limited(v volume, r record) error {
	if w.quota == nil {
		return nil
	}
	d, err := w.root.Open(v.id)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	id, err := w.quota.IDOf(d)
	if err != nil {
		return err
	}
	if id == 0 || r.Quota != string(w.quota.Kind()) || w.quota.Kind() != quota.Btrfs && uint64(id) != r.ProjectID {
		return fmt.Errorf("%s is counted by %d, its record says %+v", v.id, id, r)
	}
	usage, err := w.quota.Usage(w.root, id)
	if err != nil {
		return err
	}
	least, most := v.bytes, v.bytes
	if v.block {
		// The file keeps the size. The limit leaves room for what keeps track of it, and
		// a crash may leave it as it is for a larger one.
		least, most = v.bytes+mib, large+large/16+2*mib
	}
	if usage.Limit.Bytes < least || usage.Limit.Bytes > most {
		return fmt.Errorf("the limit of %s is %d bytes, want %d to %d", v.id, usage.Limit.Bytes, least, most)
	}
	return nil
}

// labelled expects a volume to have the label of containers, where there is SELinux.
func (w *world) labelled(v volume) error {
	if os.Getenv("HOSTPATH_KERNEL_SELINUX") == "" || v.block {
		return nil
	}
	buffer := make([]byte, 256)
	n, err := unix.Lgetxattr(filepath.Join(w.pool, v.id), "security.selinux", buffer)
	if err != nil {
		return err
	}
	if got := string(buffer[:n]); !strings.Contains(got, ":container_file_t:") {
		return fmt.Errorf("the label of %s is %s", v.id, got)
	}
	return nil
}

// diskInOrder expects the file of a block volume to have all of its size.
func (w *world) diskInOrder(v volume) error {
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(w.pool, v.id, "disk.img"), &st); err != nil {
		return err
	}
	switch {
	case st.Size < v.bytes:
		return fmt.Errorf("the file of %s has %d bytes, want %d", v.id, st.Size, v.bytes)
	case !w.place.thin && st.Blocks*512 < v.bytes:
		return fmt.Errorf("the file of %s has %d bytes set aside, want %d", v.id, st.Blocks*512, v.bytes)
	}
	return nil
}

// usable expects a volume to be where it is published, and of its size.
func (w *world) usable(v volume) error {
	if !v.block {
		var volume, target unix.Stat_t
		if err := errors.Join(unix.Stat(filepath.Join(w.pool, v.id), &volume), unix.Stat(w.Target(v.id), &target)); err != nil {
			return err
		}
		if volume.Dev != target.Dev || volume.Ino != target.Ino {
			return fmt.Errorf("%s carries another directory than %s", w.Target(v.id), v.id)
		}
		return w.has(v, filepath.Join(w.Target(v.id), "file"))
	}
	for _, d := range w.devices() {
		if d.file != filepath.Join(w.pool, v.id, "disk.img") {
			continue
		}
		sectors, err := os.ReadFile("/sys/block/" + d.name + "/size")
		if err != nil {
			return err
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(sectors)), 10, 64); err != nil || n*512 < v.bytes {
			return fmt.Errorf("the device of %s has %s sectors, want %d bytes", v.id, bytes.TrimSpace(sectors), v.bytes)
		}
	}
	return w.has(v, w.Target(v.id))
}

// has expects what users wrote, and that they can write. An inline volume is new each
// time.
func (w *world) has(v volume, path string) error {
	if v.inline {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) && v.id == victim && !w.filled {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	got := make([]byte, len(content))
	if _, err := f.Read(got); err != nil {
		return err
	}
	if string(got) != content && (v.id != victim || w.filled) {
		return fmt.Errorf("%s has the content %q", path, got)
	}
	if _, err := f.WriteAt(got, 0); err != nil {
		return err
	}
	return f.Sync()
}

// capacityOf learns what the pool has left in a state that no crash has led to.
func (w *world) capacityOf(s state) {
	w.Helper()
	if w.now != s {
		w.Fatalf("the volume is %+v, not %+v", w.now, s)
	}
	if w.place.kind == quota.Btrfs {
		w.settle()
		w.Must(errors.Join(w.Node.Stop(), w.Node.Restart(w.Context())))
	}
	w.capacities[s] = w.capacity()
}

func (w *world) capacity() int64 {
	w.Helper()
	got, err := w.Capacity(w.Context(), "local")
	w.Must(err)
	return got
}

// capacityIs expects the ledger to have what the records sum up to: what the pool had
// left without a crash.
func (w *world) capacityIs(s state) error {
	all := int64(-1)
	for known, capacity := range w.capacities {
		all = capacity + known.bytes
	}
	if all < 0 {
		return nil
	}
	want := all - s.bytes
	near := func() bool {
		got := w.capacity()
		return got > want-capacitySlack && got < want+capacitySlack
	}
	// What is free is no number of the driver's, and the reaper, which has emptied the
	// trash, is about to tell the ledger.
	for range 2 {
		if near() {
			return nil
		}
		w.settle()
	}
	if w.place.kind == quota.Btrfs {
		// It counts behind, and what others hold is counted once a minute and at the start.
		w.Must(errors.Join(w.Node.Stop(), w.Node.Restart(w.Context())))
		if near() {
			return nil
		}
	}
	return fmt.Errorf("the capacity is %d bytes, want %d", w.capacity(), want)
}

// unleaked expects no limit to be left of what is gone.
func (w *world) unleaked() error {
	if w.quota == nil {
		return nil
	}
	released, err := w.quota.ReleaseUnused(w.root, func(id quota.ID) bool { return w.recorded(id) })
	if err == nil && released > 0 {
		err = fmt.Errorf("%d limits are left of volumes that are gone", released)
	}
	return err
}

func (w *world) recorded(id quota.ID) bool {
	for _, name := range w.names(w.own("volumes")) {
		if r, err := w.record(strings.TrimSuffix(name, ".json")); err == nil && r.ProjectID == uint64(id) {
			return true
		}
	}
	return false
}

// settle brings the filesystem's numbers up to date.
func (w *world) settle() {
	w.Helper()
	if w.place.kind == quota.Btrfs {
		// This also wakes who clears away removed subvolumes, every 30 seconds else.
		const sync = 0x94<<8 | 8 // BTRFS_IOC_SYNC of linux/btrfs.h
		w.Must(unix.IoctlSetInt(w.root.Fd(), sync, 0))
		return
	}
	w.Must(unix.Syncfs(w.root.Fd()))
}

// wantNothingLeft expects an empty pool, after all volumes were deleted.
func (w *world) wantNothingLeft() {
	w.Helper()
	left := append(w.names(w.pool), w.names(w.own("volumes"))...)
	left = append(left, w.mounts()...)
	for _, d := range w.devices() {
		left = append(left, d.name)
	}
	for _, o := range others {
		left = append(left, w.names(filepath.Dir(w.Target(o.id)))...)
	}
	left = append(left, w.names(filepath.Dir(w.Target(victim)))...)
	if !slices.Equal(left, []string{".hostpath-provisioner"}) {
		w.Errorf("after all was removed there is still %q", left)
	}
}
