package clone

import "golang.org/x/sys/unix"

// sharedUnit is a multiple of the blocks of all filesystems, in bytes.
const sharedUnit = 64 << 10

// A span lies between two offsets of a file.
type span struct{ from, to int64 }

// unwritten is what of a file is in memory only yet, in multiples of sharedUnit, from the beginning on (cachestat(2), Linux 6.5). It
// has nothing if that is not known.
func unwritten(file int, size int64) []span {
	return appendUnwritten(nil, file, span{0, size})
}

func appendUnwritten(found []span, file int, in span) []span {
	var pages unix.Cachestat_t
	err := unix.Cachestat(uint(file), &unix.CachestatRange{Off: uint64(in.from), Len: uint64(in.to - in.from)}, &pages, 0)
	if err != nil || pages.Dirty+pages.Writeback == 0 {
		return found
	}
	units := (in.to-in.from-1)/sharedUnit + 1
	if units > 1 {
		middle := in.from + units/2*sharedUnit
		return appendUnwritten(appendUnwritten(found, file, span{in.from, middle}), file, span{middle, in.to})
	}
	if last := len(found) - 1; last >= 0 && found[last].to == in.from {
		found[last].to = in.to
		return found
	}
	return append(found, in)
}
