package transfer

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/diff"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// A comparison is a visitor of the source that has the receiver compare it.
type comparison struct {
	s     *Sender
	ctx   context.Context
	from  *dir.Dir
	all   bool
	began int64
	track
	progress Progress
}

func (c *comparison) run(result *Result) error {
	defer func() { result.BytesCompared = c.progress.Compared }()
	defer func() {
		for len(c.levels) > 0 {
			c.up()
		}
	}()
	c.progress = Progress{Entries: result.Entries, Files: result.Files, Bytes: result.Bytes}
	root, err := statSelf(c.from)
	if err = checkStill(true, c.began, root, err); err != nil {
		return source(err)
	}
	c.begin(root)
	fd, err := c.from.ReadFd()
	if err != nil {
		return source(err)
	}
	c.s.wire.begin(kindVerify)
	if err := c.putAttributes(root, xattr.Descriptor(fd)); err != nil {
		return source(err)
	}
	if err := c.s.wire.send(c.ctx); err != nil {
		return err
	}
	if err := dir.Visit(c.from, c); err != nil {
		if errors.Is(err, dir.ErrMoved) {
			err = fmt.Errorf("%w: %w", ErrChanged, err)
		}
		return source(err)
	}
	if err := c.sendUp(); err != nil {
		return err
	}
	if err := c.s.wire.sendEmpty(c.ctx, kindVerified); err != nil {
		return err
	}
	found, err := c.s.await(kindDifferences)
	if err == nil && found.count > 0 {
		err = &DifferencesError{found.count, found.messages}
	}
	return err
}

func (c *comparison) putAttributes(st *unix.Stat_t, h xattr.Holder) error {
	sums, err := c.s.attrs.sums(h)
	if err != nil {
		return fmt.Errorf("%w: read extended attributes: %w", errSource, err)
	}
	c.s.wire.putAttributes(st)
	for _, sum := range []digest{sums.all, sums.portable, sums.label} {
		c.s.wire.putRaw(sum[:])
	}
	return nil
}

func (c *comparison) sendUp() error {
	c.s.wire.begin(kindUp)
	c.s.wire.put64(c.current().entries)
	return c.s.wire.send(c.ctx)
}

// check has an entry compared.
func (c *comparison) check(in *dir.Dir, name string, st *unix.Stat_t, flags int, h xattr.Holder) error {
	c.current().entries++
	var target string
	var err error
	if format(st) == unix.S_IFLNK {
		if target, err = readlink(in, name); err != nil {
			return err
		}
	}
	out := c.s.wire
	out.begin(kindCheck)
	out.put8(byte(flags | flagIf(st.Nlink > 1, flagLinked)))
	if err := c.putAttributes(st, h); err != nil {
		return err
	}
	putLink(out, in, name, st)
	out.putString(name)
	out.putString(target)
	return out.send(c.ctx)
}

// Enter has a directory compared, and goes into it.
func (c *comparison) Enter(d, in *dir.Dir, name string) error {
	st, err := statSelf(d)
	if err = errors.Join(c.ctx.Err(), checkStill(true, c.began, st, err)); err != nil {
		return changedAt(in, name, err)
	}
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	if err := c.check(in, name, st, 0, xattr.Descriptor(fd)); err != nil {
		return err
	}
	c.enter(name, st)
	return nil
}

// Leave goes up.
func (c *comparison) Leave(*dir.Dir) error {
	err := c.sendUp()
	c.up()
	return err
}

// Mount is an error: nothing is known of what is below.
func (c *comparison) Mount(in *dir.Dir, name string) error { return clone.Mounted(in, name) }

// File has any other entry compared.
func (c *comparison) File(in *dir.Dir, name string) error {
	st, err := clone.StatSource(in, name)
	if err = errors.Join(c.ctx.Err(), checkStill(true, c.began, st, err)); err != nil {
		return changedAt(in, name, err)
	}
	if format(st) != unix.S_IFREG || st.Size == 0 || !c.all && c.isSettled(name, st) {
		return ifGone(c.check(in, name, st, 0, xattr.Of(in, name)))
	}
	fd, err := clone.OpenRegular(in, name, st)
	if err != nil {
		return changedAt(in, name, checkStill(true, c.began, nil, err))
	}
	defer func() { _ = unix.Close(fd) }() // opened for reading
	if err := c.check(in, name, st, flagContents, xattr.Descriptor(fd)); err != nil {
		return err
	}
	if err := c.differing(fd, name, st.Size); err != nil {
		return fmt.Errorf("compare %s/%s: %w", in, name, err)
	}
	var after unix.Stat_t
	if err := unix.Fstat(fd, &after); err != nil || after.Ctim != st.Ctim {
		return changedAt(in, name, errors.Join(ErrChanged, err))
	}
	return nil
}

func ifGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", ErrChanged, err)
	}
	return err
}

// differing sends the digests of what of a file is not as in the base.
func (c *comparison) differing(fd int, name string, size int64) error {
	base := c.base.file(name)
	if base == nil {
		return c.contents(fd, 0, size)
	}
	defer func() { _ = base.Close() }() // opened for reading
	var compared int64
	return eachDifference(c.ctx, base, fd, func(r diff.Range) error {
		from := max(compared, r.Offset/blockBytes*blockBytes)
		compared = min(blocks(r.Offset+r.Bytes)*blockBytes, size)
		return c.contents(fd, from, compared)
	})
}

// contents sends the digests of a part of a file that ends with a block or with the file.
func (c *comparison) contents(fd int, at, size int64) error {
	r := newReader(fd, at, size, c.s.block)
	out := c.s.wire
	for at < size {
		until, err := r.holeUntil(at)
		if err != nil {
			return fmt.Errorf("%w: %w", errSource, err)
		}
		if until > at {
			out.begin(kindCheckHole)
			out.put64(at)
			out.put64(until - at)
			if err := out.send(c.ctx); err != nil {
				return err
			}
			at = until
			continue
		}
		if at, err = c.digests(r, at, size); err != nil {
			return err
		}
		if c.s.progress != nil {
			c.s.progress(c.progress)
		}
		if err := out.send(c.ctx); err != nil {
			return err
		}
	}
	return nil
}

// digests puts those of the blocks from at on into a frame, and returns where the next frame begins.
func (c *comparison) digests(r *reader, at, size int64) (int64, error) {
	out := c.s.wire
	out.begin(kindDigests)
	out.put64(at)
	for range sectionBlocks {
		b, err := r.block(at)
		if err == nil {
			err = c.ctx.Err()
		}
		if err != nil {
			return at, fmt.Errorf("%w: %w", errSource, err)
		}
		out.putRaw(b.sum[:])
		out.put8(b.data)
		if b.data != 0 {
			c.progress.Compared += int64(len(b.content))
		}
		if at = min(at+blockBytes, size); at == size {
			break
		}
	}
	return at, nil
}

// Compared is what the receiver knows of a comparison.
type compared struct {
	tree  *dir.Descent[struct{}]
	lost  int // levels below a directory that is not there
	count int64
	first []string
	bytes int64
	// pairs are an entry that has several names, here and in the source.
	pairs *spool

	fd   int // of a file whose content is compared
	size int64
	path string
	bad  bool // it was found to differ

	allocated bool // zeros need not be holes
}

func (c *compared) close() {
	if c == nil {
		return
	}
	c.closeFile()
	c.pairs.close()
	_ = c.tree.Close() // opened for reading
}

func (c *compared) closeFile() {
	if c.fd != notOpen {
		_ = unix.Close(c.fd) // opened for reading
	}
	c.fd = notOpen
}

func (c *compared) differs(path, what string) {
	if c.count++; len(c.first) < maxFirst {
		message := path + ": " + what
		if len(message) > maxMessage {
			message = "..." + message[len(message)-maxMessage+3:]
		}
		c.first = append(c.first, message)
	}
}

func (r *receiver) beginCompare(p parser) error {
	want := p.attributes()
	ours := readSums(&p)
	if err := p.end(); err != nil {
		return err
	}
	if r.begun {
		return outOfOrder(kindVerify)
	}
	r.compare.close()
	r.compare = nil
	tree, err := dir.NewDescent(r.into, struct{}{})
	if err != nil {
		return err
	}
	r.compare = &compared{tree: tree, pairs: newSpool(r.into), fd: notOpen, allocated: r.allocated}
	is, err := statSelf(r.into)
	if err != nil {
		return err
	}
	fd, err := r.into.ReadFd()
	if err != nil {
		return err
	}
	return r.compareEntry(r.into.String(), is, want, xattr.Descriptor(fd), ours)
}

func readSums(p *parser) *sums {
	raw := p.bytes(sumsBytes)
	if p.failed {
		return &sums{}
	}
	return &sums{digest(raw), digest(raw[sha256.Size:]), digest(raw[2*sha256.Size:])}
}

// compareEntry compares what can be seen from outside.
func (r *receiver) compareEntry(path string, is, want *unix.Stat_t, h xattr.Holder, attributes *sums) error {
	has, err := r.attrs.sums(h)
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
		{"extended attributes", has.same(attributes, r.btrfs)},
	} {
		if !one.same {
			r.compare.differs(path, one.what)
		}
	}
	return nil
}

func (r *receiver) compareFrame(k kind, p parser) error {
	c := r.compare
	switch k {
	case kindCheck:
		c.closeFile()
		return r.check(p)
	case kindDigests:
		return r.checkDigests(p)
	case kindCheckHole:
		return r.checkHole(p)
	case kindUp:
		c.closeFile()
		entries := p.i64()
		if err := p.end(); err != nil {
			return err
		}
		return r.checkUp(entries)
	case kindVerified:
		if err := p.end(); err != nil {
			return err
		}
		return r.answerCompare()
	}
	return outOfOrder(k)
}

func (r *receiver) check(p parser) error {
	c := r.compare
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
		c.differs(path, what)
		if isDir {
			c.lost++
		}
		return nil
	}
	if err := r.compareEntry(path, is, want, xattr.Of(in, name), ours); err != nil {
		return err
	}
	switch {
	case isDir:
		return c.tree.Enter(name, struct{}{})
	case format(want) == unix.S_IFLNK:
		if to, err := readlink(in, name); err != nil || to != symlink {
			c.differs(path, "target")
		}
	}
	switch linked := flags&flagLinked != 0; {
	case linked:
		err = c.pairs.push(binary.NativeEndian.Uint64(link), is.Ino)
	case is.Nlink > 1:
		c.differs(path, "hard links")
	}
	if err == nil && flags&flagContents != 0 && format(is) == unix.S_IFREG && is.Size == want.Size {
		c.size, c.path, c.bad = is.Size, path, false
		c.fd, err = openFile(in, name, unix.O_RDONLY)
	}
	return err
}

// sumBytes are of a digest, and of a byte that says where data is.
const sumBytes = sha256.Size + 1

func (r *receiver) checkDigests(p parser) error {
	c := r.compare
	at := p.i64()
	n := int64(len(p.rest) / sumBytes)
	if at < 0 || at%blockBytes != 0 || n > sectionBlocks || len(p.rest)%sumBytes != 0 {
		p.failed = true
	}
	sums := p.bytes(len(p.rest))
	if err := p.end(); err != nil || c.fd == notOpen || c.bad {
		return err
	}
	if at > c.size || n > blocks(c.size-at) {
		return fmt.Errorf("%w: content behind the end", ErrProtocol)
	}
	content := newReader(c.fd, at, c.size, r.block)
	for ; len(sums) > 0 && !c.bad; sums, at = sums[sumBytes:], at+blockBytes {
		b, err := content.block(at)
		if err == nil {
			err = r.ctx.Err()
		}
		if err != nil {
			return wrap("read", c.path, err)
		}
		if b.sum != digest(sums[:sha256.Size]) {
			c.bad = true
			c.differs(c.path, "content")
		}
		c.checkHoles(b, sums[sha256.Size])
		if b.data != 0 {
			c.bytes += int64(len(b.content))
			r.done.Compared = c.bytes
		}
	}
	return nil
}

// checkHoles looks for what is zero but no hole, and is one in the source.
func (c *compared) checkHoles(b *block, data byte) {
	for i, part := range b.granules() {
		if !c.bad && !c.allocated && b.isData(i) && data&(1<<(i/granule)) == 0 && isZero(part) {
			c.bad = true
			c.differs(c.path, "holes")
		}
	}
}

// checkHole is for a part that is a hole in the source.
func (r *receiver) checkHole(p parser) error {
	c := r.compare
	at, length := p.extent()
	if err := p.end(); err != nil || c.fd == notOpen || c.bad {
		return err
	}
	if at%blockBytes != 0 || at+length > c.size {
		return fmt.Errorf("%w: a hole behind the end", ErrProtocol)
	}
	content := newReader(c.fd, at, at+length, r.block)
	for end := at + length; at < end && !c.bad; at += blockBytes {
		var err error
		if at, err = content.holeUntil(at); err != nil || at >= end {
			return wrap("read", c.path, err)
		}
		b, err := content.block(at)
		if err == nil {
			err = r.ctx.Err()
		}
		if err != nil {
			return wrap("read", c.path, err)
		}
		if b.sum != (digest{}) {
			c.bad = true
			c.differs(c.path, "content")
		}
		c.checkHoles(b, 0)
	}
	return nil
}

// checkUp counts the entries of a directory: all that the source has were found, or were reported.
func (r *receiver) checkUp(want int64) error {
	c := r.compare
	if c.lost > 0 {
		c.lost--
		return nil
	}
	d := c.tree.Current().Dir
	var has int64
	for _, err := range d.Entries() {
		if err == nil {
			err = r.ctx.Err()
		}
		if err != nil {
			return err
		}
		has++
	}
	if has != want {
		c.differs(d.String(), fmt.Sprintf("%d entries instead of %d", has, want))
	}
	if c.tree.Depth() == 0 {
		return nil
	}
	return c.tree.Leave()
}

func (r *receiver) answerCompare() error {
	c := r.compare
	if c.tree.Depth() > 0 || c.lost > 0 {
		return outOfOrder(kindVerified)
	}
	for first := range 2 {
		if err := c.compareLinks(first); err != nil {
			return err
		}
	}
	r.wire.begin(kindDifferences)
	r.wire.put64(c.count)
	r.wire.put64(c.bytes)
	r.wire.put32(uint32(len(c.first)))
	for _, message := range c.first {
		r.wire.putString(message)
	}
	err := r.wire.send(r.ctx)
	c.close()
	r.compare = nil
	return err
}

// linksAtOnce are in memory.
const linksAtOnce = 128 << 10

// compareLinks checks that what is one entry on one side is one on the other. The first of a pair is that of the source.
func (c *compared) compareLinks(from int) error {
	parts := uint64(c.pairs.size()/2/linksAtOnce + 1)
	for part := range parts {
		others := make(map[uint64]uint64)
		differ := false
		var pair [2]uint64
		at := 0
		err := c.pairs.each(0, func(number uint64) {
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
			c.differs("the tree", "hard links")
		}
	}
	return nil
}
