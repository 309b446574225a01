package mounter

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
)

// recordFile is next to the mount point, and says what a mounter has mounted there: by it, and not by the path, Unmount knows what it may
// take down.
const recordFile = ".pool-mounter.mounted"

const recordBytes = 4096

// A record identifies what is mounted until the next boot.
type record struct {
	Boot string `json:"boot"`
	Root dir.ID `json:"root"`
	// Born is when the root directory was made, in nanoseconds (seconds on ext4), and Filesystem an id of the filesystem (made of its UUID on
	// ext4): device and inode numbers come again with another disk.
	Born       int64    `json:"born"`
	Filesystem [2]int32 `json:"filesystem"`
	// Device is that of the mount table, by which a filesystem is known that answers with errors only, and Within the path of the root
	// directory in it. They are not known before the filesystem is mounted.
	Device string `json:"device,omitempty"`
	Within string `json:"within,omitempty"`
}

// recordOf describes the root of a mount, and the mount if it is in the table already.
func recordOf(state mounts.State, mount *mountinfo.Mount) (record, error) {
	boot, err := bootID()
	if err != nil {
		return record{}, err
	}
	r := record{Boot: boot, Root: state.ID, Born: state.Born.UnixNano(), Filesystem: state.Filesystem}
	if mount != nil {
		r.Device, r.Within = deviceOf(mount), mount.Root
	}
	return r, nil
}

func bootID() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(boot)), err
}

func deviceOf(m *mountinfo.Mount) string { return fmt.Sprintf("%d:%d", m.Major, m.Minor) }

// is reports whether what is mounted is what was recorded. Of a filesystem that failed no more than the device is known.
func (r record) is(now record, dead bool) bool {
	if dead {
		return r.Device != "" && r.Device == now.Device
	}
	return r.Root == now.Root && r.Born == now.Born && r.Filesystem == now.Filesystem
}

// mount is what the mount table has of what was recorded, whether it is mounted still or not; nil if that is not known.
func (r record) mount() (*mountinfo.Mount, error) {
	if r.Within == "" {
		return nil, nil
	}
	m := &mountinfo.Mount{Root: r.Within}
	_, err := fmt.Sscanf(r.Device, "%d:%d", &m.Major, &m.Minor)
	return m, err
}

// isElsewhere says that a mount, which is in sight, is of another filesystem than what was recorded. Btrfs mixes the number of a subvolume into the
// second half of its id (btrfs_statfs of the kernel's fs/btrfs/super.c).
func (r record) isElsewhere(m *mountinfo.Mount) bool {
	state, err := stateAt(m.Mountpoint)
	return err == nil && state.Dead == nil && state.MountID == uint64(m.ID) && state.Filesystem[0] != r.Filesystem[0]
}

// remember records what is, or is about to be, mounted.
func remember(place mounts.Place, state mounts.State, mount *mountinfo.Mount) error {
	now, err := recordOf(state, mount)
	if err != nil {
		return err
	}
	before, err := recorded(place)
	if err != nil || before != nil && *before == now {
		return err
	}
	content, err := json.Marshal(now)
	if err != nil {
		return err
	}
	return place.Parent.WriteFile(recordFile, append(content, '\n'))
}

// recorded is the record, or nil if there is none. One of an earlier boot, or that cannot be understood, says nothing of what is mounted.
func recorded(place mounts.Place) (*record, error) {
	content, err := place.Parent.ReadFile(recordFile, recordBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	r := &record{}
	if json.Unmarshal(content, r) != nil || r.Boot != boot {
		return nil, nil //nolint:nilerr // as if it were not there
	}
	return r, nil
}

// forgetMount removes the record once nothing of it is mounted, and a note: the claim may serve others from now on.
func forgetMount(place mounts.Place) error {
	return errors.Join(removeFile(place.Parent, recordFile), forget(place.Parent))
}
