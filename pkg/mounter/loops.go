package mounter

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
)

// loopsOn names the loop devices on files of a pool, such as those of block volumes. Umount(2) does not see these files once the container
// has ended through whose mount the driver attached them.
func loopsOn(pool *mountinfo.Mount) (found []string, err error) {
	// The /dev of a container lacks the nodes of devices that were made after it.
	nodes, err := mounts.New("devtmpfs", "devtmpfs", nil)
	if err != nil {
		return nil, fmt.Errorf("find the loop devices: %w", err)
	}
	defer func() { err = errors.Join(err, nodes.Close()) }()
	dev, err := nodes.Open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = dev.Close() }()
	kernel := loop.NewKernel(dev)
	attached, err := kernel.Attached()
	if err != nil {
		return nil, err
	}
	for _, d := range attached {
		file, err := kernel.FilePath(d.Name)
		if errors.Is(err, loop.ErrNotAttached) || d.Silent { // that one's filesystem is another: the pool's answers
			continue
		}
		if err != nil {
			return nil, err
		}
		if isOn(pool, d.Backing, file) {
			found = append(found, fmt.Sprintf("/dev/%s (%s)", d.Name, file))
		}
	}
	return found, nil
}

// isOn says whether a file is in a pool. That may be a directory of a filesystem that has other files, too, and subvolumes of btrfs have device
// numbers of their own: there the file is searched, by the end of the path that it had in another container. Of a pool that is not mounted any more
// nothing can be searched.
func isOn(pool *mountinfo.Mount, id dir.ID, file string) bool {
	if pool.Type != "btrfs" && pool.Root == "/" {
		return id.Dev == blockdev.Number{Major: uint32(pool.Major), Minor: uint32(pool.Minor)}.Dev()
	}
	for below, found := strings.TrimPrefix(file, "/"), pool.Mountpoint != ""; found; _, below, found = strings.Cut(below, "/") {
		if state, err := stateAt(path.Join(pool.Mountpoint, below)); err == nil && state.ID == id {
			return true
		}
	}
	return false
}
