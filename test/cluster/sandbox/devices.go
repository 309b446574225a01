package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// amongMounts does something in another mount namespace.
func amongMounts(namespace *os.File, do func() error) error {
	done := make(chan error)
	go func() {
		// Not unlocked, so that the thread ends with this and no other goroutine has it.
		runtime.LockOSThread()
		// setns(2) refuses a thread that shares its root directory with others.
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS)
		}
		if err != nil {
			err = fmt.Errorf("enter a mount namespace: %w", err)
		} else {
			err = do()
		}
		done <- err
	}()
	return <-done
}

// detachDevices detaches the loop devices that the product has attached to files
// below a directory. They are the machine's and not the sandbox's, and hold the
// filesystem that their file is on.
func detachDevices(below string) error {
	dev, err := dir.Open("/dev")
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	kernel := loop.NewKernel(dev)
	attached, err := kernel.Attached()
	if err != nil {
		return err
	}
	candidates := map[dir.ID][]loop.Device{}
	for _, device := range attached {
		if device.Ours {
			candidates[device.Backing] = append(candidates[device.Backing], device)
		}
	}
	if len(candidates) == 0 {
		return nil
	}
	// Those of others have their files elsewhere.
	return filepath.WalkDir(below, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		for _, device := range candidates[identity(info)] {
			if err := detachHolders(attached, device); err != nil {
				return err
			}
			if err := kernel.Detach(context.Background(), device); err != nil {
				return err
			}
		}
		return nil
	})
}

// detachHolders detaches the loop devices on a device. Kubelet attaches one to the
// device of each block volume that a pod uses, to keep it in use.
func detachHolders(attached []loop.Device, held loop.Device) error {
	info, err := os.Stat("/dev/" + held.Name)
	if err != nil {
		return err
	}
	for _, holder := range attached {
		if holder.Backing != identity(info) {
			continue
		}
		device, err := os.Open("/dev/" + holder.Name)
		if err != nil {
			return err
		}
		err = unix.IoctlSetInt(int(device.Fd()), unix.LOOP_CLR_FD, 0)
		if err := errors.Join(err, device.Close()); err != nil {
			return fmt.Errorf("detach %s from %s: %w", holder.Name, held.Name, err)
		}
	}
	return nil
}

func identity(info os.FileInfo) dir.ID {
	stat := info.Sys().(*syscall.Stat_t)
	return dir.ID{Dev: stat.Dev, Ino: stat.Ino}
}
