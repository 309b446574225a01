package quota

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// projects enforces limits with project quotas.
type projects struct {
	kind    Kind
	control control
	most    uint64 // how many projects to ask about
}

// detectProjects checks that project quotas are accounted and enforced.
func detectProjects(d *dir.Dir, kind Kind) (Facility, error) {
	p := projects{kind: kind, control: newControl(), most: mostProjects}
	state, err := p.control.state(d)
	if err != nil {
		return nil, err
	}
	if state.Flags&projectEnforced == 0 {
		return nil, p.notEnforced(d, state.Flags)
	}
	if err := outsideProjects(d); err != nil {
		return nil, err
	}
	return p, nil
}

// notEnforced returns why limits are not enforced, and what to do.
func (p projects) notEnforced(d *dir.Dir, state uint16) error {
	counted := state&projectAccounting != 0
	switch {
	case !p.control.supported(d):
		return fmt.Errorf("%w: the kernel was built without quotas for %s, the filesystem of %s: it needs %s",
			ErrNone, p.kind, d, kernelOption[p.kind])
	case p.kind == XFS && counted:
		return fmt.Errorf("%w: xfs is mounted with pqnoenforce at %s: use the mount option prjquota instead, then unmount and mount it",
			ErrNone, d)
	case p.kind == XFS:
		return fmt.Errorf("%w: xfs is mounted without prjquota at %s: add prjquota to its mount options "+
			"(for the root filesystem rootflags=prjquota on the kernel command line) then unmount and mount it; a remount is not enough",
			ErrNone, d)
	case counted:
		return fmt.Errorf("%w: ext4 is mounted without prjquota at %s: add prjquota to its mount options, then unmount and mount it",
			ErrNone, d)
	}
	return fmt.Errorf("%w: ext4 at %s lacks the features project and quota: unmount it and run "+
		"tune2fs -O project,quota %s, then mount it with prjquota", ErrNone, d, deviceName(d))
}

// outsideProjects returns ErrNone if new entries of the directory inherit a project id. They
// could not get another id, nor could directories be moved in (rename(2), EXDEV).
func outsideProjects(d *dir.Dir) error {
	attr, err := attrOf(d)
	if err == nil && attr.Project != 0 && attr.Flags&ioctl.ProjectInherit != 0 {
		return fmt.Errorf("%w: everything in %s already belongs to project %d, and can belong to only one: run chattr -p 0 -P %s", ErrNone, d, attr.Project, d)
	}
	return err
}

var kernelOption = map[Kind]string{XFS: "CONFIG_XFS_QUOTA", Ext4: "CONFIG_QUOTA"}

// deviceName is the filesystem's device, for messages.
func deviceName(d *dir.Dir) string {
	if node, err := deviceNode(d); err == nil {
		return node
	}
	return "DEVICE"
}

func (p projects) Kind() Kind { return p.kind }

func (projects) Simple() bool { return false }

func (p projects) Make(parent *dir.Dir, name string) (*dir.Dir, error) { return parent.Make(name) }

func (p projects) NewID(fs *dir.Dir, from ID, taken func(ID) bool) (ID, error) {
	defaults, err := p.defaults(fs)
	if err != nil {
		return 0, err
	}
	id, err := freeID(max(from, FirstID), func(id ID) (bool, error) {
		if taken(id) {
			return false, nil
		}
		q, err := p.control.get(fs, id)
		return err == nil && !q.without(defaults).limited() && q.Blocks|q.Inodes == 0, err
	})
	if errors.Is(err, ErrNoID) {
		err = fmt.Errorf("%w: %d to %d are in use on %s", ErrNoID, FirstID, LastID, fs)
	}
	return id, err
}

// inARow is how many ids are asked about one after the other, and then how many at random.
const inARow = 64

// freeID finds an id that is free, the lowest if it is near. The owner of files can give each
// another id of the range (FS_IOC_FSSETXATTR), and a million of them would be passed one by
// one for each new volume: so the search goes on at random, and through all ids only where
// nearly all are in use.
func freeID(from ID, free func(ID) (bool, error)) (ID, error) {
	near := min(from+inARow, LastID+1)
	if id, err := firstFree(from, near, free); id != 0 || err != nil {
		return id, err
	}
	for range inARow {
		if near > LastID {
			break
		}
		id := near + rand.N(LastID-near+1)
		if ok, err := free(id); ok || err != nil {
			return id, err
		}
	}
	id, err := firstFree(near, LastID+1, free)
	if err == nil && id == 0 {
		err = ErrNoID
	}
	return id, err
}

// firstFree is the first of the ids up to an end that is free; 0 for none.
func firstFree(from, end ID, free func(ID) (bool, error)) (ID, error) {
	for id := from; id < end; id++ {
		if ok, err := free(id); ok || err != nil {
			return id, err
		}
	}
	return 0, nil
}

// defaults are the limits that XFS gives a project which has none, each time its usage changes
// (xfs_qm_adjust_dqlimits): those of project 0.
func (p projects) defaults(d *dir.Dir) (diskQuota, error) {
	if p.kind != XFS {
		return diskQuota{}, nil
	}
	return p.control.get(d, 0)
}

// noLimit is what is set where a default would take the place of none: more blocks, and more
// inodes, than any filesystem has.
const noLimit = 1 << 50

func (p projects) Limit(d *dir.Dir, id ID, l Limit) error {
	if err := checkProject(id); err != nil {
		return fmt.Errorf("limit %s: %w", d, err)
	}
	bytes, err := l.bytesOnDisk(d)
	if err != nil {
		return err
	}
	// Set the id first: if the rest fails or is interrupted, IDOf finds it.
	given, err := giveID(d, id)
	if err != nil {
		return err
	}
	defaults, err := p.defaults(d)
	if err == nil && given {
		err = p.checkAlone(d, id, defaults)
	}
	if err != nil {
		return err
	}
	has := Limit{Bytes: bytes, Inodes: l.Inodes}
	if has.Bytes == 0 && defaults.BlockHard|defaults.BlockSoft != 0 {
		has.Bytes = noLimit * quotaBlock
	}
	if has.Inodes == 0 && defaults.InodeHard|defaults.InodeSoft != 0 {
		has.Inodes = noLimit
	}
	return p.control.set(d, id, has)
}

// checkAlone takes the id that a directory was just given off again and returns ErrTaken if something else is counted
// by it: another process had NewID answer the same. Of two directories the later one, at least, finds both counted.
func (p projects) checkAlone(d *dir.Dir, id ID, defaults diskQuota) error {
	q, err := p.control.get(d, id)
	if err == nil && !q.without(defaults).limited() && q.Inodes == 1 {
		return nil
	}
	if err == nil {
		err = fmt.Errorf("set project of %s to %d: %w", d, id, ErrTaken)
	}
	return errors.Join(err, takeID(d))
}

func takeID(d *dir.Dir) error {
	attr, err := attrOf(d)
	if err != nil {
		return err
	}
	attr.Project = 0
	attr.Flags &^= ioctl.HasAttr | ioctl.ProjectInherit
	if err := ioctl.Do(d, ioctl.SetFileAttr, &attr); err != nil {
		return fmt.Errorf("take %s out of its project: %w", d, err)
	}
	return nil
}

// giveID gives the directory a project id, which new entries inherit. It reports whether it did not before.
func giveID(d *dir.Dir, id ID) (given bool, err error) {
	attr, err := attrOf(d)
	if err != nil {
		return false, err
	}
	switch {
	case ID(attr.Project) == id && attr.Flags&ioctl.ProjectInherit != 0:
		return false, nil
	case attr.Project != 0 && ID(attr.Project) != id:
		return false, fmt.Errorf("set project of %s to %d: %w: %d", d, id, ErrOtherID, attr.Project)
	}
	given = attr.Project == 0
	attr.Project = uint32(id)
	attr.Flags = attr.Flags&^ioctl.HasAttr | ioctl.ProjectInherit
	if err := ioctl.Do(d, ioctl.SetFileAttr, &attr); err != nil {
		return false, fmt.Errorf("set project of %s to %d: %w", d, id, err)
	}
	return given, nil
}

func attrOf(d *dir.Dir) (ioctl.FileAttr, error) {
	var attr ioctl.FileAttr
	if err := ioctl.Do(d, ioctl.GetFileAttr, &attr); err != nil {
		return attr, fmt.Errorf("read the project of %s: %w", d, err)
	}
	return attr, nil
}

func (p projects) Usage(d *dir.Dir, id ID) (Usage, error) {
	if err := checkProject(id); err != nil {
		return Usage{}, fmt.Errorf("read the usage of %s: %w", d, err)
	}
	q, err := p.control.get(d, id)
	if q.BlockHard >= noLimit {
		q.BlockHard = 0
	}
	if q.InodeHard >= noLimit {
		q.InodeHard = 0
	}
	return Usage{
		Limit:  Limit{Bytes: int64(q.BlockHard * quotaBlock), Inodes: int64(q.InodeHard)},
		Bytes:  int64(q.Blocks * quotaBlock),
		Inodes: int64(q.Inodes),
	}, err
}

func (p projects) Beside(fs *dir.Dir) (Usage, error) {
	none, err := p.control.get(fs, 0)
	if err == nil {
		err = p.checkFew(fs)
	}
	blocks := none.Blocks
	for id, asked := ID(1), uint64(0); err == nil && id <= math.MaxUint32; id++ {
		if id == FirstID {
			id = LastID + 1
		}
		var q diskQuota
		if q, err = p.control.next(fs, id); err != nil {
			break
		}
		if asked++; asked > p.most {
			err = fmt.Errorf("%w: more than %d outside of the driver's range on %s", ErrTooMany, p.most, fs)
		}
		if id = ID(q.ID); id >= FirstID && id <= LastID {
			id = LastID
			continue
		}
		blocks += q.Blocks
	}
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return Usage{Bytes: int64(blocks * quotaBlock)}, err
}

// mostProjects is how many projects a filesystem may have for all to be asked about. That takes a fraction of a second, on a slow disk
// some seconds.
const mostProjects = 30_000

// checkFew returns ErrTooMany if XFS may have to pass too many projects to find the next one. It keeps one of each id that any file had,
// and passes those without use in one call, which no signal ends. Their number is up to the users: the owner of a file can give it one id after
// the other. Of ids that are far from each other each takes a block.
func (p projects) checkFew(fs *dir.Dir) error {
	if p.kind != XFS {
		return nil // it forgets them
	}
	state, err := p.control.state(fs)
	if err != nil {
		return err
	}
	if state.ProjectBlocks > p.most {
		return fmt.Errorf("%w: xfs stores those of %s in %d blocks, more than %d", ErrTooMany, fs, state.ProjectBlocks, p.most)
	}
	return err
}

func (p projects) Outside(*dir.Dir) (int, error) { return 0, nil }

func (p projects) IDOf(d *dir.Dir) (ID, error) {
	attr, err := attrOf(d)
	// A filesystem without project ids: no id.
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
	// What is counted by it is another process's: it has the id since the tree is gone.
	if err != nil || !q.unused() {
		return err
	}
	return p.control.set(fs, id, Limit{})
}

func (p projects) ReleaseUnused(fs *dir.Dir, taken func(ID) bool) (released int, err error) {
	if err := p.checkFew(fs); err != nil {
		return 0, err
	}
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
		case !taken(id) && q.unused():
			if err := p.control.set(fs, id, Limit{}); err != nil {
				return released, err
			}
			released++
		}
	}
	return released, nil
}

// checkProject refuses projects of others, and project 0, whose limits are the defaults of
// all projects.
func checkProject(id ID) error {
	if id < FirstID || id > LastID {
		return fmt.Errorf("project id %d is not between %d and %d", id, FirstID, LastID)
	}
	return nil
}
