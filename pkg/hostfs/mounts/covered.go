package mounts

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// OpenCovered opens the directory at an absolute path that has an id, below what is mounted there. In a container
// the directory may itself be mounted at the path, as a hostPath volume is: no name and no clone of the parent leads to it.
// So a thread with mount namespaces of its own (unshare(2), CAP_SYS_ADMIN) takes the mounts away, for itself, one after
// the other. It returns fs.ErrNotExist if the directory is not among them. It has to be closed before its
// filesystem can be unmounted.
func OpenCovered(path string, id dir.ID) (*dir.Dir, error) {
	type answer struct {
		found *dir.Dir
		err   error
	}
	answers := make(chan answer)
	var open func()
	open = func() {
		// Never unlocked, so that the thread ends with the goroutine. The first thread of the process would not end, and its
		// namespace is what /proc shows as that of the process: it is kept busy, and another one takes the work.
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			defer runtime.UnlockOSThread()
			again := make(chan struct{})
			go func() {
				defer close(again)
				open()
			}()
			<-again
			return
		}
		found, err := openCovered(path, id)
		answers <- answer{found, err}
	}
	go open()
	a := <-answers
	return a.found, a.err
}

// openCovered unmounts in this thread's namespace.
func openCovered(path string, id dir.ID) (*dir.Dir, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, &fs.PathError{Op: "make private", Path: "/", Err: err}
	}
	for {
		d, err := dir.Open(path)
		if err != nil {
			return nil, err
		}
		here, err := d.ID()
		if err == nil && here == id {
			return d, nil
		}
		if err := errors.Join(err, d.Close()); err != nil {
			return nil, err
		}
		err = unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) {
			return nil, fmt.Errorf("the directory below the mounts at %s: %w", path, fs.ErrNotExist)
		}
		if err != nil {
			return nil, &fs.PathError{Op: "unmount, for one thread,", Path: path, Err: err}
		}
	}
}
