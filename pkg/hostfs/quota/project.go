package quota

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// projects keeps limits by project quota.
type projects struct {
	kind    Kind
	control control
}

// detectProjects finds out whether project quotas are counted and enforced.
func detectProjects(d *dir.Dir, kind Kind) (Facility, error) {
	p := projects{kind: kind, control: newControl()}
	state, err := p.control.state(d)
	if err != nil {
		return nil, err
	}
	if state&projectEnforced == 0 {
		return nil, p.notEnforced(d, state)
	}
	if err := outsideProjects(d); err != nil {
		return nil, err
	}
	return p, nil
}

// notEnforced says why, and what to do.
func (p projects) notEnforced(d *dir.Dir, state uint16) error {
	counted := state&projectAccounting != 0
	switch {
	case !p.control.supported(d):
		return fmt.Errorf("%w: this kernel was built without those of %s, which %s is on: prjquota needs one that has %s",
			ErrNone, p.kind, d, kernelOption[p.kind])
	case p.kind == XFS && counted:
		return fmt.Errorf("%w: xfs is mounted with pqnoenforce at %s: have prjquota in its mount options instead, and mount it anew",
			ErrNone, d)
	case p.kind == XFS:
		return fmt.Errorf("%w: xfs is mounted without prjquota at %s: add prjquota to its mount options "+
			"(for the root filesystem rootflags=prjquota on the kernel command line) and mount it anew; a remount does not do",
			ErrNone, d)
	case counted:
		return fmt.Errorf("%w: ext4 is mounted without prjquota at %s: add prjquota to its mount options and mount it anew",
			ErrNone, d)
	}
	return fmt.Errorf("%w: ext4 at %s lacks the features project and quota: unmount it and run "+
		"tune2fs -O project,quota %s, then mount it with prjquota", ErrNone, d, deviceName(d))
}

// outsideProjects answers ErrNone if what is made in the directory belongs to a project
// from the beginning. It can have no other then, nor be moved in (rename(2), EXDEV).
func outsideProjects(d *dir.Dir) error {
	attr, err := attrOf(d)
	if err == nil && attr.Project != 0 && attr.Flags&projectInherit != 0 {
		return fmt.Errorf("%w: all of %s belongs to project %d already, and nothing can belong to two: run chattr -p 0 -P %s", ErrNone, d, attr.Project, d)
	}
	return err
}

var kernelOption = map[Kind]string{XFS: "CONFIG_XFS_QUOTA", Ext4: "CONFIG_QUOTA"}

// deviceName names the filesystem's device for a person.
func deviceName(d *dir.Dir) string {
	if node, err := deviceNode(d); err == nil {
		return node
	}
	return "DEVICE"
}

func (p projects) Kind() Kind { return p.kind }

func (p projects) Make(parent *dir.Dir, name string) (*dir.Dir, error) { return parent.Make(name) }

func (p projects) NewID(fs *dir.Dir, from ID, taken func(ID) bool) (ID, error) {
	for id := max(from, FirstID); id <= LastID; id++ {
		if taken(id) {
			continue
		}
		q, err := p.control.get(fs, id)
		if err != nil {
			return 0, err
		}
		if !q.limited() && q.Blocks|q.Inodes == 0 {
			return id, nil
		}
	}
	return 0, fmt.Errorf("%w: %d to %d are in use on %s", ErrNoID, FirstID, LastID, fs)
}

func (p projects) Limit(d *dir.Dir, id ID, l Limit) error {
	if err := checkProject(id); err != nil {
		return fmt.Errorf("limit %s: %w", d, err)
	}
	bytes, err := l.bytesOnDisk(d)
	if err != nil {
		return err
	}
	// The id comes first: IDOf finds it again should the rest not happen.
	if err := giveID(d, id); err != nil {
		return err
	}
	return p.control.set(d, id, Limit{Bytes: bytes, Inodes: l.Inodes})
}

// giveID has the directory, and what will be made in it, count for a project.
func giveID(d *dir.Dir, id ID) error {
	attr, err := attrOf(d)
	if err != nil {
		return err
	}
	switch {
	case ID(attr.Project) == id && attr.Flags&projectInherit != 0:
		return nil
	case attr.Project != 0 && ID(attr.Project) != id:
		return fmt.Errorf("give %s to project %d: %w: %d", d, id, ErrOtherID, attr.Project)
	}
	attr.Project = uint32(id)
	attr.Flags = attr.Flags&^hasAttr | projectInherit
	if err := ioctl(d, fsSetXattr, &attr); err != nil {
		return fmt.Errorf("give %s to project %d: %w", d, id, err)
	}
	return nil
}

func attrOf(d *dir.Dir) (fileAttr, error) {
	var attr fileAttr
	if err := ioctl(d, fsGetXattr, &attr); err != nil {
		return attr, fmt.Errorf("read the project of %s: %w", d, err)
	}
	return attr, nil
}

func (p projects) Usage(d *dir.Dir, id ID) (Usage, error) {
	if err := checkProject(id); err != nil {
		return Usage{}, fmt.Errorf("read the use of %s: %w", d, err)
	}
	q, err := p.control.get(d, id)
	return Usage{
		Limit:  Limit{Bytes: int64(q.BlockHard * quotaBlock), Inodes: int64(q.InodeHard)},
		Bytes:  int64(q.Blocks * quotaBlock),
		Inodes: int64(q.Inodes),
	}, err
}

func (p projects) IDOf(d *dir.Dir) (ID, error) {
	attr, err := attrOf(d)
	// What cannot carry an id carries none.
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) {
		return 0, nil
	}
	return ID(attr.Project), err
}

func (p projects) Release(fs *dir.Dir, id ID) error {
	if err := checkProject(id); err != nil {
		return fmt.Errorf("release a project on %s: %w", fs, err)
	}
	q, err := p.control.get(fs, id)
	if err != nil || !q.limited() {
		return err
	}
	return p.control.set(fs, id, Limit{})
}

func (p projects) ReleaseUnused(fs *dir.Dir, taken func(ID) bool) (released int, err error) {
	for id := FirstID; id <= LastID; id++ {
		q, err := p.control.next(fs, id)
		id = max(id, ID(q.ID))
		switch {
		case errors.Is(err, unix.ENOENT):
			return released, nil
		case err != nil:
			return released, err
		case id > LastID:
			return released, nil
		case q.unused() && !taken(id):
			if err := p.control.set(fs, id, Limit{}); err != nil {
				return released, err
			}
			released++
		}
	}
	return released, nil
}

// checkProject keeps a limit from landing on others' projects, and on project 0,
// whose limits are the defaults of all.
func checkProject(id ID) error {
	if id < FirstID || id > LastID {
		return fmt.Errorf("project id %d is not one from %d to %d", id, FirstID, LastID)
	}
	return nil
}
