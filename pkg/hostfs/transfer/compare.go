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
	ctx     context.Context
	wire    *wire
	answers *answers
	attrs   *attributer
	block   []byte // a buffer
	meter   meter

	from    *dir.Dir
	entries clone.Look // at those of from
	all     bool       // also the content of what has not changed
	still   stillness
	track   track
}

func (c *comparison) run(result *Result) error {
	defer func() { result.BytesCompared = c.meter.done.Compared }()
	defer c.track.close()
	c.meter.done = Progress{Entries: result.Entries, Files: result.Files, Bytes: result.Bytes}
	var err error
	if c.entries, err = clone.NewLook(c.from); err != nil {
		return sourceError(err)
	}
	root, err := c.still.look(c.entries.Open(c.from))
	if err != nil {
		return sourceError(err)
	}
	c.track.begin(root)
	fd, err := c.from.ReadFd()
	if err != nil {
		return sourceError(err)
	}
	c.wire.begin(kindVerify)
	if err := c.putAttributes(root, xattr.Descriptor(fd)); err != nil {
		return sourceError(err)
	}
	if err := c.wire.send(c.ctx); err != nil {
		return err
	}
	if err := dir.Visit(c.from, c); err != nil {
		if errors.Is(err, dir.ErrMoved) {
			err = fmt.Errorf("%w: %w", ErrChanged, err)
		}
		return sourceError(err)
	}
	if err := c.sendUp(); err != nil {
		return err
	}
	if err := c.wire.sendEmpty(c.ctx, kindVerified); err != nil {
		return err
	}
	found, err := c.answers.await(kindDifferences)
	if err == nil && found.count > 0 {
		err = &DifferencesError{found.count, found.messages}
	}
	return err
}

func (c *comparison) putAttributes(st *unix.Stat_t, h xattr.Holder) error {
	sums, err := c.attrs.sums(h)
	if err != nil {
		return fmt.Errorf("%w: read extended attributes: %w", errSource, err)
	}
	c.wire.putAttributes(st)
	for _, sum := range []digest{sums.all, sums.portable, sums.label} {
		c.wire.putRaw(sum[:])
	}
	return nil
}

func (c *comparison) sendUp() error {
	c.wire.begin(kindUp)
	c.wire.put64(c.track.current().entries)
	return c.wire.send(c.ctx)
}

// check has an entry compared.
func (c *comparison) check(in *dir.Dir, name string, st *unix.Stat_t, flags int, h xattr.Holder) error {
	c.track.current().entries++
	var target string
	var err error
	if format(st) == unix.S_IFLNK {
		if target, err = readlink(in, name); err != nil {
			return err
		}
	}
	out := c.wire
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
	st, err := c.still.look(c.entries.Open(d))
	if err = errors.Join(c.ctx.Err(), err); err != nil {
		return changedAt(in, name, err)
	}
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	if err := c.check(in, name, st, 0, xattr.Descriptor(fd)); err != nil {
		return err
	}
	c.track.enter(name, st)
	return nil
}

// Leave goes up.
func (c *comparison) Leave(*dir.Dir) error {
	err := c.sendUp()
	c.track.up()
	return err
}

// Mount is an error: nothing is known of what is below.
func (c *comparison) Mount(in *dir.Dir, name string) error { return clone.Mounted(in, name) }

// File has any other entry compared.
func (c *comparison) File(in *dir.Dir, name string) error {
	st, err := c.still.look(c.entries.Stat(in, name))
	if err = errors.Join(c.ctx.Err(), err); err != nil {
		return changedAt(in, name, err)
	}
	if format(st) != unix.S_IFREG || st.Size == 0 || !c.all && c.track.isSettled(name, st) {
		return ifGone(c.check(in, name, st, 0, xattr.Of(in, name)))
	}
	fd, err := clone.OpenRegular(in, name, st)
	if err != nil {
		_, err = c.still.look(nil, err)
		return changedAt(in, name, err)
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
	base := c.track.base.file(name)
	if base == nil {
		return c.contents(fd, 0, size)
	}
	defer func() { _ = base.Close() }() // opened for reading
	var compared int64
	return eachDifference(c.ctx, base, fd, func(r diff.Range) error {
		from := max(compared, r.Offset/blockBytes*blockBytes)
		if end := min(r.Offset+r.Bytes, size); end > compared {
			compared = endOf(blockBytes, end-1, size)
		}
		return c.contents(fd, from, compared)
	})
}

// contents sends the digests of a part of a file that ends with a block or with the file.
func (c *comparison) contents(fd int, at, size int64) error {
	r := newReader(fd, at, size, c.block)
	out := c.wire
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
		c.meter.show()
		if err := out.send(c.ctx); err != nil {
			return err
		}
	}
	return nil
}

// digests puts those of the blocks from at on into a frame, and returns where the next frame begins.
func (c *comparison) digests(r *reader, at, size int64) (int64, error) {
	out := c.wire
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
			c.meter.done.Compared += int64(len(b.content))
		}
		if at = endOf(blockBytes, at, size); at == size {
			break
		}
	}
	return at, nil
}
