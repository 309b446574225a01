// Package mountinfo reads the kernel's tables of mounts (proc_pid_mountinfo(5)), in bounded memory.
//
// No path in them has a bound: a pod that has a directory of its volume mounted by subPath moves it below as many others as it
// has inodes, and the line of that mount has megabytes.
package mountinfo

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path"
	"strconv"
	"strings"
)

// Path is the mount table of this process. The kernel keeps the memory of the longest line until the file is closed.
const Path = "/proc/self/mountinfo"

// A Mount is a line of a mount table.
type Mount struct {
	ID, Parent   int
	Major, Minor int // not on each filesystem those of stat(2)
	// Root is what of the filesystem is mounted: of NFS the server's directory. If it is Cut, it is longer than any path, and this is a
	// directory above it.
	Root string
	Cut  bool
	// Mountpoint is where it is mounted, as the reader of the table sees it. If it is Far, it is longer than any path, and this is a
	// directory above it.
	Mountpoint   string
	Far          bool
	Options      string // of the mount, not of the filesystem
	Optional     string
	Type, Source string
}

// A Table is the mounts that a process sees.
type Table []*Mount

// ByID is the mount of that number, or nil.
func (t Table) ByID(id uint64) *Mount {
	for _, m := range t {
		if uint64(m.ID) == id {
			return m
		}
	}
	return nil
}

// Own reads the table of this process, as it is now.
func Own() (Table, error) {
	file, err := os.Open(Path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	return Read(file)
}

// Read reads a table.
func Read(r io.Reader) (Table, error) {
	var table Table
	for m, err := range Each(r) {
		if err != nil {
			return nil, err
		}
		table = append(table, m)
	}
	return table, nil
}

// Each reads a table, of which it keeps nothing. It ends at the first error.
func Each(r io.Reader) iter.Seq2[*Mount, error] {
	return func(yield func(*Mount, error) bool) {
		lines := lines{r: bufio.NewReaderSize(r, keptBytes)}
		for line := 1; ; line++ {
			m, err := lines.mount()
			switch {
			case errors.Is(err, io.EOF):
				return
			case err != nil:
				yield(nil, fmt.Errorf("mount table, line %d: %w", line, err))
				return
			case !yield(m, nil):
				return
			}
		}
	}
}

// keptBytes is how much of a field is kept: a path of PATH_MAX and another name of NAME_MAX, each byte of them escaped by four.
const keptBytes = 4 * (4096 + 256)

type lines struct {
	r   *bufio.Reader
	err error // the first one
}

// mount reads a line. It returns io.EOF at the end.
func (l *lines) mount() (*Mount, error) {
	if _, err := l.r.Peek(1); err != nil {
		return nil, err
	}
	m := &Mount{ID: l.number(' '), Parent: l.number(' '), Major: l.number(':'), Minor: l.number(' ')}
	m.Root, m.Cut = l.path()
	m.Mountpoint, m.Far = l.path()
	m.Options, _ = l.field(' ')
	var optional []string
	for l.err == nil {
		field, _ := l.field(' ')
		if field == "-" {
			break
		}
		optional = append(optional, field)
	}
	m.Optional = strings.Join(optional, " ")
	kind, _ := l.field(' ')
	m.Type = Unescape(kind)
	source, cut := l.field(' ')
	m.Source = Unescape(source)
	if IsNFS(m.Type) {
		m.setServed(source, cut)
	}
	_, _ = l.field('\n') // the options of the filesystem
	return m, l.err
}

// IsNFS reports whether a type of filesystems is NFS.
func IsNFS(kind string) bool { return kind == "nfs" || kind == "nfs4" }

// setServed takes the root of an NFS out of its source. The kernel writes a slash as the root of each (nfs_show_path), and as the
// source what is mounted: a bind mount of a directory below that of its server has another (nfs_show_devname).
func (m *Mount) setServed(source string, cut bool) {
	_, served, found := strings.Cut(source, ":/")
	if !found {
		return
	}
	if cut {
		served = served[:max(0, strings.LastIndexByte(served, '/'))]
	}
	m.Root, m.Cut = path.Clean("/"+Unescape(served)), cut
}

func (l *lines) number(end byte) int {
	field, _ := l.field(end)
	n, err := strconv.Atoi(field)
	if l.err == nil {
		l.err = err
	}
	return n
}

// path is a path, or the whole names at its beginning.
func (l *lines) path() (path string, cut bool) {
	field, cut := l.field(' ')
	if cut {
		field = field[:max(0, strings.LastIndexByte(field, '/'))]
	}
	return Unescape(field), cut
}

// field reads up to a delimiter, which no field has that is not the last of its line, and keeps the beginning.
func (l *lines) field(end byte) (kept string, cut bool) {
	if l.err != nil {
		return "", false
	}
	part, err := l.r.ReadSlice(end)
	kept = strings.TrimSuffix(string(part), string(rune(end)))
	for errors.Is(err, bufio.ErrBufferFull) {
		cut = true
		_, err = l.r.ReadSlice(end)
	}
	switch {
	case errors.Is(err, io.EOF):
		l.err = io.ErrUnexpectedEOF
	case err != nil:
		l.err = err
	case strings.Contains(kept, "\n"):
		l.err = errors.New("it has too few fields")
	}
	return kept, cut
}

// Unescape reads what the kernel writes as a backslash and three octal digits, such as blanks.
func Unescape(field string) string {
	if strings.IndexByte(field, '\\') < 0 {
		return field
	}
	var read strings.Builder
	for at := 0; at < len(field); at++ {
		if field[at] == '\\' && at+4 <= len(field) {
			if c, err := strconv.ParseUint(field[at+1:at+4], 8, 8); err == nil {
				read.WriteByte(byte(c))
				at += 3
				continue
			}
		}
		read.WriteByte(field[at])
	}
	return read.String()
}
