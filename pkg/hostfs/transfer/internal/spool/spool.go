// Package spool keeps numbers of which there may be more than fit into memory. What they mean is up to its callers.
package spool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Spool is a stack of numbers. Those that do not fit into memory are in a file without a name (O_TMPFILE).
type Spool struct {
	in     *dir.Dir
	limit  int // numbers in memory
	file   *os.File
	inFile int64
	memory []uint64 // after those in the file
}

// inMemory takes 4 MiB.
const inMemory = 512 << 10

// New is empty. Its file is made in a directory.
func New(in *dir.Dir) *Spool { return &Spool{in: in, limit: inMemory} }

// Size is how many there are.
func (s *Spool) Size() int64 { return s.inFile + int64(len(s.memory)) }

// Push adds numbers.
func (s *Spool) Push(numbers ...uint64) error {
	if len(s.memory)+len(numbers) > s.limit {
		if err := s.spill(); err != nil {
			return fmt.Errorf("spool numbers: %w", err)
		}
	}
	s.memory = append(s.memory, numbers...)
	return nil
}

func (s *Spool) spill() error {
	if s.file == nil {
		fd, err := unix.Openat(s.in.Fd(), ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return err
		}
		s.file = os.NewFile(uintptr(fd), "spool")
	}
	raw := make([]byte, 0, 8<<10)
	for begin := 0; begin < len(s.memory); begin += 1 << 10 {
		raw = raw[:0]
		for _, number := range s.memory[begin:min(begin+1<<10, len(s.memory))] {
			raw = binary.NativeEndian.AppendUint64(raw, number)
		}
		if _, err := s.file.WriteAt(raw, 8*(s.inFile+int64(begin))); err != nil {
			return err
		}
	}
	s.inFile += int64(len(s.memory))
	s.memory = s.memory[:0]
	return nil
}

// Each calls found for all from a size on, in their order.
func (s *Spool) Each(from int64, found func(uint64)) error {
	if from < s.inFile {
		raw := make([]byte, 8<<10)
		r := io.NewSectionReader(s.file, 8*from, 8*(s.inFile-from))
		for {
			n, err := io.ReadFull(r, raw)
			for at := 0; at+8 <= n; at += 8 {
				found(binary.NativeEndian.Uint64(raw[at:]))
			}
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				break
			}
			if err != nil {
				return fmt.Errorf("read the spool of numbers: %w", err)
			}
		}
	}
	for _, number := range s.memory[max(from-s.inFile, 0):] {
		found(number)
	}
	return nil
}

// Cut goes back to a size.
func (s *Spool) Cut(to int64) {
	s.memory = s.memory[:max(to-s.inFile, 0)]
	s.inFile = min(s.inFile, to)
}

// Close leaves nothing on the disk. The spool is empty then.
func (s *Spool) Close() {
	if s.file != nil {
		_ = s.file.Close() // nothing of it is kept
	}
	s.file, s.inFile, s.memory = nil, 0, nil
}
