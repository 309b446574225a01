package reconcile

import (
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Mounts has what the mounts say of a pool's directory, as bind.Kernel does.
type Mounts interface {
	SameFilesystem(a, b *dir.Dir) (bool, error)
	IsFilesystem(d *dir.Dir) (bool, error)
}

// CheckMount returns why a pool that must be a filesystem of its own is none. A
// mount point would not be enough: in a container every hostPath volume is one.
func CheckMount(c *poolconfig.Config, mounts Mounts, root *dir.Dir) error {
	if !c.RequireMount {
		return nil
	}
	mounted, err := mounts.IsFilesystem(root)
	if err != nil {
		return err
	}
	if !mounted {
		return volume.PoolMissing("no filesystem is mounted at its path, and requireMount is set")
	}
	return nil
}

// OnSystemDisk reports whether a pool shares its filesystem with a directory of the operating
// system; false if the path is empty.
func OnSystemDisk(mounts Mounts, systemPath string, root *dir.Dir) bool {
	if systemPath == "" {
		return false
	}
	system, err := dir.Open(systemPath)
	if err != nil {
		return false
	}
	defer func() { _ = system.Close() }()
	same, err := mounts.SameFilesystem(root, system)
	return err == nil && same
}

// CountErrors is how many errors the filesystem of a pool has counted; volume.Unknown where it
// does not count.
func CountErrors(count func(*dir.Dir) (int64, error), root *dir.Dir) int64 {
	errors, err := count(root)
	if err != nil {
		return volume.Unknown
	}
	return errors
}

// MustNotServe is why the pool must not serve now: an ext4 that is read-only has its quotas off, and
// serves what it has all the same, since nothing in it can grow.
func (p *View) MustNotServe(limits limit.Options) error {
	err := limits.MustNotServe(p.Enforcer)
	if err == nil {
		return nil
	}
	if space, spaceErr := p.Store.Space(); spaceErr == nil && space.ReadOnly {
		return nil
	}
	return err
}
