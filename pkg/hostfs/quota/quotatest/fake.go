// Package quotatest has an in-memory fake of quota.Facility, and the contract test that it
// and the kernel pass.
package quotatest

import (
	"errors"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

const (
	blockBytes     = 4096
	firstSubvolume = 256 // the id
)

// Fake keeps limits of existing directories in memory. It does not see what is written to
// them: tests report it with Create and Write. Its zero value is ready for use and behaves
// like XFS.
type Fake struct {
	// As is the kind that it behaves like. It must not change after the first call.
	As quota.Kind

	mu      sync.Mutex
	carried map[dir.ID]quota.ID
	use     map[quota.ID]*quota.Usage
	made    quota.ID // id of the last subvolume
	removed map[quota.ID]bool
}

// Kind is quota.Facility.Kind.
func (f *Fake) Kind() quota.Kind {
	if f.As == "" {
		return quota.XFS
	}
	return f.As
}

func (f *Fake) subvolumes() bool { return f.As == quota.Btrfs }

// Make is quota.Facility.Make.
func (f *Fake) Make(parent *dir.Dir, name string) (*dir.Dir, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	made, err := parent.Make(name)
	if err != nil {
		return nil, err
	}
	inode, err := made.ID()
	if err != nil {
		return nil, errors.Join(err, made.Close())
	}
	// The filesystem may reuse an inode number.
	delete(f.carried, inode)
	if f.subvolumes() {
		f.made = max(f.made+1, firstSubvolume)
		f.give(inode, f.made)
	}
	return made, nil
}

// NewID is quota.Facility.NewID.
func (f *Fake) NewID(_ *dir.Dir, from quota.ID, taken func(quota.ID) bool) (quota.ID, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.subvolumes() {
		return 0, nil
	}
	for id := max(from, quota.FirstID); id <= quota.LastID; id++ {
		if !taken(id) && *f.of(id) == (quota.Usage{}) {
			return id, nil
		}
	}
	return 0, quota.ErrNoID
}

// Limit is quota.Facility.Limit.
func (f *Fake) Limit(d *dir.Dir, id quota.ID, l quota.Limit) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if l.Bytes < 0 || l.Bytes > math.MaxInt64-blockBytes || l.Inodes < 0 {
		return fmt.Errorf("limit %s: %d bytes and %d inodes", d, l.Bytes, l.Inodes)
	}
	inode, err := d.ID()
	if err != nil {
		return err
	}
	own := f.carried[inode]
	switch {
	case f.subvolumes() && l.Inodes != 0:
		return fmt.Errorf("limit the inodes of %s: %w", d, errors.ErrUnsupported)
	case f.subvolumes() && own == 0:
		return fmt.Errorf("limit %s: %w", d, quota.ErrPlain)
	case f.subvolumes() && id == 0:
		id = own
	}
	if own != 0 && own != id {
		return fmt.Errorf("limit %s: %w", d, quota.ErrOtherID)
	}
	if err := f.check(id); err != nil {
		return err
	}
	if own == 0 {
		if use := f.of(id); use.Limit != (quota.Limit{}) || use.Inodes > 0 {
			return fmt.Errorf("limit %s: %w", d, quota.ErrTaken)
		}
		f.give(inode, id)
	}
	l.Bytes = (l.Bytes + blockBytes - 1) / blockBytes * blockBytes
	f.of(id).Limit = l
	return nil
}

// give sets the id of a directory; its existing content is not counted.
func (f *Fake) give(inode dir.ID, id quota.ID) {
	if f.carried == nil {
		f.carried = make(map[dir.ID]quota.ID)
	}
	f.carried[inode] = id
	f.of(id).Inodes++
}

func (f *Fake) of(id quota.ID) *quota.Usage {
	if f.use == nil {
		f.use = make(map[quota.ID]*quota.Usage)
	}
	if f.use[id] == nil {
		f.use[id] = &quota.Usage{}
	}
	return f.use[id]
}

func (f *Fake) check(id quota.ID) error {
	if f.subvolumes() && id < firstSubvolume || !f.subvolumes() && (id < quota.FirstID || id > quota.LastID) {
		return fmt.Errorf("id %d is out of range", id)
	}
	return nil
}

// Usage is quota.Facility.Usage.
func (f *Fake) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.subvolumes() && id == 0 {
		inode, err := d.ID()
		if err != nil {
			return quota.Usage{}, err
		}
		if id = f.carried[inode]; id == 0 {
			return quota.Usage{}, fmt.Errorf("read the usage of %s: %w", d, quota.ErrPlain)
		}
	}
	if err := f.check(id); err != nil {
		return quota.Usage{}, err
	}
	usage := *f.of(id)
	if f.subvolumes() {
		usage.Inodes = quota.Unknown
	}
	return usage, nil
}

// Beside is quota.Facility.Beside.
func (f *Fake) Beside(*dir.Dir) (quota.Usage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := quota.Usage{Bytes: f.of(0).Bytes}
	for id, use := range f.use {
		if f.subvolumes() && id != 0 {
			all.Bytes += use.Bytes
			all.Shared += use.Shared
		}
	}
	return all, nil
}

// Outside is 0: a fake has no pods that make subvolumes.
func (f *Fake) Outside(*dir.Dir) (int, error) { return 0, nil }

// Strays is none: a fake has no pods that change a project.
func (f *Fake) Strays(*dir.Dir, quota.ID, func() error) (quota.Strays, error) {
	return quota.Strays{}, nil
}

// IDOf is quota.Facility.IDOf.
func (f *Fake) IDOf(d *dir.Dir) (quota.ID, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	inode, err := d.ID()
	return f.carried[inode], err
}

// Release is quota.Facility.Release. It also clears the usage, since the tree is removed.
func (f *Fake) Release(_ *dir.Dir, id quota.ID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.check(id); err != nil {
		return err
	}
	delete(f.use, id)
	for inode, carried := range f.carried {
		if carried == id {
			delete(f.carried, inode)
		}
	}
	return nil
}

// ReleaseUnused is quota.Facility.ReleaseUnused.
func (f *Fake) ReleaseUnused(_ *dir.Dir, taken func(quota.ID) bool) (released int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, use := range f.use {
		unused := use.Bytes == 0 && use.Inodes == 0
		if f.subvolumes() {
			unused = f.removed[id]
		}
		if use.Limit != (quota.Limit{}) && !taken(id) && unused {
			delete(f.use, id)
			released++
		}
	}
	return released, nil
}

// Drop removes the id of a directory, as chattr(1) can.
func (f *Fake) Drop(d *dir.Dir) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	inode, err := d.ID()
	delete(f.carried, inode)
	return err
}

// Removed reports the removal of an id's tree, which the fake does not see.
func (f *Fake) Removed(id quota.ID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	use := f.of(id)
	use.Bytes, use.Inodes = 0, 0
	if f.removed == nil {
		f.removed = make(map[quota.ID]bool)
	}
	f.removed[id] = true
}

// Share has so many bytes of a directory count for another one too.
func (f *Fake) Share(d *dir.Dir, bytes int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	inode, err := d.ID()
	f.of(f.carried[inode]).Shared = bytes
	return err
}

// Create accounts a new file in a directory to the directory's current id, which it keeps.
// It returns ENOSPC or EDQUOT over the limit.
func (f *Fake) Create(d *dir.Dir) (*FakeFile, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	inode, err := d.ID()
	if err != nil {
		return nil, err
	}
	id := f.carried[inode]
	if use := f.of(id); id != 0 && use.Limit.Inodes != 0 && use.Inodes >= use.Limit.Inodes {
		return nil, f.full()
	}
	f.of(id).Inodes++
	return &FakeFile{fake: f, id: id}, nil
}

// Write is Create for a file of that many bytes, or as many as fit.
func (f *Fake) Write(d *dir.Dir, bytes int64) error {
	file, err := f.Create(d)
	if err != nil {
		return err
	}
	_, err = file.Write(bytes)
	return err
}

// full is the filesystem's error over a limit.
func (f *Fake) full() error {
	if f.Kind() == quota.XFS {
		return unix.ENOSPC
	}
	return unix.EDQUOT
}

// A FakeFile is a file of a Fake.
type FakeFile struct {
	fake  *Fake
	id    quota.ID
	bytes int64
}

// Write adds bytes, and returns how many fit.
func (f *FakeFile) Write(bytes int64) (int64, error) {
	f.fake.mu.Lock()
	defer f.fake.mu.Unlock()
	use, err := f.fake.of(f.id), error(nil)
	if f.id != 0 && use.Limit.Bytes != 0 {
		if room := max(use.Limit.Bytes-use.Bytes, 0); bytes > room {
			bytes, err = room, f.fake.full()
		}
	}
	use.Bytes += bytes
	f.bytes += bytes
	return bytes, err
}

// Close changes nothing.
func (f *FakeFile) Close() error { return nil }

// Remove lowers the usage by the file.
func (f *FakeFile) Remove() error {
	f.fake.mu.Lock()
	defer f.fake.mu.Unlock()
	use := f.fake.of(f.id)
	use.Bytes -= f.bytes
	use.Inodes--
	f.bytes = 0
	return nil
}
