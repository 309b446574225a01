package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func (s *scene) createDisk(ctx context.Context) (answer, error) {
	// The size of a device is enforced whatever the pool is on.
	return s.createVolume(ctx, disk, true)
}

func (s *scene) publishDisk(ctx context.Context) (answer, error) {
	if _, err := s.publishOnce(ctx, disk, machine, ""); err != nil {
		return answer{}, err
	}
	var err error
	if s.device, err = s.diskDevice(); err != nil {
		return answer{}, err
	}
	return s.wantDisk(diskBytes)
}

// diskDevice finds the one device that there is on a file of the pool.
func (s *scene) diskDevice() (string, error) {
	found, err := loopfs.Devices(s.pool())
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("the devices on files of the pool are %q, want one", found)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// wantDisk expects the machine to have a device of that size.
func (s *scene) wantDisk(want int64) (answer, error) {
	disk, err := s.openDisk(os.O_RDONLY)
	if err != nil {
		return answer{}, err
	}
	defer disk.Close()
	has, err := unix.IoctlGetInt(int(disk.Fd()), unix.BLKGETSIZE64)
	if err != nil {
		return answer{}, fmt.Errorf("ask %s for its size: %w", disk.Name(), err)
	}
	if int64(has) != want {
		return answer{}, fmt.Errorf("the device has %d bytes, want %d", has, want)
	}
	return fine("%s, %s", s.device, size(want))
}

func (s *scene) openDisk(flags int) (*os.File, error) {
	return os.OpenFile(s.Target(machine), flags, 0)
}

func (s *scene) writeDisk(context.Context) (answer, error) {
	disk, err := s.openDisk(os.O_WRONLY)
	if err != nil {
		return answer{}, err
	}
	_, err = disk.Write(data())
	if err = errors.Join(err, disk.Sync(), disk.Close()); err != nil {
		return answer{}, err
	}
	return fine("written")
}

func (s *scene) overfillDisk(context.Context) (answer, error) {
	disk, err := s.openDisk(os.O_WRONLY)
	if err != nil {
		return answer{}, err
	}
	defer disk.Close()
	_, err = disk.WriteAt(data()[:4096], diskBytes)
	return refusedWith(err, syscall.ENOSPC)
}

func (s *scene) growDisk(ctx context.Context) (answer, error) {
	if _, err := s.growTo(ctx, disk, machine, grownDiskBytes); err != nil {
		return answer{}, err
	}
	return s.wantDisk(grownDiskBytes)
}

// readDisk expects the machine not to have noticed the crash. What it reads is not
// in memory any more: the last who closes a device drops that.
func (s *scene) readDisk(context.Context) (answer, error) {
	device, err := s.diskDevice()
	if err != nil {
		return answer{}, err
	}
	if device != s.device {
		return answer{}, fmt.Errorf("the machine's device was %s and is now %s", s.device, device)
	}
	disk, err := s.openDisk(os.O_RDONLY)
	if err != nil {
		return answer{}, err
	}
	defer disk.Close()
	got := make([]byte, len(data()))
	if _, err := io.ReadFull(disk, got); err != nil {
		return answer{}, err
	}
	if !bytes.Equal(got, data()) {
		return answer{}, errors.New("what was read is not what was written")
	}
	return fine("as they were")
}

func (s *scene) unpublishDisk(ctx context.Context) (answer, error) {
	if _, err := s.unpublishAt(ctx, disk, machine); err != nil {
		return answer{}, err
	}
	left, err := loopfs.Left(s.pool())
	if err != nil {
		return answer{}, err
	}
	if len(left) > 0 {
		return answer{}, fmt.Errorf("still attached: %q", left)
	}
	return fine("%s detached", s.device)
}

func (s *scene) removeDisk(ctx context.Context) (answer, error) {
	return s.removeVolume(ctx, disk)
}
