package clone

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// errTooLarge reports a file that is not kept in memory.
var errTooLarge = errors.New("too large to be kept in memory")

// What is captured is an entry of the source with its content, in memory.
type captured struct {
	path   string
	st     unix.Stat_t
	attrs  attributes
	parts  []part
	target string // of a link
	bytes  int
}

// attributes are captured ones. They are an xattr.Holder that can only be read.
type attributes struct {
	names  []byte
	values map[string][]byte
}

// List is that of the entry.
func (a attributes) List(into []byte) (int, error) { return copy(into, a.names), nil }

// Get is that of the entry.
func (a attributes) Get(name string, into []byte) (int, error) {
	value, has := a.values[name]
	if !has {
		return 0, unix.ENODATA
	}
	return copy(into, value), nil
}

// Set is not possible.
func (a attributes) Set(string, []byte) error { return unix.EROFS }

// Remove is not possible.
func (a attributes) Remove(string) error { return unix.EROFS }

// capture reads the attributes of an entry.
func (b *xattrBuffers) capture(of xattr.Holder, path string) (a attributes, bytes int, err error) {
	b.make()
	names, err := xattr.Listed(of, b.names)
	if errors.Is(err, unix.ENOENT) {
		return a, 0, ErrGone
	}
	if err != nil {
		return a, 0, &fs.PathError{Op: "listxattr", Path: path, Err: err}
	}
	a = attributes{names: append([]byte(nil), names...), values: make(map[string][]byte)}
	bytes = len(names)
	for name := range xattr.Each(names) {
		n, err := of.Get(name, b.value)
		if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOENT) { // removed meanwhile
			continue
		}
		if err != nil {
			return a, 0, &fs.PathError{Op: "read the attribute " + name + " of", Path: path, Err: err}
		}
		a.values[name] = append([]byte(nil), b.value[:n]...)
		bytes += n
	}
	return a, bytes, nil
}

// capture reads an entry that is no directory. Errors: ErrGone, ErrLeased, errTooLarge for more than so many bytes.
func (e *entryCopier) capture(from source, most int) (c *captured, err error) {
	c = &captured{path: from.String(), st: *from.st}
	switch from.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return c, e.captureFile(c, from, most)
	case unix.S_IFDIR: // by now
		return nil, ErrGone
	case unix.S_IFLNK:
		if c.target, err = readlink(from); err != nil {
			return nil, err
		}
	}
	c.attrs, c.bytes, err = e.buffers.capture(xattr.Of(from.in, from.name), c.path)
	c.bytes += len(c.target)
	return c, err
}

func (e *entryCopier) captureFile(c *captured, from source, most int) error {
	src, err := OpenRegular(from.in, from.name, from.st)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(src) }() // opened for reading
	AwaitCalls(src)
	if err := unix.Fstat(src, &c.st); err != nil {
		return from.wrap("stat", err)
	}
	if c.attrs, c.bytes, err = e.buffers.capture(xattr.Descriptor(src), c.path); err != nil {
		return err
	}
	err = eachData(src, 0, c.st.Size, e.next, func(from, to int64) error {
		if to-from > int64(most-c.bytes) {
			return errTooLarge
		}
		data := make([]byte, to-from)
		n, err := readAt(src, data, from)
		c.parts = append(c.parts, part{from, data[:n]})
		c.bytes += n
		return err
	})
	if err != nil && !errors.Is(err, errTooLarge) {
		return from.wrap("read", err)
	}
	return err
}

// readAt reads as far as the file goes by now.
func readAt(src int, data []byte, at int64) (n int, err error) {
	for n < len(data) {
		read, err := retryInterrupted(func() (int, error) { return unix.Pread(src, data[n:], at+int64(n)) })
		if err != nil || read == 0 {
			return n, err
		}
		n += read
	}
	return n, nil
}

// makeCaptured makes a copy of what was captured.
func (e *entryCopier) makeCaptured(c *captured, to *dir.Dir, name string) error {
	var err error
	switch c.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if err := e.makeCapturedFile(c, to, name); err != nil {
			return err
		}
		return setTimes(to, name, &c.st)
	case unix.S_IFLNK:
		err = unix.Symlinkat(c.target, to.Fd(), name)
	default:
		err = unix.Mknodat(to.Fd(), name, c.st.Mode, int(c.st.Rdev))
	}
	if err != nil {
		return &fs.PathError{Op: "make", Path: to.String() + "/" + name, Err: err}
	}
	return e.nodeAttributes(&c.st, c.attrs, c.path, to, name)
}

func (e *entryCopier) makeCapturedFile(c *captured, to *dir.Dir, name string) (err error) {
	dst, err := unix.Openat(to.Fd(), name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &fs.PathError{Op: "create", Path: to.String() + "/" + name, Err: err}
	}
	defer func() {
		if closeErr := unix.Close(dst); err == nil && closeErr != nil {
			err = &fs.PathError{Op: "close", Path: to.String() + "/" + name, Err: closeErr}
		}
	}()
	if err := unix.Ftruncate(dst, c.st.Size); err != nil {
		return &fs.PathError{Op: "truncate", Path: to.String() + "/" + name, Err: err}
	}
	for _, p := range c.parts {
		if err := writeAt(dst, p.data, p.at); err != nil {
			return &fs.PathError{Op: "write", Path: to.String() + "/" + name, Err: err}
		}
	}
	return e.fileAttributes(dst, &c.st, c.attrs, c.path)
}
