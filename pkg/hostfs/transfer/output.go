package transfer

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// An output sends entries of the source: what is known of them, and the content of files.
type output struct {
	ctx   context.Context
	wire  *wire
	attrs *attributer
	btrfs bool // the receiver keeps the attributes of btrfs
	meter *meter
	data  []byte // a buffer
	files int64  // of which something was sent
}

func (o *output) sendEnter(name string) error {
	o.wire.begin(kindEnter)
	o.wire.putString(name)
	return o.wire.send(o.ctx)
}

func (o *output) sendLeave(d *dir.Dir, st *unix.Stat_t) error {
	fd, err := d.ReadFd()
	if err != nil {
		return err
	}
	o.wire.begin(kindLeave)
	o.wire.putAttributes(st)
	if err := o.wire.send(o.ctx); err != nil {
		return err
	}
	if err := o.sendXattrs(xattr.Descriptor(fd), d.String()); err != nil {
		return err
	}
	return o.sendDone()
}

func (o *output) sendFile(in *dir.Dir, name string, st *unix.Stat_t, id uint64, flags int) error {
	out := o.wire
	out.begin(kindFile)
	out.put64(int64(id))
	out.put8(byte(flags | flagIf(st.Nlink > 1, flagLinked)))
	out.putAttributes(st)
	putLink(out, in, name, st)
	out.putString(name)
	return out.send(o.ctx)
}

// sendNode sends what is never opened, but for its extended attributes.
func (o *output) sendNode(in *dir.Dir, name string, st *unix.Stat_t, target string) error {
	out := o.wire
	out.begin(kindNode)
	out.put8(byte(flagIf(st.Nlink > 1, flagLinked)))
	out.putAttributes(st)
	putLink(out, in, name, st)
	out.putString(name)
	out.putString(target)
	if err := out.send(o.ctx); err != nil {
		return err
	}
	return o.sendAttributes(st)
}

func (o *output) sendAttributes(st *unix.Stat_t) error {
	o.wire.begin(kindAttributes)
	o.wire.putAttributes(st)
	return o.wire.send(o.ctx)
}

func (o *output) sendDone() error { return o.wire.sendEmpty(o.ctx, kindDone) }

// linkBytes identify an entry that has several names.
const linkBytes = 16

func putLink(out *wire, in *dir.Dir, name string, st *unix.Stat_t) {
	var link [linkBytes]byte
	if st.Nlink > 1 {
		sum := sha256.Sum256([]byte(clone.Identify(in, name, st)))
		copy(link[:], sum[:])
	}
	out.putRaw(link[:])
}

func (o *output) sendSelect(id uint64) error {
	o.wire.begin(kindSelect)
	o.wire.put64(int64(id))
	return o.wire.send(o.ctx)
}

// sendRest sends what is known of a file only after its content, of which so many bytes were sent. If it is longer by now, the rest
// is sent, too.
func (o *output) sendRest(fd int, in *dir.Dir, name string, st *unix.Stat_t, size int64) error {
	if st.Size > size {
		if err := o.sendRange(fd, size, st.Size, false); err != nil {
			return fmt.Errorf("send %s/%s: %w", in, name, err)
		}
	}
	o.files++
	if err := o.sendAttributes(st); err != nil {
		return err
	}
	if err := o.sendXattrs(xattr.Descriptor(fd), in.String()+"/"+name); err != nil {
		return err
	}
	return o.sendDone()
}

func (o *output) sendXattrs(h xattr.Holder, path string) error {
	out := o.wire
	err := o.attrs.each(h, o.btrfs, func(name string, value []byte) error {
		out.begin(kindXattr)
		out.putString(name)
		out.putRaw(value)
		return out.send(o.ctx)
	})
	var number unix.Errno
	if errors.As(err, &number) {
		return &fs.PathError{Op: "read the attributes of", Path: path, Err: number}
	}
	return err
}

// sendRange sends the content between two offsets but for what is zero, and where that is if there may be something else on the
// target.
func (o *output) sendRange(fd int, at, end int64, punch bool) error {
	hole := at // where one begins that was not sent yet
	found := clone.DataOf(fd)
	for at < end {
		from, to, err := found.Next(at, end)
		if err != nil {
			return fmt.Errorf("%w: %w", errSource, err)
		}
		if from == to { // none: a file that was cut off has a hole here, too
			break
		}
		for at = from; at < to; {
			next := endOf(dataBytes, at, to)
			if err := o.sendData(fd, at, int(next-at), punch, &hole); err != nil {
				return err
			}
			at = next
		}
	}
	return o.sendHole(punch, hole, end)
}

// sendHole sends where there is nothing up to an offset.
func (o *output) sendHole(punch bool, hole, until int64) error {
	if !punch || hole == until {
		return nil
	}
	o.wire.begin(kindHole)
	o.wire.put64(hole)
	o.wire.put64(until - hole)
	return o.wire.send(o.ctx)
}

// sendData reads a part of a file, and sends the granules that are not zero.
func (o *output) sendData(fd int, at int64, length int, punch bool, hole *int64) error {
	if err := o.ctx.Err(); err != nil {
		return err
	}
	o.meter.show()
	content := o.data[:length]
	if err := readAt(fd, content, at); err != nil {
		return fmt.Errorf("%w: %w", errSource, err)
	}
	for len(content) > 0 {
		var n int
		for n < len(content) {
			part := content[n:min(len(content), n+int(granule-(at+int64(n))%granule))]
			if isZero(part) {
				break
			}
			n += len(part)
		}
		if n == 0 {
			n = min(len(content), int(granule-at%granule))
		} else {
			if err := o.sendHole(punch, *hole, at); err != nil {
				return err
			}
			o.wire.begin(kindData)
			o.wire.put64(at)
			o.wire.putRaw(content[:n])
			if err := o.wire.send(o.ctx); err != nil {
				return err
			}
			o.meter.done.Bytes += int64(n)
			*hole = at + int64(n)
		}
		content, at = content[n:], at+int64(n)
	}
	return nil
}

// sendChanged sends a part of a file of a size, of which the receiver has what is around it. A granule that is zero as a whole is a
// hole.
func (o *output) sendChanged(fd int, at, end, size int64) error {
	for at < end {
		first := at / granule * granule
		next := endOf(granule, at, size)
		if at == first && next <= end {
			if next = end; end < size {
				next = end / granule * granule
			}
			if err := o.sendRange(fd, at, next, true); err != nil {
				return err
			}
			at = next
			continue
		}
		part := o.data[:min(next, end)-at]
		err := readAt(fd, part, at)
		if err == nil && isZero(part) {
			err = o.sendRange(fd, first, next, true)
		} else if err == nil {
			o.wire.begin(kindData)
			o.wire.put64(at)
			o.wire.putRaw(part)
			o.meter.done.Bytes += int64(len(part))
			err = o.wire.send(o.ctx)
		}
		if err != nil {
			return err
		}
		at += int64(len(part))
	}
	return nil
}
