package bind

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
)

// table caches the mount table of this process, and rereads it only when the kernel
// reports a change.
type table struct {
	mu      sync.Mutex
	watch   *os.File
	entries mountinfo.Table // as last read; nil before
	// known are those of entries that were searched for, by a number that no other mount gets.
	known map[uint64]*mountinfo.Mount
}

func openTable() (*table, error) {
	// Not os.Open: that registers the file with the runtime's poller, which would consume
	// the change events.
	fd, err := unix.Open(mountinfo.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: mountinfo.Path, Err: err}
	}
	return &table{watch: os.NewFile(uintptr(fd), mountinfo.Path)}, nil
}

func (t *table) close() error { return t.watch.Close() }

// mounts returns the current table. The slice must not be modified.
func (t *table) mounts() (mountinfo.Table, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	changed, err := t.changed()
	if err != nil {
		return nil, err
	}
	if !changed && t.entries != nil {
		return t.entries, nil
	}
	t.entries = nil
	entries, err := mountinfo.Own()
	if err != nil {
		return nil, err
	}
	t.entries, t.known = entries, make(map[uint64]*mountinfo.Mount)
	return entries, nil
}

// mount is the mount that a directory is reached through, which has that id. The table is not read for one that is known:
// each publication changes it, and it has some ten lines for each pod of the node.
func (t *table) mount(d *dir.Dir, id MountID) (*mountinfo.Mount, error) {
	t.mu.Lock()
	m := t.known[id.number]
	t.mu.Unlock()
	if id.unique && m != nil {
		return m, nil
	}
	mounts, err := t.mounts()
	if err != nil {
		return nil, err
	}
	if m, err = mountAt(d, mounts); err != nil || m == nil {
		return nil, cmp.Or(err, fmt.Errorf("find the mount of %s: it is in no mount of this namespace", d))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if id.unique {
		t.known[id.number] = m
	}
	return m, nil
}

// A MountID is the number of a mount: unique if no other mount gets it as long as the kernel runs.
type MountID struct {
	number uint64
	unique bool
}

// statxMountUnique is STATX_MNT_ID_UNIQUE of linux/stat.h (Linux 6.8). Older kernels answer it with STATX_MNT_ID, which
// the mount table has, and which is given again.
const statxMountUnique = 0x4000

// changed reports whether the table changed since the last call: poll(2) returns
// POLLPRI then (proc_pid_mountinfo(5)). Polling before reading misses no change.
func (t *table) changed() (bool, error) {
	fds := []unix.PollFd{{Fd: int32(t.watch.Fd()), Events: unix.POLLPRI}}
	for {
		n, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("poll the mount table: %w", err)
		}
		return n > 0, nil
	}
}

// Published returns where the entries of a directory are published, by entry name.
// It reads the kernel's mount table, so it is correct after a restart and includes mounts made by
// others, and mounts of anything inside the entries, also through an earlier mount of the filesystem. It reads that anew: the
// kernel reports no change when a directory that is mounted moves.
func (*Kernel) Published(parent *dir.Dir) (map[string][]Publication, error) {
	mounts, err := mountinfo.Own()
	if err != nil {
		return nil, err
	}
	home, err := locate(parent, mounts)
	if err != nil {
		return nil, err
	}
	published := make(map[string][]Publication)
	for _, m := range mounts {
		if !home.mayBeOn(m) {
			continue
		}
		if m.Cut && strings.HasPrefix(home.prefix, withSlash(m.Root)) {
			return nil, fmt.Errorf("find what is published of %s: it is deeper in its filesystem than a path can be", parent)
		}
		for name, inside := range home.shown(m) {
			published[name] = append(published[name], Publication{
				Path: m.Mountpoint, Inside: inside, ReadOnly: slices.Contains(strings.Split(m.Options, ","), "ro"), ByName: home.anew(m),
			})
		}
	}
	return published, nil
}

// shown are the entries of the directory that a mount may show, or something inside them, with the path to that. Of a filesystem that
// was mounted anew it is unknown how deep the directory was in the mount before: a server may have exported what is above it.
func (p place) shown(m *mountinfo.Mount) iter.Seq2[string, string] {
	return func(yield func(name, inside string) bool) {
		anew := p.anew(m)
		below, ok := strings.CutPrefix(m.Root, p.prefix)
		if anew {
			below, ok = strings.TrimPrefix(m.Root, "/"), true
		}
		for ok && below != "" {
			name, inside, _ := strings.Cut(below, "/")
			if !yield(name, inside) {
				return
			}
			below, ok = inside, anew
		}
	}
}

// SameFilesystem reports whether two directories are on the same filesystem, even if
// subvolumes have different device numbers.
func (k *Kernel) SameFilesystem(a, b *dir.Dir) (bool, error) {
	mounts, err := k.table.mounts()
	if err != nil {
		return false, err
	}
	at, err := locate(a, mounts)
	if err != nil {
		return false, err
	}
	bt, err := locate(b, mounts)
	if err != nil {
		return false, err
	}
	return at.Major == bt.Major && at.Minor == bt.Minor, nil
}

// IsFilesystem reports whether a directory is the root of a mounted filesystem or subvolume, or a directory that the host
// has mounted below a volume of this container.
func (k *Kernel) IsFilesystem(d *dir.Dir) (bool, error) {
	found, err := examine(d.Fd())
	if err != nil || !found.mounted {
		return false, err
	}
	mounts, err := k.table.mounts()
	if err != nil {
		return false, err
	}
	at, err := locate(d, mounts)
	if err != nil {
		return false, err
	}
	// On btrfs exactly the roots of subvolumes have this inode number
	// (BTRFS_FIRST_FREE_OBJECTID).
	if at.prefix == "/" || mountinfo.IsNFS(at.fsType) || at.fsType == "btrfs" && found.id.Ino == 256 {
		return true, nil
	}
	m, err := mountAt(d, mounts)
	return m != nil && ofHost(m, mounts), err
}

// ofHost reports whether a bind mount comes from the host. The mount of a hostPath volume says nothing of the host: kubelet
// makes one of a bare directory too. But what is mounted below such a volume has come to the container from the host, by
// propagation, if it shows another directory than the one that it covers. What kubelet makes of a volume in another
// volume shows the same.
func ofHost(m *mountinfo.Mount, mounts mountinfo.Table) bool {
	volume := mounts.ByID(uint64(m.Parent))
	for volume != nil && volume.Mountpoint == m.Mountpoint && volume.Mountpoint != "/" { // several on one directory
		volume = mounts.ByID(uint64(volume.Parent))
	}
	if volume == nil || volume.Mountpoint == "/" {
		return false
	}
	covered, ok := placeIn(volume, m.Mountpoint)
	return ok && (m.Major != covered.Major || m.Minor != covered.Minor || withSlash(m.Root) != covered.prefix)
}

// A place is the location of a directory in its filesystem: the device number in the mount
// table (on btrfs not that of stat(2)), and the path in the filesystem.
type place struct {
	Major, Minor int
	prefix       string // ends with a slash
	fsType       string
}

// ofOneMount are the filesystems without a device number of a disk whose files no second superblock shows.
var ofOneMount = []string{"bcachefs", "btrfs", "devtmpfs", "ramfs", "tmpfs", "zfs"}

// anew reports whether the filesystem has been mounted anew since a mount, if that was of the same.
func (p place) anew(m *mountinfo.Mount) bool { return m.Major != p.Major || m.Minor != p.Minor }

// mayBeOn reports whether a mount may be of the same filesystem. One that is mounted anew has another device number than the mount that
// pods have, if it is that of a server, or an overlay.
func (p place) mayBeOn(m *mountinfo.Mount) bool {
	if !p.anew(m) {
		return true
	}
	same := m.Type == p.fsType || mountinfo.IsNFS(m.Type) && mountinfo.IsNFS(p.fsType)
	return same && m.Major == 0 && p.Major == 0 && !slices.Contains(ofOneMount, m.Type)
}

// mountAt is the mount that a directory lies in, or nil if that is in another namespace.
func mountAt(d *dir.Dir, mounts mountinfo.Table) (*mountinfo.Mount, error) {
	var st unix.Statx_t
	if err := unix.Statx(d.Fd(), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return nil, fmt.Errorf("find the mount of %s: %w", d, err)
	}
	return mounts.ByID(st.Mnt_id), nil
}

func locate(d *dir.Dir, mounts mountinfo.Table) (place, error) {
	m, err := mountAt(d, mounts)
	if err != nil {
		return place{}, err
	}
	seen, err := dir.Seen(d)
	if err != nil {
		return place{}, fmt.Errorf("find the mount of %s: %w", d, err)
	}
	if m != nil {
		if at, ok := placeIn(m, seen); ok {
			return at, nil
		}
	}
	return place{}, fmt.Errorf("find the mount of %s: it is in no mount of this namespace", d)
}

// placeIn is the place of a path that lies in that mount.
func placeIn(m *mountinfo.Mount, seen string) (place, bool) {
	below, ok := strings.CutPrefix(seen, strings.TrimSuffix(m.Mountpoint, "/"))
	return place{Major: m.Major, Minor: m.Minor, prefix: withSlash(path.Join(m.Root, below)), fsType: m.Type}, ok && !m.Cut
}

func withSlash(path string) string { return strings.TrimSuffix(path, "/") + "/" }

// A Place is a directory's location in its own filesystem and, through mounts, in
// others.
type Place struct {
	home place
	all  []place // including home
}

// Locate returns where a directory is visible in this mount namespace. It does not access the
// disk.
func (k *Kernel) Locate(d *dir.Dir) (Place, error) {
	mounts, err := k.table.mounts()
	if err != nil {
		return Place{}, err
	}
	home, err := locate(d, mounts)
	if err != nil {
		return Place{}, err
	}
	return Place{home: home, all: seenAt(home, mounts)}, nil
}

// MountRoot is where the mount that a directory is reached through, which has that id, begins in its filesystem. It knows
// no other mounts than that one, and does not access the disk.
func (k *Kernel) MountRoot(d *dir.Dir, id MountID) (Place, error) {
	m, err := k.table.mount(d, id)
	if err != nil {
		return Place{}, err
	}
	home := place{Major: m.Major, Minor: m.Minor, prefix: withSlash(m.Root), fsType: m.Type}
	return Place{home: home, all: []place{home}}, nil
}

// seenAt returns all places of a directory from one of them, nearest first. Each mount is
// followed once: a filesystem mounted inside itself would otherwise give endless paths, or
// exponentially many.
func seenAt(home place, mounts mountinfo.Table) []place {
	all := []place{home}
	followed := make(map[*mountinfo.Mount]bool)
	for i := 0; i < len(all); i++ {
		at := all[i]
		for _, m := range mounts {
			below, shown := strings.CutPrefix(at.prefix, withSlash(m.Root))
			if !shown || m.Cut || m.Major != at.Major || m.Minor != at.Minor || followed[m] {
				continue
			}
			parent := mounts.ByID(uint64(m.Parent))
			if parent == nil {
				continue // root of the namespace
			}
			if over, ok := placeIn(parent, m.Mountpoint); ok {
				followed[m] = true
				over.prefix += below
				all = append(all, over)
			}
		}
	}
	return all
}

// in reports whether a directory is another one, or lies in it, in their filesystem.
func (p Place) in(outer Place) bool {
	return outer.home.prefix != "" && p.home.Major == outer.home.Major && p.home.Minor == outer.home.Minor &&
		strings.HasPrefix(withSlash(p.home.prefix), outer.home.prefix)
}

// SameFilesystem reports whether two directories are on one filesystem, also if they are in subvolumes; false where it is not known of
// both where they are.
func (p Place) SameFilesystem(other Place) bool {
	return p.home.prefix != "" && other.home.prefix != "" && p.home.Major == other.home.Major && p.home.Minor == other.home.Minor
}

// Below returns the relative paths of the directory below outer; none if it is not below it.
func (p Place) Below(outer Place) (paths []string) {
	for _, at := range p.all {
		below, ok := strings.CutPrefix(at.prefix, outer.home.prefix)
		if ok && below != "" && at.Major == outer.home.Major && at.Minor == outer.home.Minor {
			paths = append(paths, strings.TrimSuffix(below, "/"))
		}
	}
	return paths
}
