package clone

import (
	"os"

	"golang.org/x/sys/unix"
)

// A span lies between two offsets of a file.
type span struct{ from, to int64 }

// unwritten is what of a file is in memory only yet, in whole blocks of its filesystem, from the beginning on (cachestat(2), Linux 6.5). It
// has nothing if that is not known. It returns errTooLarge for more than so many bytes, before it finds out where they are.
func unwritten(file int, size int64, most int) ([]span, error) {
	var filesystem unix.Statfs_t
	if err := unix.Fstatfs(file, &filesystem); err != nil {
		return nil, os.NewSyscallError("fstatfs", err)
	}
	u := unwrittenSearch{file: file, unit: max(filesystem.Bsize, int64(os.Getpagesize()))}
	all := span{0, size}
	if u.bytes(all) > int64(most) {
		return nil, errTooLarge
	}
	u.search(all)
	return u.found, nil
}

type unwrittenSearch struct {
	file  int
	unit  int64
	found []span
}

// bytes is how much of a span is in memory only, or on its way to the disk.
func (u *unwrittenSearch) bytes(in span) int64 {
	var pages unix.Cachestat_t
	if unix.Cachestat(uint(u.file), &unix.CachestatRange{Off: uint64(in.from), Len: uint64(in.to - in.from)}, &pages, 0) != nil {
		return 0
	}
	return int64(pages.Dirty+pages.Writeback) * int64(os.Getpagesize())
}

func (u *unwrittenSearch) search(in span) {
	if u.bytes(in) == 0 {
		return
	}
	if units := (in.to - in.from + u.unit - 1) / u.unit; units > 1 {
		middle := in.from + units/2*u.unit
		u.search(span{in.from, middle})
		u.search(span{middle, in.to})
		return
	}
	if last := len(u.found) - 1; last >= 0 && u.found[last].to == in.from {
		u.found[last].to = in.to
		return
	}
	u.found = append(u.found, in)
}
