package drivertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// A Pool is one of a driver's pools, as the disk and the kernel have it. Nothing of it is
// held open between calls.
type Pool struct {
	*Driver
	PoolConfig
	// Largest is the most bytes that a block volume was asked to have: the limit of its
	// directory may stay where a growth that was not finished had it.
	Largest int64
	// Snapshots are the names of those that there should be.
	Snapshots []string
}

// A Kept volume is one that there should be.
type Kept struct {
	Volume
	// Pods have it published.
	Pods []string
}

// A Record is what the driver has written of a volume, as in docs/layout.md.
type Record struct {
	ID        string `json:"id"`
	UID       string `json:"uid"`
	Mode      string `json:"mode"`
	Bytes     int64  `json:"bytes"`
	Quota     string `json:"quota"`
	ProjectID uint64 `json:"projectID"`
	Inline    bool   `json:"inline"`
	Thin      bool   `json:"thin"`
	Family    string `json:"family"`
	Origin    struct {
		Method      string `json:"method"`
		Consistency string `json:"consistency"`
		TookMillis  int64  `json:"tookMillis"`
		StallMillis int64  `json:"stallMillis"`
	} `json:"origin"`
}

// Own is the path of something of the driver's own in the pool.
func (p *Pool) Own(elements ...string) string {
	return filepath.Join(append([]string{p.Path, ".hostpath-provisioner"}, elements...)...)
}

// Image is the file of a block volume.
func (p *Pool) Image(id string) string { return filepath.Join(p.Path, id, "disk.img") }

// Record reads that of a volume.
func (p *Pool) Record(id string) (Record, error) {
	var r Record
	content, err := os.ReadFile(p.Own("volumes", id+".json"))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(content, &r)
}

// Names are those of a directory, but for what mkfs made; none if it is not there.
func Names(path string) ([]string, error) {
	entries, err := os.ReadDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if e.Name() != "lost+found" {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// Problems is all that is wrong with a pool that is to have these volumes and no others.
func (p *Pool) Problems(all []Kept) error {
	problems := []error{p.Holds(all), p.Lists(all), p.MountedAndAttached(all), p.Unleaked()}
	for _, v := range all {
		problems = append(problems, p.InOrder(v))
	}
	return errors.Join(problems...)
}

// Holds expects the pool's directories to have these volumes and nothing else.
func (p *Pool) Holds(all []Kept) error {
	var records, published []string
	volumes := []string{".hostpath-provisioner"}
	for _, v := range all {
		records = append(records, v.ID+".json")
		volumes = append(volumes, v.ID)
		if len(v.Pods) > 0 && p.Shared {
			published = append(published, v.ID)
		}
	}
	own := []string{"format", "lock", "creating", "trash", "volumes"}
	if _, err := os.Lstat(p.Own("published")); published != nil || p.Shared && err == nil {
		own = append(own, "published") // stays, once it is made
	}
	if _, err := os.Lstat(p.Own("snapshots")); err == nil {
		own = append(own, "snapshots") // stays, once it is made
	}
	var snapshots []string
	for _, name := range p.Snapshots {
		snapshots = append(snapshots, "~"+name)
		records = append(records, "~"+name+".json")
	}
	var problems []error
	for path, want := range map[string][]string{
		p.Own("snapshots"):           snapshots,
		p.Path:                       volumes,
		p.Own():                      own,
		p.Own("volumes"):             records,
		p.Own("creating"):            {NodeName},
		p.Own("creating", NodeName):  nil,
		p.Own("trash"):               {NodeName},
		p.Own("trash", NodeName):     nil,
		p.Own("published", NodeName): published,
	} {
		got, err := Names(path)
		slices.Sort(want)
		if err != nil || !slices.Equal(got, want) {
			problems = append(problems, fmt.Errorf("%s holds %q, %v; want %q", path, got, err, want))
		}
	}
	return errors.Join(problems...)
}

// Lists expects the driver to report these volumes of the pool, all of them in order.
func (p *Pool) Lists(all []Kept) error {
	got, err := p.List(p.Context(), 0)
	if err != nil {
		return err
	}
	wanted := make(map[string]Kept)
	for _, v := range all {
		wanted[v.ID] = v
	}
	var problems []error
	for _, e := range got {
		if in := e.GetVolume().GetVolumeContext()["storagePool"]; in != p.Name {
			continue
		}
		v, want := wanted[e.GetVolume().GetVolumeId()]
		delete(wanted, v.ID)
		problems = append(problems, matches(e, v, want))
	}
	for id := range wanted {
		problems = append(problems, fmt.Errorf("%s is not listed", id))
	}
	return errors.Join(problems...)
}

// matches expects an entry of a list to be about a volume in order.
func matches(e *csi.ListVolumesResponse_Entry, v Kept, want bool) error {
	id, status := e.GetVolume().GetVolumeId(), e.GetStatus()
	switch {
	case !want:
		return fmt.Errorf("%s is listed", id)
	case e.GetVolume().GetCapacityBytes() != v.Bytes:
		return fmt.Errorf("%s is listed with %d bytes, want %d", id, e.GetVolume().GetCapacityBytes(), v.Bytes)
	case oldcsi.Condition(status).GetAbnormal():
		return fmt.Errorf("%s is abnormal: %s", id, oldcsi.Condition(status).GetMessage())
	case (len(status.GetPublishedNodeIds()) == 1) != (len(v.Pods) > 0):
		return fmt.Errorf("%s is published on %q, want that: %v", id, status.GetPublishedNodeIds(), len(v.Pods) > 0)
	}
	return nil
}

// MountedAndAttached expects one mount for each pod that has a volume, and is AttachedOnly.
func (p *Pool) MountedAndAttached(all []Kept) error {
	var mounts []string
	for _, v := range all {
		for _, pod := range v.Pods {
			mounts = append(mounts, p.Target(pod))
		}
	}
	got, err := mountns.Below(p.Targets)
	slices.Sort(got)
	slices.Sort(mounts)
	if err != nil || !slices.Equal(got, mounts) {
		err = fmt.Errorf("mounted are %q, %v; want %q", got, err, mounts)
	}
	return errors.Join(err, p.AttachedOnly(all))
}

// AttachedOnly expects one device of each block volume that a pod has, and no others.
func (p *Pool) AttachedOnly(all []Kept) error {
	devices := make(map[string]bool)
	for _, v := range all {
		if v.Block && len(v.Pods) > 0 {
			devices[p.Image(v.ID)] = true
		}
	}
	attached, err := p.Attached()
	problems := []error{err}
	for _, d := range attached {
		if !devices[d.File] {
			problems = append(problems, fmt.Errorf("%s is attached to %s", d.Name, d.File))
		}
		delete(devices, d.File)
	}
	for file := range devices {
		problems = append(problems, fmt.Errorf("no device is attached to %s", file))
	}
	return errors.Join(problems...)
}

// A Device is a loop device on a file of a pool.
type Device struct{ Name, File string }

// Attached are the devices on files of the pool.
func (p *Pool) Attached() ([]Device, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	var all []Device
	for _, file := range files {
		// A device may go while it is checked; then it is not one of these.
		content, _ := os.ReadFile(file)
		if backing := strings.TrimSpace(string(content)); strings.HasPrefix(backing, p.Path+"/") {
			all = append(all, Device{Name: strings.Split(file, "/")[3], File: backing})
		}
	}
	return all, err
}

// InOrder expects a volume to be what its record says, and to be where it is published.
func (p *Pool) InOrder(v Kept) error {
	r, err := p.Record(v.ID)
	if err != nil {
		return err
	}
	mode, permissions := "mount", os.FileMode(0o777)
	if v.Block {
		mode, permissions = "block", 0o700
	}
	var problems []error
	if r.ID != v.ID || r.Mode != mode || r.Bytes != v.Bytes || r.Inline != v.Inline || r.UID == "" || r.Thin != (v.Block && p.thin()) {
		problems = append(problems, fmt.Errorf("the record of %s is %+v", v.ID, r))
	}
	info, err := os.Stat(filepath.Join(p.Path, v.ID))
	if err != nil {
		return err
	}
	if info.Mode().Perm() != permissions {
		problems = append(problems, fmt.Errorf("the mode of %s is %v, want %v", v.ID, info.Mode(), permissions))
	}
	problems = append(problems, p.limited(v, r), p.labelled(v), p.whole(v))
	for _, pod := range v.Pods {
		problems = append(problems, p.carries(pod, v))
	}
	return errors.Join(problems...)
}

func (p *Pool) thin() bool { return p.Allocation == "thin" }

// withQuota has a function work on the pool's directory, and with what keeps the sizes
// there; it is not called if none does.
func (p *Pool) withQuota(work func(root *dir.Dir, f quota.Facility) error) error {
	if p.Enforcement != "required" {
		return nil
	}
	root, err := dir.Open(p.Path)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // opened for reading
	f, err := quota.Detect(root)
	if err != nil {
		return err
	}
	return work(root, f)
}

// limited expects the kernel to enforce the size of a volume, by an id of its own.
func (p *Pool) limited(v Kept, r Record) error {
	return p.withQuota(func(root *dir.Dir, f quota.Facility) error {
		d, err := root.Open(v.ID)
		if err != nil {
			return err
		}
		defer func() { _ = d.Close() }()
		id, err := f.IDOf(d)
		if err != nil {
			return err
		}
		if id == 0 || r.Quota != string(f.Kind()) || f.Kind() != quota.Btrfs && uint64(id) != r.ProjectID {
			return fmt.Errorf("%s is counted by %d, its record says %+v", v.ID, id, r)
		}
		usage, err := f.Usage(root, id)
		if err != nil {
			return err
		}
		least, most := v.Bytes, v.Bytes
		if v.Block {
			// The file keeps the size. The limit leaves room for what keeps track of it.
			largest := max(v.Bytes, p.Largest)
			least, most = v.Bytes+mib, largest+largest/8+2*mib
			if f.Kind() == quota.Btrfs { // or which was discarded
				least, most = least+v.Bytes, most+largest
			}
			if times := sharesTimes[f.Kind()]; r.Family != "" {
				least, most = least+times*v.Bytes, most+times*largest
			}
		}
		if r.Family != "" && f.Kind() == quota.XFS && !v.Block { // which overwrites shared blocks elsewhere
			slack := mib + v.Bytes/64
			least, most = least+slack, most+slack
		}
		if usage.Limit.Bytes < least || usage.Limit.Bytes > most {
			return fmt.Errorf("the limit of %s is %d bytes, want %d to %d", v.ID, usage.Limit.Bytes, least, most)
		}
		return nil
	})
}

// sharesTimes is how often besides the size of a block volume is in its limit while it shares blocks: XFS counts what is for
// later writes, and btrfs overwritten extents.
var sharesTimes = map[quota.Kind]int64{quota.XFS: 1, quota.Btrfs: 3}

const mib = 1 << 20

// labelled expects a volume to have the label of containers, where there is SELinux.
func (p *Pool) labelled(v Kept) error {
	if os.Getenv("HOSTPATH_KERNEL_SELINUX") == "" || v.Block {
		return nil
	}
	buffer := make([]byte, 256)
	n, err := unix.Lgetxattr(filepath.Join(p.Path, v.ID), "security.selinux", buffer)
	if err != nil {
		return err
	}
	if got := string(buffer[:n]); !strings.Contains(got, ":container_file_t:") {
		return fmt.Errorf("the label of %s is %s", v.ID, got)
	}
	return nil
}

// whole expects the file of a block volume to have all of its size.
func (p *Pool) whole(v Kept) error {
	if !v.Block {
		return nil
	}
	var st unix.Stat_t
	if err := unix.Lstat(p.Image(v.ID), &st); err != nil {
		return err
	}
	switch {
	case st.Size < v.Bytes:
		return fmt.Errorf("the file of %s has %d bytes, want %d", v.ID, st.Size, v.Bytes)
	case !p.thin() && st.Blocks*512 < v.Bytes:
		return fmt.Errorf("the file of %s has %d bytes set aside, want %d", v.ID, st.Blocks*512, v.Bytes)
	}
	return nil
}

// carries expects a volume to be at a pod's target, and a device to have its size.
func (p *Pool) carries(pod string, v Kept) error {
	if !v.Block {
		var volume, target unix.Stat_t
		if err := errors.Join(unix.Stat(filepath.Join(p.Path, v.ID), &volume), unix.Stat(p.Target(pod), &target)); err != nil {
			return err
		}
		if volume.Dev != target.Dev || volume.Ino != target.Ino {
			return fmt.Errorf("%s carries another directory than %s", p.Target(pod), v.ID)
		}
		return nil
	}
	devices, err := p.Attached()
	for _, d := range devices {
		if d.File != p.Image(v.ID) {
			continue
		}
		sectors, err := os.ReadFile("/sys/block/" + d.Name + "/size")
		if err != nil {
			return err
		}
		if n, err := strconv.ParseInt(strings.TrimSpace(string(sectors)), 10, 64); err != nil || n*512 < v.Bytes {
			return fmt.Errorf("the device of %s has %q sectors, want %d bytes", v.ID, sectors, v.Bytes)
		}
	}
	return err
}

// Unleaked expects no limit to be left of what is gone. One that is, it takes away.
func (p *Pool) Unleaked() error {
	return p.withQuota(func(root *dir.Dir, f quota.Facility) error {
		released, err := f.ReleaseUnused(root, p.recorded)
		if err == nil && released > 0 {
			err = fmt.Errorf("%d limits are left of volumes that are gone", released)
		}
		return err
	})
}

func (p *Pool) recorded(id quota.ID) bool {
	names, err := Names(p.Own("volumes"))
	if err != nil {
		return true // Holds reports it
	}
	return slices.ContainsFunc(names, func(name string) bool {
		r, err := p.Record(strings.TrimSuffix(name, ".json"))
		return err == nil && r.ProjectID == uint64(id)
	})
}

// AwaitErased waits until the driver is done with all that was removed, for which it serves metrics: it gives limits back after
// the trash is empty.
func (p *Pool) AwaitErased() {
	p.Helper()
	p.AwaitNoTrash(p.Path)
	p.Eventually("the driver is done with the trash", func() bool {
		metrics, err := p.Metrics(p.Context())
		p.Must(err)
		return strings.Contains(metrics, fmt.Sprintf("\nhostpath_pool_trash_entries{pool=%q} 0\n", p.Name))
	})
}

// Settle brings the filesystem's numbers up to date.
func (p *Pool) Settle() error {
	root, err := dir.Open(p.Path)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }() // opened for reading
	var fs unix.Statfs_t
	if err := unix.Fstatfs(root.Fd(), &fs); err != nil {
		return err
	}
	if uint32(fs.Type) == unix.BTRFS_SUPER_MAGIC {
		// This also wakes who clears away removed subvolumes, every 30 seconds else.
		const sync = 0x94<<8 | 8 // BTRFS_IOC_SYNC of linux/btrfs.h
		return unix.IoctlSetInt(root.Fd(), sync, 0)
	}
	return unix.Syncfs(root.Fd())
}
