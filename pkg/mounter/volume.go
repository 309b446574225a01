package mounter

import (
	"context"
	"fmt"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
)

// A Volume is a claim of volume mode Filesystem.
type Volume struct {
	// Path is where kubelet mounted it in this container.
	Path string
}

// Tree returns an error if nothing is mounted at the path: the directory would be the container's own.
func (v Volume) Tree(context.Context, *dir.Dir) (*mounts.Tree, error) {
	if _, err := v.mount(); err != nil {
		return nil, err
	}
	source, err := dir.Open(v.Path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = source.Close() }()
	return mounts.Clone(source)
}

// mount is what kubelet has mounted, also with an error if its filesystem failed.
func (v Volume) mount() (*mountinfo.Mount, error) {
	state, err := stateAt(v.Path)
	if err != nil {
		return nil, err
	}
	table, err := mounts.ReadTable()
	if err != nil {
		return nil, err
	}
	if mount := table.ByID(state.MountID); state.Mounted && mount != nil {
		return mount, state.Dead
	}
	return nil, fmt.Errorf("the claim's volume is not mounted at %s in this container", v.Path)
}

// Is compares the directory. A network filesystem that was mounted anew by kubelet can have
// another device number; there the server and its directory are compared.
func (v Volume) Is(mount *mountinfo.Mount, root dir.ID) (bool, error) {
	source, err := dir.Open(v.Path)
	if err != nil {
		return false, err
	}
	defer func() { _ = source.Close() }()
	id, err := source.ID()
	if err != nil || id == root {
		return err == nil, err
	}
	own, err := v.mount()
	if err != nil {
		return false, err
	}
	return onServer(own) && own.Type == mount.Type && own.Source == mount.Source && own.Root == mount.Root && !own.Cut, nil
}

// onServer reports whether the source of a mount names a server and what it exports: HOST:/PATH of
// NFS and Ceph, //HOST/SHARE of CIFS.
func onServer(m *mountinfo.Mount) bool {
	return strings.Contains(m.Source, ":/") || strings.HasPrefix(m.Source, "//")
}

// Unused looks for users of the mount that kubelet has made for this container. Where else that filesystem is mounted as a whole, nothing shows.
func (v Volume) Unused() error {
	own, err := v.mount()
	if own == nil {
		return err
	}
	return checkUnpublished(own)
}

// Grow does nothing: kubelet grows the filesystem of such a claim.
func (v Volume) Grow(*mountinfo.Mount) error { return nil }
