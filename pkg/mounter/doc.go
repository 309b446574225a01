// Package mounter keeps the PersistentVolumeClaim of a storage pool mounted at the pool's path
// on the node, from a pod that has the claim.
//
// A claim of volume mode Filesystem is mounted in the pod by kubelet already. Its directory is
// mounted once more at the pool's path, so it does not matter what filesystem it is or where
// kubelet has it. A claim of volume mode Block is a device: it is formatted if it is provably
// blank, checked, mounted, and its filesystem is grown when the device grows. Programs of the
// node's tools are run for that by k8s.io/mount-utils, as kubelet runs them.
//
// The kernel knows what is mounted, by device and inode numbers. So a mounter that was killed at any
// step, or another instance, continues from what is there. A mount outlives the mounter. Only
// Unmount takes it down, and only what a record next to the mount point, or the claim, shows to be
// the pool: an administrator may have mounted something else there.
package mounter
