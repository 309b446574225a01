package main

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// immutable is FS_IMMUTABLE_FL of linux/fs.h.
const immutable = 0x10

// setImmutable has a file be kept by its filesystem, whoever removes it.
func setImmutable(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	err = unix.IoctlSetPointerInt(int(file.Fd()), unix.FS_IOC_SETFLAGS, immutable)
	return errors.Join(err, file.Close())
}
