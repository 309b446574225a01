package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// data makes what the pod writes: 4 MiB in which no two pages are alike.
var data = sync.OnceValue(func() []byte {
	var b bytes.Buffer
	for page := 0; b.Len() < 4<<20; page++ {
		fmt.Fprintf(&b, "page %-4090d\n", page)
	}
	return b.Bytes()
})

// write also has btrfs count what was written, which it else does within 30 s.
func (s *scene) write(context.Context) (answer, error) {
	file, err := os.Create(filepath.Join(s.Target(writer), "data"))
	if err != nil {
		return answer{}, err
	}
	defer file.Close()
	if _, err := file.Write(data()); err != nil {
		return answer{}, err
	}
	if err := syncfs(file); err != nil {
		return answer{}, err
	}
	return fine("written")
}

func syncfs(file *os.File) error {
	if err := unix.Syncfs(int(file.Fd())); err != nil {
		return fmt.Errorf("sync the filesystem of %s: %w", file.Name(), err)
	}
	return nil
}

func (s *scene) read(context.Context) (answer, error) {
	got, err := os.ReadFile(filepath.Join(s.Target(writer), "data"))
	if err != nil {
		return answer{}, err
	}
	if !bytes.Equal(got, data()) {
		return answer{}, errors.New("what was read is not what was written")
	}
	return fine("as they were")
}

// df shows the volume's own size where the kernel enforces it, but on btrfs: there it
// shows the whole filesystem in any case.
func (s *scene) df(context.Context) (answer, error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(s.Target(writer), &fs); err != nil {
		return answer{}, err
	}
	total, free := int64(fs.Blocks)*fs.Bsize, int64(fs.Bavail)*fs.Bsize
	switch {
	case s.keeper == quota.Btrfs:
		return fine("%s: all of btrfs, as ever", size(total))
	case !s.enforced():
		return fine("%s: the whole pool", size(total))
	case total != volumeBytes:
		return answer{}, fmt.Errorf("df shows %s, although %s are enforced", size(total), size(volumeBytes))
	}
	return fine("%s, %s free", size(total), size(free))
}

// slack is what a filesystem may take of a volume for itself.
const slack = 256 << 10

var notTried = answer{"not tried: sizes are not enforced", plain}

func (s *scene) fillSmall(context.Context) (answer, error) {
	if !s.enforced() {
		return notTried, nil
	}
	written, err := s.append(fill)
	if err != nil {
		return answer{}, err
	}
	if written < smallBytes-slack || written > smallBytes {
		return answer{}, fmt.Errorf("%d bytes could be written, want about %d and no more", written, int64(smallBytes))
	}
	return fine("%s written", size(written))
}

func (s *scene) overfill(context.Context) (answer, error) {
	if !s.enforced() {
		return notTried, nil
	}
	_, err := s.append(func(file *os.File) (int64, error) {
		n, err := file.Write([]byte{0})
		return int64(n), err
	})
	return refusedWith(err, fullWith[s.keeper])
}

// fullWith is how a write is refused that would exceed a limit.
var fullWith = map[quota.Kind]syscall.Errno{
	quota.XFS:   syscall.ENOSPC,
	quota.Ext4:  syscall.EDQUOT,
	quota.Btrfs: syscall.EDQUOT,
}

func (s *scene) writeMore(context.Context) (answer, error) {
	if !s.enforced() {
		return notTried, nil
	}
	_, err := s.append(func(file *os.File) (int64, error) {
		for range 8 {
			if _, err := file.Write(data()); err != nil {
				return 0, err
			}
		}
		return 0, syncfs(file)
	})
	if err != nil {
		return answer{}, err
	}
	return fine("written")
}

// append has the pod of the small volume write to the end of its file.
func (s *scene) append(write func(*os.File) (int64, error)) (written int64, err error) {
	err = asPod(func() error {
		file, err := os.OpenFile(filepath.Join(s.Target(filler), "data"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return err
		}
		defer file.Close()
		written, err = write(file)
		return err
	})
	return written, err
}

// fill writes until the file takes no byte more. What btrfs sets aside for a write
// is free again after a sync.
func fill(file *os.File) (total int64, err error) {
	for more := int64(1); more > 0; total += more {
		if more, err = fillNow(file); err != nil {
			return total, err
		}
		if err := syncfs(file); err != nil {
			return total, err
		}
	}
	return total, nil
}

// fillNow writes in ever smaller pieces, the last of one byte.
func fillNow(file *os.File) (total int64, err error) {
	for _, piece := range [][]byte{data(), data()[:4096], data()[:1]} {
		for err = nil; err == nil; {
			var n int
			n, err = file.Write(piece)
			total += int64(n)
		}
		if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
			return total, err
		}
	}
	return total, nil
}

// asPod runs f as a pod without privileges would: limits of ext4 do not hold for
// who has CAP_SYS_RESOURCE.
func asPod(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := dropResource()
		if err == nil {
			err = f()
		}
		result <- err
	}()
	return <-result
}

func dropResource() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	sets[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return fmt.Errorf("give CAP_SYS_RESOURCE up: %w", err)
	}
	return nil
}

func (s *scene) writeReadOnly(context.Context) (answer, error) {
	file, err := os.OpenFile(filepath.Join(s.Target(reader), "data"), os.O_WRONLY, 0)
	if err == nil {
		file.Close()
	}
	return refusedWith(err, syscall.EROFS)
}

func refusedWith(err error, want syscall.Errno) (answer, error) {
	if !errors.Is(err, want) {
		return answer{}, fmt.Errorf("got %v, want %v", orNil(err), want)
	}
	return answer{"refused: " + want.Error(), refused}, nil
}

func orNil(err error) error {
	if err == nil {
		return errors.New("no error")
	}
	return err
}
