package pool

import (
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// LockVolume takes the lock of a volume as another node of a shared pool does, whose own
// directory is given.
func LockVolume(own *dir.Dir, id volume.ID) (unlock func(), err error) {
	return dir.TryLockByte(own, "lock", store.VolumeByte(id))
}

// CheckVolume is LockVolume for a check of another node.
func CheckVolume(own *dir.Dir, id volume.ID) (unlock func(), err error) {
	return dir.TryShareByte(own, "lock", store.VolumeByte(id))
}

// Overhead is what the first pool has set aside besides what it has promised, in bytes.
func (s *Set) Overhead() int64 { return s.node.Pools[0].Ledger.Summary().Overhead }
