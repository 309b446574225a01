package mounter

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"syscall"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
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
	attached, err := kernel.All()
	if err != nil {
		return nil, err
	}
	for _, d := range attached {
		file, err := kernel.FilePath(d.Name)
		if errors.Is(err, loop.ErrNotAttached) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if isOn(pool, d, file) {
			found = append(found, fmt.Sprintf("/dev/%s (%s)", d.Name, file))
		}
	}
	return found, nil
}

// isOn says whether the file of a device is in a pool. That may be a directory of a filesystem that has other files, too, and subvolumes of btrfs have
// device numbers of their own: there the file is searched, by the end of the path that it had in another container. So is one of which the
// kernel has no more than that path, because its filesystem failed, or is slow. Of a pool that is not mounted any more nothing can be searched.
func isOn(pool *mountinfo.Mount, d loop.Device, file string) bool {
	nameless := d.Silent || d.Gone
	if !nameless && pool.Type != "btrfs" && pool.Root == "/" {
		return d.Backing.Dev == blockdev.Number{Major: uint32(pool.Major), Minor: uint32(pool.Minor)}.Dev()
	}
	for below, found := strings.TrimPrefix(file, "/"), pool.Mountpoint != ""; found && below != ""; _, below, found = strings.Cut(below, "/") {
		state, err := stateAt(path.Join(pool.Mountpoint, below))
		switch {
		case nameless && mayBeFile(pool, state, err), !nameless && err == nil && state.ID == d.Backing:
			return true
		}
	}
	return false
}

// mayBeFile says whether a file is at a path in a pool, or may be, since its filesystem failed as a whole. Of one that has files beside the
// pool, too, any may be that of the device.
func mayBeFile(pool *mountinfo.Mount, state mounts.State, err error) bool {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP):
		return false
	case err != nil || state.Dead != nil:
		return pool.Root == "/"
	}
	return !state.Missing && !state.IsDir
}
