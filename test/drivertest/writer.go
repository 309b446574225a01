package drivertest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// A Writer is what a pod does with a volume: it writes numbers, one after another, each to the next of some places, and syncs each.
type Writer struct {
	// Block is for a volume that is a device.
	Block bool

	file  *os.File
	done  chan struct{} // nil while it is stopped
	ended chan struct{}
	last  uint64 // that was synced
	err   error
}

// places are where numbers are, so many bytes apart.
const (
	places = 64
	apart  = 64 << 10
)

// name is what has the numbers of a volume that is published at a target.
func (p *Writer) name(target string) string {
	if p.Block {
		return target
	}
	return filepath.Join(target, "numbers")
}

// Start goes on with the next number at a target.
func (p *Writer) Start(target string) {
	p.done, p.ended = make(chan struct{}), make(chan struct{})
	flags := os.O_RDWR
	if !p.Block {
		flags |= os.O_CREATE
	}
	p.file, p.err = os.OpenFile(p.name(target), flags, 0o600)
	go p.write()
}

func (p *Writer) write() {
	defer close(p.ended)
	for p.err == nil {
		select {
		case <-p.done:
			p.err = p.file.Close()
			return
		default:
		}
		next := p.last + 1
		_, err := p.file.WriteAt(binary.BigEndian.AppendUint64(nil, next), int64(next%places)*apart)
		if err = errors.Join(err, p.file.Sync()); err == nil {
			p.last = next
		}
		p.err = err
	}
}

// Writes says whether it was started and not stopped.
func (p *Writer) Writes() bool { return p != nil && p.done != nil }

// Stop ends it, if it writes, and returns an error that it got.
func (p *Writer) Stop() error {
	if !p.Writes() {
		return nil
	}
	close(p.done)
	<-p.ended
	p.done = nil
	return p.err
}

// IsAt expects all that was synced to be at a target. The Writer has to be stopped.
func (p *Writer) IsAt(target string) error {
	if p.Writes() {
		return errors.New("another node has the volume while the pod writes")
	}
	f, err := os.Open(p.name(target))
	if errors.Is(err, os.ErrNotExist) && p.last == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	for n := p.last; n > 0 && n+places > p.last; n-- {
		var got [8]byte
		if _, err := f.ReadAt(got[:], int64(n%places)*apart); err != nil || binary.BigEndian.Uint64(got[:]) != n {
			return fmt.Errorf("%s has %d in place of %d (%v), of %d numbers", f.Name(), binary.BigEndian.Uint64(got[:]), n, err, p.last)
		}
	}
	return nil
}
