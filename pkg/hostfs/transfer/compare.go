package transfer

import (
	"context"
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
