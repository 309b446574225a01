package transfer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer/internal/spool"
)

// Compared is the tree of the receiver, on the way through it beside that of the source.
type compared struct {
	ctx   context.Context
	meter *meter
	attrs *attributer
	btrfs bool // the tree is on one

	tree  *dir.Descent[struct{}]
	lost  int // levels below a directory that is not there
	found differences
	pairs pairs
	file  comparedFile
}

func (c *compared) close() {
	if c == nil {
		return
	}
	c.file.close()
	c.pairs.all.Close()
	_ = c.tree.Close() // opened for reading
}

// Differences are what a comparison found.
type differences struct {
	count int64
	first []string
}

func (d *differences) add(path, what string) {
	if d.count++; len(d.first) < maxFirst {
		message := path + ": " + what
		if len(message) > maxMessage {
			message = "..." + message[len(message)-maxMessage+3:]
		}
		d.first = append(d.first, message)
	}
}

// root compares the root, which has no name.
func (c *compared) root(is *dir.Dir, want *unix.Stat_t, attributes *sums) error {
	st, err := statSelf(is)
	if err != nil {
		return err
	}
	fd, err := is.ReadFd()
	if err != nil {
		return err
	}
	return c.entry(is.String(), st, want, xattr.Descriptor(fd), attributes)
}

func readSums(p *parser) *sums {
	raw := p.bytes(sumsBytes)
	if p.failed {
		return &sums{}
	}
	return &sums{digest(raw), digest(raw[sha256.Size:]), digest(raw[2*sha256.Size:])}
}

// entry compares what can be seen from outside.
func (c *compared) entry(path string, is, want *unix.Stat_t, h xattr.Holder, attributes *sums) error {
	has, err := c.attrs.sums(h)
	if err != nil {
		return wrap("read the attributes of", path, err)
	}
	device := format(is) == unix.S_IFCHR || format(is) == unix.S_IFBLK
	for _, one := range []struct {
		what string
		same bool
	}{
		{"mode", is.Mode == want.Mode},
		{"owner", is.Uid == want.Uid && is.Gid == want.Gid},
		{"mtime", is.Mtim == want.Mtim},
		{"size", format(is) != unix.S_IFREG || is.Size == want.Size},
		{"device number", !device || is.Rdev == want.Rdev},
		{"extended attributes", has.same(attributes, c.btrfs)},
	} {
		if !one.same {
			c.found.add(path, one.what)
		}
	}
	return nil
}

func (c *compared) frame(k kind, p parser) error {
	switch k {
	case kindCheck:
		return c.check(p)
	case kindDigests:
		return c.digests(p)
	case kindCheckHole:
		return c.hole(p)
	case kindUp:
		return c.up(p)
	}
	return outOfOrder(k)
}

func (c *compared) check(p parser) error {
	c.file.close()
	flags := p.u8()
	want := p.attributes()
	ours := readSums(&p)
	link := p.bytes(linkBytes)
	name := p.name()
	symlink := p.text(maxTarget)
	if err := p.end(); err != nil {
		return err
	}
	isDir := format(want) == unix.S_IFDIR
	if c.lost > 0 {
		if isDir {
			c.lost++
		}
		return nil
	}
	in := c.tree.Current().Dir
	path := in.String() + "/" + name
	is, err := lookFor(in, name)
	if err != nil {
		return err
	}
	if is == nil || format(is) != format(want) {
		what := "type"
		if is == nil {
			what = "missing"
		}
		c.found.add(path, what)
		if isDir {
			c.lost++
		}
		return nil
	}
	if err := c.entry(path, is, want, xattr.Of(in, name), ours); err != nil {
		return err
	}
	switch {
	case isDir:
		return c.tree.Enter(name, struct{}{})
	case format(want) == unix.S_IFLNK:
		if to, err := readlink(in, name); err != nil || to != symlink {
			c.found.add(path, "target")
		}
	}
	switch linked := flags&flagLinked != 0; {
	case linked:
		err = c.pairs.add(binary.NativeEndian.Uint64(link), is.Ino)
	case is.Nlink > 1:
		c.found.add(path, "hard links")
	}
	if err == nil && flags&flagContents != 0 && format(is) == unix.S_IFREG && is.Size == want.Size {
		err = c.file.open(in, name, is.Size)
	}
	return err
}

// A comparedFile is the file whose content is compared. It is closed as soon as a difference was found.
type comparedFile struct {
	fd        int
	size      int64
	path      string
	block     []byte
	allocated bool // zeros need not be holes
	holes     bool // it is known where it has some
}

func (f *comparedFile) open(in *dir.Dir, name string, size int64) (err error) {
	f.size, f.path = size, in.String()+"/"+name
	if f.fd, err = openFile(in, name, unix.O_RDONLY); err != nil {
		return err
	}
	f.holes, err = clone.DataOf(f.fd).KnowsHoles()
	return wrap("open", f.path, err)
}

func (f *comparedFile) isOpen() bool { return f.fd != notOpen }

func (f *comparedFile) close() {
	if f.isOpen() {
		_ = unix.Close(f.fd) // opened for reading
	}
	f.fd = notOpen
}

// difference is what of a block is not as in the source, which has its data there; empty for nothing. Zeros that are a hole in the
// source and none here are one.
func (f *comparedFile) difference(b *block, sum digest, data byte) string {
	if b.sum != sum {
		return "content"
	}
	for i, part := range b.granules() {
		if f.holes && !f.allocated && b.isData(i) && data&(1<<(i/granule)) == 0 && isZero(part) {
			return "holes"
		}
	}
	return ""
}

// sumBytes are of a digest, and of a byte that says where data is.
const sumBytes = sha256.Size + 1

// digests compares blocks of the file.
func (c *compared) digests(p parser) error {
	at := p.i64()
	n := int64(len(p.rest) / sumBytes)
	if at < 0 || at%blockBytes != 0 || n > sectionBlocks || len(p.rest)%sumBytes != 0 {
		p.failed = true
	}
	sums := p.bytes(len(p.rest))
	if err := p.end(); err != nil || !c.file.isOpen() {
		return err
	}
	if at > c.file.size || n > blocks(c.file.size-at) {
		return fmt.Errorf("%w: content behind the end", ErrProtocol)
	}
	content := newReader(c.file.fd, at, c.file.size, c.file.block)
	for ; len(sums) > 0 && c.file.isOpen(); sums, at = sums[sumBytes:], at+blockBytes {
		b, err := c.block(content, at, digest(sums[:sha256.Size]), sums[sha256.Size])
		if err != nil {
			return err
		}
		if b.data != 0 {
			c.meter.done.Compared += int64(len(b.content))
		}
	}
	return nil
}

func (c *compared) block(content *reader, at int64, sum digest, data byte) (*block, error) {
	b, err := content.block(at)
	if err == nil {
		err = c.ctx.Err()
	}
	if err != nil {
		return nil, wrap("read", c.file.path, err)
	}
	if what := c.file.difference(b, sum, data); what != "" {
		c.found.add(c.file.path, what)
		c.file.close()
	}
	return b, nil
}

// hole is for a part of the file that is a hole in the source.
func (c *compared) hole(p parser) error {
	at, length := p.extent()
	if err := p.end(); err != nil || !c.file.isOpen() {
		return err
	}
	if at%blockBytes != 0 || at+length > c.file.size {
		return fmt.Errorf("%w: a hole behind the end", ErrProtocol)
	}
	content := newReader(c.file.fd, at, at+length, c.file.block)
	for end := at + length; at < end && c.file.isOpen(); at = endOf(blockBytes, at, end) {
		var err error
		if at, err = content.holeUntil(at); err != nil || at >= end {
			return wrap("read", c.file.path, err)
		}
		if _, err := c.block(content, at, digest{}, 0); err != nil {
			return err
		}
	}
	return nil
}

// up counts the entries of a directory: all that the source has were found, or were reported.
func (c *compared) up(p parser) error {
	c.file.close()
	want := p.i64()
	if err := p.end(); err != nil {
		return err
	}
	if c.lost > 0 {
		c.lost--
		return nil
	}
	d := c.tree.Current().Dir
	var has int64
	for _, err := range d.Entries() {
		if err == nil {
			err = c.ctx.Err()
		}
		if err != nil {
			return err
		}
		has++
	}
	if has != want {
		c.found.add(d.String(), fmt.Sprintf("%d entries instead of %d", has, want))
	}
	if c.tree.Depth() == 0 {
		return nil
	}
	return c.tree.Leave()
}

func (c *compared) isComplete() bool { return c.tree.Depth() == 0 && c.lost == 0 }

// links checks that what is one entry on one side is one on the other.
func (c *compared) links() error {
	for _, from := range []int{inSource, inTarget} {
		err := c.pairs.differ(from, func() { c.found.add("the tree", "hard links") })
		if err != nil {
			return err
		}
	}
	return nil
}

// Pairs are entries that have several names, each in the source and here.
type pairs struct{ all *spool.Spool }

// The order in a pair.
const (
	inSource = iota
	inTarget
)

func (p pairs) add(source, target uint64) error { return p.all.Push(source, target) }

// linksAtOnce are in memory.
const linksAtOnce = 128 << 10

// differ looks for an entry of one side that is two on the other. Of those that are looked at at once it reports one.
func (p pairs) differ(from int, found func()) error {
	parts := uint64(p.all.Size()/2/linksAtOnce + 1)
	for part := range parts {
		others := make(map[uint64]uint64)
		differ := false
		var pair [2]uint64
		at := 0
		err := p.all.Each(0, func(number uint64) {
			pair[at%2] = number
			if at++; at%2 != 0 || pair[from]%parts != part {
				return
			}
			other, known := others[pair[from]]
			differ = differ || known && other != pair[1-from]
			others[pair[from]] = pair[1-from]
		})
		if err != nil {
			return err
		}
		if differ {
			found()
		}
	}
	return nil
}
