package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
)

// data makes what the pod writes: 4 MiB in which no two pages are alike.
var data = sync.OnceValue(func() []byte {
	var b bytes.Buffer
	for page := 0; b.Len() < 4<<20; page++ {
		fmt.Fprintf(&b, "page %-4090d\n", page)
	}
	return b.Bytes()
})

func (s *scene) write(context.Context) (answer, error) {
	file, err := os.Create(filepath.Join(s.target(writer), "data"))
	if err != nil {
		return answer{}, err
	}
	defer file.Close()
	if _, err := file.Write(data()); err != nil {
		return answer{}, err
	}
	if err := file.Sync(); err != nil {
		return answer{}, err
	}
	return fine("written")
}

func (s *scene) read(context.Context) (answer, error) {
	got, err := os.ReadFile(filepath.Join(s.target(writer), "data"))
	if err != nil {
		return answer{}, err
	}
	if !bytes.Equal(got, data()) {
		return answer{}, errors.New("what was read is not what was written")
	}
	return fine("as they were")
}

// df shows the volume's own size, if the driver says that the kernel keeps it.
func (s *scene) df(context.Context) (answer, error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(s.target(writer), &fs); err != nil {
		return answer{}, err
	}
	total, free := int64(fs.Blocks)*fs.Bsize, int64(fs.Bavail)*fs.Bsize
	if !s.enforced() {
		return fine("%s: the whole pool", size(total))
	}
	if total > volumeBytes {
		return answer{}, fmt.Errorf("df shows %s, although the driver says that %s are enforced", size(total), size(volumeBytes))
	}
	return fine("%s, %s free", size(total), size(free))
}

// enforced reports whether the driver says that the kernel keeps the volume
// within its size.
func (s *scene) enforced() bool { return s.volume.GetVolumeContext()["sizeEnforced"] == "true" }

// overfill asks for space without writing to it, which a limit refuses just so.
func (s *scene) overfill(context.Context) (answer, error) {
	if !s.enforced() {
		return answer{"not tried: sizes are not enforced", plain}, nil
	}
	name := filepath.Join(s.target(writer), "too-large")
	file, err := os.Create(name)
	if err != nil {
		return answer{}, err
	}
	defer os.Remove(name)
	defer file.Close()
	err = syscall.Fallocate(int(file.Fd()), 0, 0, volumeBytes+1)
	return refusedWith(err, syscall.ENOSPC)
}

func (s *scene) writeReadOnly(context.Context) (answer, error) {
	file, err := os.OpenFile(filepath.Join(s.target(reader), "data"), os.O_WRONLY, 0)
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
