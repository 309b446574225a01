package blockdev

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// A mapping is a part of the memory of a process that is a file which was opened for writing.
type mapping struct {
	from, to uint64
	on       Number // the filesystem of the file
	known    bool   // on is
}

// link leads to the file of a mapping.
func (m mapping) link(pid int) string {
	return fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, m.from, m.to)
}

// mappingQuery is struct procmap_query of linux/fs.h.
type mappingQuery struct {
	size, flags, at uint64
	from, to        uint64
	_               [4]uint64 // flags, size of pages, offset and inode
	major, minor    uint32
	_               [2]uint32 // sizes of the name and of the build id
	_               [2]uint64 // where these go
}

// Of linux/fs.h: PROCMAP_QUERY, and PROCMAP_QUERY_VMA_SHARED, _COVERING_OR_NEXT_VMA and _FILE_BACKED_VMA.
const (
	queryMapping = ioctl.Read | ioctl.Write | unsafe.Sizeof(mappingQuery{})<<ioctl.Size | 'f'<<8 | 17
	nextShared   = 0x08 | 0x10 | 0x20
)

// sharedMappings are those of the memory of a process that it shares with the file. The kernel is asked for each without the name of its
// file (Linux 6.11): no path has a bound, and a process may map what has one of megabytes as often as it likes.
func sharedMappings(pid int) (found []mapping, err error) {
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	defer func() { _ = maps.Close() }()
	for at := uint64(0); ; {
		q := mappingQuery{size: uint64(unsafe.Sizeof(mappingQuery{})), flags: nextShared, at: at}
		err := ioctl.Do(ioctl.File{File: maps}, queryMapping, &q)
		switch {
		case errors.Is(err, unix.ENOENT):
			return found, nil
		case errors.Is(err, unix.ENOTTY):
			return fileMappings(pid)
		case err != nil:
			return nil, err
		}
		m := mapping{from: q.from, to: q.to, on: Number{q.major, q.minor}, known: true}
		if opensForWriting(m.link(pid)) {
			found = append(found, m)
		}
		at = q.to
	}
}

// fileMappings are those of files, also such as it does not share: that is only in a table with their names.
func fileMappings(pid int) (found []mapping, err error) {
	dir, err := os.Open(fmt.Sprintf("/proc/%d/map_files", pid))
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	for {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			m := mapping{}
			if _, err := fmt.Sscanf(name, "%x-%x", &m.from, &m.to); err == nil && opensForWriting(filepath.Join(dir.Name(), name)) {
				found = append(found, m)
			}
		}
		if errors.Is(err, io.EOF) {
			return found, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// opensForWriting says whether the file of a mapping was opened for writing, which the mode of its link is by
// (proc_map_files_instantiate of linux/fs/proc/base.c), as far as is known.
func opensForWriting(link string) bool {
	info, err := os.Lstat(link)
	return err != nil || info.Mode().Perm()&0o200 != 0
}
