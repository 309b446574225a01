package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// shareTree makes a copy of a tree as scatter makes one, by what the kernel needs for it and
// nothing else. It has no attributes.
func shareTree(from, to string) error {
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	dirs, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, d := range dirs {
		if err := shareDir(filepath.Join(from, d.Name()), filepath.Join(to, d.Name())); err != nil {
			return err
		}
	}
	root, err := os.Open(to)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(root.Fd())), root.Close())
}

func shareDir(from, to string) (err error) {
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	dst, err := os.Open(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	names, err := src.Readdirnames(0)
	if err != nil {
		return err
	}
	in, at := int(src.Fd()), int(dst.Fd())
	for _, name := range names {
		if err := shareFile(in, at, name); err != nil {
			return fmt.Errorf("share %s/%s: %w", from, name, err)
		}
	}
	return nil
}

func shareFile(in, at int, name string) error {
	from, err := unix.Openat(in, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	to, err := unix.Openat(at, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return errors.Join(err, unix.Close(from))
	}
	return errors.Join(unix.IoctlFileClone(to, from), unix.Close(to), unix.Close(from))
}

// noCopyOnWrite is FS_NOCOW_FL of linux/fs.h.
const noCopyOnWrite = 0x00800000

// shareInto makes the file of a block volume in a directory, durably, with the blocks of another.
func shareInto(fd int, source string) error {
	from, err := unix.Open(source, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	to, err := unix.Openat(fd, diskFile, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return errors.Join(err, unix.Close(from))
	}
	// On btrfs both have the same flag for copy-on-write, which the driver switches off.
	flags, err := unix.IoctlGetUint32(from, unix.FS_IOC_GETFLAGS)
	if err == nil && flags&noCopyOnWrite != 0 {
		err = unix.IoctlSetPointerInt(to, unix.FS_IOC_SETFLAGS, noCopyOnWrite)
	}
	if err == nil {
		err = unix.IoctlFileClone(to, from)
	}
	if err == nil {
		err = unix.Fsync(to)
	}
	return errors.Join(err, unix.Close(to), unix.Close(from))
}

// passes are how long those of a copied tree took, in microseconds.
type passes struct{ copy, check float64 }

// copyTree copies a tree as the driver does, and checks whether that is of one moment.
func copyTree(ctx context.Context, from, to string) (took passes, err error) {
	if err := os.Mkdir(to, 0o700); err != nil {
		return passes{}, err
	}
	src, err := dir.Open(from)
	if err != nil {
		return passes{}, err
	}
	defer func() { err = errors.Join(err, src.Close()) }()
	dst, err := dir.Open(to)
	if err != nil {
		return passes{}, err
	}
	defer func() { err = errors.Join(err, dst.Close()) }()
	began := time.Now()
	last := began // when copying the last entry began
	result, err := clone.Tree(ctx, src, dst, clone.Options{Rounds: 1, Pause: func(context.Context) error {
		last = time.Now()
		return nil
	}})
	if err == nil && !result.PointInTime {
		err = fmt.Errorf("%d entries of %s have changed, want none", result.Changed, from)
	}
	ended := time.Now()
	return passes{copy: float64(last.Sub(began).Nanoseconds()) / 1e3, check: float64(ended.Sub(last).Nanoseconds()) / 1e3}, err
}
