package pool

import "kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"

// LockVolume takes the lock of a volume as another node of a shared pool does, whose own
// directory is given.
func LockVolume(own *dir.Dir, id VolumeID) (unlock func(), err error) {
	return own.TryLockByte(lockName, volumeByte(id))
}
