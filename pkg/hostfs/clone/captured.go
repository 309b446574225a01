package clone

import (
	"errors"
	"fmt"
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
	target string // of a link
	parts  []part
	base   string // among the links, with the rest of a large file
	bytes  int
}

type part struct {
	at   int64
	data []byte
}

// readInstead is the size in bytes up to which all of a file is read: what was just written is in memory.
const readInstead = 1 << 20

// attributes are captured ones. They are an xattr.Holder that can only be read.
type attributes struct {
	names  []byte
	values map[string][]byte
}

// attributeBytes is what one takes besides its value, more or less.
const attributeBytes = 128

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

// capture reads the attributes of an entry. Errors: ErrGone, errTooLarge for more than so many bytes.
func (b *xattrBuffers) capture(of xattr.Holder, path string, most int) (a attributes, bytes int, err error) {
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
		if bytes += n + attributeBytes; bytes > most {
			return a, 0, errTooLarge
		}
		a.values[name] = append([]byte(nil), b.value[:n]...)
	}
	return a, bytes, nil
}

// capture reads an entry that is no directory. Errors: ErrGone, ErrLeased, errTooLarge for more than so many bytes.
func (p *stillPass) capture(from source, most int) (c *captured, err error) {
	c = &captured{path: from.String(), st: *from.st}
	switch from.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return c, p.captureFile(c, from, most)
	case unix.S_IFDIR: // by now
		return nil, ErrGone
	case unix.S_IFLNK:
		if c.target, err = readlink(from); err != nil {
			return nil, err
		}
	}
	c.attrs, c.bytes, err = p.entries.buffers.capture(xattr.Of(from.in, from.name), c.path, most)
	c.bytes += len(c.target)
	return c, err
}

// captureFile reads a file. Of a large one that can share its blocks it reads what only memory has: sharing these would wait for the disk,
// which may have much to write for others.
func (p *stillPass) captureFile(c *captured, from source, most int) error {
	src, err := OpenRegular(from.in, from.name, from.st)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(src) }() // opened for reading
	AwaitCalls(src)
	if err := unix.Fstat(src, &c.st); err != nil {
		return from.wrap("stat", err)
	}
	if c.attrs, c.bytes, err = p.entries.buffers.capture(xattr.Descriptor(src), c.path, most); err != nil {
		return err
	}
	all := span{0, c.st.Size}
	inMemory := []span{all}
	if p.entries.method == Share && c.st.Size > readInstead {
		if inMemory, err = unwritten(src, c.st.Size, most-c.bytes); err != nil {
			return err
		}
	}
	data := DataOf(src)
	for _, one := range inMemory {
		if err := c.read(data, one, most, p.entries.next); err != nil {
			return err
		}
	}
	if len(inMemory) == 1 && inMemory[0] == all {
		return nil
	}
	from.st = &c.st
	return p.shareBase(c, src, from, inMemory)
}

func (c *captured) read(of *Data, in span, most int, pause func() error) error {
	err := of.each(in.from, in.to, pause, func(from, to int64) error {
		if to-from > int64(most-c.bytes) {
			return errTooLarge
		}
		data := make([]byte, to-from)
		n, err := readAt(of.fd, data, from)
		c.parts = append(c.parts, part{from, data[:n]})
		c.bytes += n
		return err
	})
	if err != nil && !errors.Is(err, errTooLarge) {
		return &fs.PathError{Op: "read", Path: c.path, Err: err}
	}
	return err
}

// shareBase has a file among the links share the blocks of what is on the disk: all but some spans. It takes the place of an earlier copy: there
// may be no inode for both.
func (p *stillPass) shareBase(c *captured, src int, from source, inMemory []span) error {
	if err := p.entries.refuseFragmented(src, from); err != nil {
		return err
	}
	if err := p.removeEarlier(from); err != nil {
		return err
	}
	c.base = fmt.Sprint("still-", p.copied)
	dst, err := unix.Openat(p.links.Fd(), c.base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &fs.PathError{Op: "create", Path: p.links.String() + "/" + c.base, Err: err}
	}
	defer func() { _ = unix.Close(dst) }() // nothing was written
	if len(inMemory) == 0 {
		err = share(dst, src)
	}
	at := int64(0)
	for _, one := range inMemory {
		if err == nil {
			err = p.entries.next()
		}
		if err == nil {
			err = shareRange(dst, src, at, one.from)
		}
		at = one.to
	}
	if err == nil && at > 0 {
		err = shareRange(dst, src, at, c.st.Size)
	}
	return from.wrap("share the blocks of", err)
}

func (p *stillPass) removeEarlier(of source) error {
	if file := p.identity(of); file != "" {
		if err := p.forget(file, of.st); err != nil {
			return err
		}
	}
	if !p.updating() {
		return nil
	}
	in := p.dst.Current().Dir
	st, err := stat(in, of.name)
	if errors.Is(err, fs.ErrNotExist) || err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return nil
	}
	return errors.Join(err, remove(p.entries.ctx, in, of.name))
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
func (p *stillPass) makeCaptured(c *captured, to *dir.Dir, name string) error {
	var err error
	switch c.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		if err := p.makeCapturedFile(c, to, name); err != nil {
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
	return p.entries.nodeAttributes(&c.st, c.attrs, c.path, to, name)
}

func (p *stillPass) makeCapturedFile(c *captured, to *dir.Dir, name string) (err error) {
	flags := unix.O_WRONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if c.base == "" {
		flags |= unix.O_CREAT | unix.O_EXCL
	} else if err := unix.Renameat(p.links.Fd(), c.base, to.Fd(), name); err != nil {
		return &fs.PathError{Op: "rename", Path: p.links.String() + "/" + c.base, Err: err}
	}
	dst, err := unix.Openat(to.Fd(), name, flags, 0o600)
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
	for _, one := range c.parts {
		if err := p.entries.next(); err != nil {
			return err
		}
		if err := writeAt(dst, one.data, one.at); err != nil {
			return &fs.PathError{Op: "write", Path: to.String() + "/" + name, Err: err}
		}
	}
	return p.entries.fileAttributes(dst, &c.st, c.attrs, c.path)
}
