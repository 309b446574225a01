package content

import (
	"context"
	"errors"
	"os"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// MethodFor is how the content of a directory is copied within its filesystem, where copies may
// share blocks: as a snapshot of a btrfs subvolume that has no other in it, unless it is to be copied by files, by reference, or by
// reading it. Shares reports whether files of the filesystem can share blocks.
func MethodFor(src *dir.Dir, shares func() (bool, error), byFiles bool) (volume.CopyMethod, error) {
	if !byFiles {
		// Subvolumes inside would be empty in the snapshot.
		inside, err := clone.Nested(src)
		if err == nil && inside == 0 {
			return volume.BySubvolume, nil
		}
		if err != nil && !errors.Is(err, clone.ErrNotSupported) {
			return "", err
		}
	}
	can, err := shares()
	if err == nil && can {
		return volume.ByReference, nil
	}
	return volume.ByCopy, err
}

// methodOf is what pkg/hostfs/clone calls a method that goes file by file.
func methodOf(m volume.CopyMethod) clone.Method {
	if m == volume.ByCopy {
		return clone.Copy
	}
	return clone.Share
}

// CopyTree makes an empty directory a copy of another, durably.
func CopyTree(ctx context.Context, src, dst *dir.Dir, m volume.CopyMethod, o clone.Options) (clone.Result, error) {
	o.Method = methodOf(m)
	step := trace.Begin(ctx, "copy the tree")
	result, err := clone.Tree(ctx, src, dst, o)
	if err == nil {
		err = clone.Sync(dst)
	}
	return result, step.EndWith(err)
}

// CopySubvolume makes a snapshot of a btrfs subvolume under a name in a directory, and opens it. A pod may have made the
// root of its volume immutable: the snapshot could not be moved into its place, nor away again. Taking that off is charged to the
// snapshot, which is as full as its source: so lift takes its limit off before. Errors: clone.ErrNested.
func CopySubvolume(ctx context.Context, src, to *dir.Dir, name string, lift func() error) (*dir.Dir, error) {
	if err := trace.Step(ctx, "snapshot the subvolume", func() error { return clone.Whole(src, to, name) }); err != nil {
		return nil, err
	}
	if err := lift(); err != nil {
		return nil, err
	}
	if _, err := dir.Unprotect(to, name); err != nil {
		return nil, err
	}
	return to.Open(name)
}

// Copy makes the file of a block volume in dst, durably, from that in src, as it is at one
// moment. If it is used, what users of a device have written without a flush is in it where the host keeps it
// in memory, since that is flushed first. It returns how long writers had to wait at most, and
// clone.ErrFragmented if that were longer than the limit.
func (c *Disk) Copy(ctx context.Context, src, dst *dir.Dir, m volume.CopyMethod, limit clone.Limit, used bool) (stall time.Duration, err error) {
	if used {
		if err := c.flush(src); err != nil {
			return 0, err
		}
	}
	from, err := src.OpenFile(FileName)
	if err != nil {
		return 0, err
	}
	defer func() { _ = from.Close() }() // opened for reading
	// What was written has no extents before it is flushed.
	if m == volume.ByReference && limit > 0 {
		if err := errors.Join(from.Sync(), limit.Check(from)); err != nil {
			return 0, err
		}
	}
	to, err := makeFor(dst, m)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	err = trace.Step(ctx, "copy the file", func() error {
		began := time.Now()
		if err := clone.File(ctx, to, from, methodOf(m)); err != nil {
			return err
		}
		stall = time.Since(began)
		return to.Sync()
	})
	if m == volume.ByCopy { // nothing is written
		stall = 0
	}
	return stall, err
}

// makeFor makes the file for a copy. What shares blocks is copied on write as its source is, or not.
func makeFor(dst *dir.Dir, m volume.CopyMethod) (*os.File, error) {
	if m != volume.ByCopy {
		return dst.MakeFile(FileName)
	}
	disk, err := loop.Create(dst, FileName)
	if err != nil {
		return nil, err
	}
	f, err := disk.Writable()
	return f, errors.Join(err, disk.Close())
}

// flush writes what the devices of the file have in their page cache into the file: a copy of
// the file alone would not have it.
func (c *Disk) flush(src *dir.Dir) error {
	file, err := FileID(c.ID, src)
	if err != nil {
		return err
	}
	all, err := c.Host.Attachments()
	if err != nil {
		return err
	}
	if err := all.Silent(c.ID); err != nil {
		return err
	}
	for _, d := range all.Of(file) {
		node, err := c.Host.Dev.OpenNode(d.Name, os.O_RDONLY)
		if err != nil {
			return err
		}
		if err := errors.Join(node.Sync(), node.Close()); err != nil {
			return err
		}
	}
	return nil
}
