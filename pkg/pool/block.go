package pool

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
)

// diskName is the file in the directory of a block volume that is its content.
const diskName = "disk.img"

// Devices makes files block devices: loop.Kernel, or a stand-in that keeps its contract.
type Devices interface {
	Attach(f *loop.File, o loop.Options) (loop.Device, error)
	Attached() ([]loop.Device, error)
	Inspect(name string) (loop.Device, error)
	Grow(d loop.Device) (loop.Device, error)
	Detach(ctx context.Context, d loop.Device) error
}

// makeDisk makes the file of a new block volume, in full.
func (s *session) makeDisk(ctx context.Context, d *dir.Dir, rec *record) (err error) {
	disk, err := loop.Create(d, diskName)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	if rec.BlockBytes, err = disk.BlockBytes(); err != nil {
		return err
	}
	err = disk.Grow(ctx, rec.Bytes, rec.allocation())
	if errors.Is(err, errors.ErrUnsupported) {
		err = fmt.Errorf(`%w: the pool's filesystem cannot set space aside for a file; the pool option "allocation":"thin" does without: %w`, ErrNoSpace, err)
	}
	return err
}

// checkDisk answers ErrDamaged for a block volume whose file is not what was promised.
func (s *session) checkDisk(id VolumeID, e entry) error {
	if !e.block() {
		return nil
	}
	d, err := s.root.Open(id.name)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	disk, err := openDisk(id, d)
	if err != nil {
		return err
	}
	return errors.Join(whole(id, disk, e.record), disk.Close())
}

// whole answers ErrDamaged for a file that is smaller than what was promised.
func whole(id VolumeID, disk *loop.File, rec *record) error {
	bytes, err := disk.Size()
	if err == nil && bytes < rec.Bytes {
		err = fmt.Errorf("%w: the file of block volume %s has %d bytes, and %d were promised", ErrDamaged, id, bytes, rec.Bytes)
	}
	return err
}

// openDisk opens the file of a block volume.
func (v *found) openDisk() (*loop.File, error) { return openDisk(v.id, v.dir) }

func openDisk(id VolumeID, d *dir.Dir) (*loop.File, error) {
	disk, err := loop.Open(d, diskName)
	if isMissing(err) || errors.Is(err, dir.ErrNotFile) {
		return nil, fmt.Errorf("%w: block volume %s has no file %s: %w", ErrDamaged, id, diskName, err)
	}
	return disk, err
}

// diskID identifies the file of a block volume.
func (v *found) diskID() (dir.ID, error) {
	disk, err := v.openDisk()
	if err != nil {
		return dir.ID{}, err
	}
	return disk.ID(), disk.Close()
}

// publishDevice attaches the volume's file, unless it is, and publishes the device.
func (v *found) publishDevice(ctx context.Context, r Publication) error {
	disk, err := v.openDisk()
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	if err := whole(v.id, disk, v.entry.record); err != nil {
		return err
	}
	options := v.session.pool.options
	step := trace.Begin(ctx, "attach loop device")
	device, err := options.Devices.Attach(disk, loop.Options{
		ReadOnly:   r.ReadOnly,
		BlockBytes: v.entry.record.BlockBytes,
		Discard:    v.entry.record.Thin,
	})
	err = step.EndWith(err)
	if errors.Is(err, syscall.EROFS) {
		return v.session.pool.unavailable(err)
	}
	if err != nil {
		return deviceError(err)
	}
	if device.Discard && !v.entry.record.Thin {
		v.session.pool.log.Info("the device of a volume takes discards, which give its space back to the pool: sysfs is read-only",
			"volume", v.id.name, "device", device.Name)
	}
	if err := trace.Step(ctx, "mount", func() error {
		return options.Mounts.PublishDevice(options.Dev, device.Name, r.Target)
	}); err != nil {
		return errors.Join(mountError(err), v.session.pool.detachUnpublished(ctx, disk.ID()))
	}
	return nil
}

// attachments are the loop devices of the node, and where they are published.
type attachments struct {
	devices   []loop.Device
	published map[string][]bind.Publication
}

func (o Options) attachments() (attachments, error) {
	devices, err := o.Devices.Attached()
	if err != nil || len(devices) == 0 {
		return attachments{}, err
	}
	published, err := o.Mounts.Published(o.Dev)
	return attachments{devices: devices, published: published}, err
}

// of are the devices of one file.
func (a attachments) of(file dir.ID) (devices []loop.Device) {
	for _, d := range a.devices {
		if d.Backing == file {
			devices = append(devices, d)
		}
	}
	return devices
}

// attachments are those of the node, if each of them tells whether it is the volume's. One
// that does not answer may be by its name, which is that of the volume's file now.
func (v *found) attachments() (attachments, error) {
	all, err := v.session.pool.options.attachments()
	if err != nil {
		return attachments{}, err
	}
	return all, all.unknown(v.id)
}

// unknown answers ErrUnavailable for a volume that may have a device of which nobody can tell.
func (a attachments) unknown(id VolumeID) error {
	for _, d := range a.devices {
		if d.Silent && d.Was(id.name, diskName) {
			return fmt.Errorf("%w: %s may be its device: %w", ErrUnavailable, d.Name, loop.ErrSilent)
		}
	}
	return nil
}

// publications are those of the devices of one file.
func (a attachments) publications(file dir.ID) (all []bind.Publication) {
	for _, d := range a.of(file) {
		all = append(all, a.published[d.Name]...)
	}
	return all
}

// unused tells of a device that is ours to detach.
func (a attachments) unused(d loop.Device) bool { return d.Ours && len(a.published[d.Name]) == 0 }

// detachUnpublished detaches the devices of a file that are published nowhere. It
// answers ErrInUse for one that a process has open.
func (p *Pool) detachUnpublished(ctx context.Context, file dir.ID) error {
	all, err := p.options.attachments()
	if err != nil {
		return err
	}
	for _, device := range all.of(file) {
		if all.unused(device) {
			err = errors.Join(err, p.options.Devices.Detach(ctx, device))
		}
	}
	return deviceError(err)
}

// file identifies what devices of a volume are attached to. It answers false where
// there is nothing that could be: the volume is no block volume, or its file is lost.
// What a volume is whose record is gone or damaged, its directory tells.
func (v *found) file() (id dir.ID, ok bool, err error) {
	if v.dir == nil || !v.entry.card().mayBeBlock() {
		return dir.ID{}, false, nil
	}
	id, err = v.diskID()
	if errors.Is(err, ErrDamaged) {
		return dir.ID{}, false, nil
	}
	return id, err == nil, err
}

// detachUnpublished detaches the volume's devices that are published nowhere.
func (v *found) detachUnpublished(ctx context.Context) error {
	file, ok, err := v.file()
	if err != nil || !ok {
		return err
	}
	return v.session.pool.detachUnpublished(ctx, file)
}

// used tells whether this node has the volume published, or its file attached.
func (v *found) used() (bool, error) {
	published, err := v.published()
	if err != nil || len(published) > 0 {
		return true, err
	}
	file, ok, err := v.file()
	if err != nil || !ok {
		return false, err
	}
	all, err := v.attachments()
	return len(all.of(file)) > 0, err
}

// detached detaches what a crash left attached, and answers ErrInUse, with the device,
// for a volume whose file is attached all the same: in use, or by somebody else.
func (v *found) detached(ctx context.Context) error {
	if err := v.detachUnpublished(ctx); err != nil {
		return err
	}
	file, ok, err := v.file()
	if err != nil || !ok {
		return err
	}
	all, err := v.attachments()
	if err != nil {
		return err
	}
	for _, device := range all.of(file) {
		return fmt.Errorf("it is %w: its file is attached as %s", ErrInUse, device.Name)
	}
	return nil
}

// deviceAt is the loop device that is published at the target; nil if there is none.
func (s *Set) deviceAt(target bind.Target) (*loop.Device, error) {
	published, err := s.options.Mounts.Published(s.options.Dev)
	if err != nil {
		return nil, err
	}
	for name, all := range published {
		for _, p := range all {
			if !target.Is(p.Path) {
				continue
			}
			device, err := s.options.Devices.Inspect(name)
			if errors.Is(err, loop.ErrNotAttached) {
				return nil, nil
			}
			return &device, err
		}
	}
	return nil, nil
}

// ofAnother tells whether a device that is published is that of another volume. One
// whose volume went away, or was restored from a backup, is nobody's: a pod can end.
func (s *Set) ofAnother(id VolumeID, device *loop.Device) bool {
	if device == nil || !device.Ours || s.isOf(id, device) {
		return false
	}
	for _, p := range s.pools {
		in, err := p.enter()
		if err != nil {
			continue // the target would hang with the pool
		}
		held := in.holds(device.Backing)
		in.close()
		if held {
			return true
		}
	}
	return false
}

func (s *Set) isOf(id VolumeID, device *loop.Device) bool {
	v, err := s.find(id, Name{})
	if err != nil {
		return false
	}
	defer v.close()
	file, ok, err := v.file()
	return err == nil && ok && file == device.Backing
}

// holds tells whether a volume of the pool has that file.
func (s *session) holds(file dir.ID) bool {
	for id := range s.pool.each(card.mayHaveDevices) {
		if found, ok, err := s.backing(id); err == nil && ok && found == file {
			return true
		}
	}
	return false
}

// backing is found.file, whatever the record says.
func (s *session) backing(id VolumeID) (file dir.ID, ok bool, err error) {
	d, err := s.root.Open(id.name)
	if err != nil {
		return dir.ID{}, false, err
	}
	defer func() { _ = d.Close() }()
	return (&found{id: id, dir: d}).file()
}

// detach takes the device of a volume off its file if it is published nowhere any more.
func (s *Set) detach(ctx context.Context, id VolumeID, device *loop.Device) error {
	if device == nil || device.Silent {
		return nil // the sweep detaches it when it answers
	}
	if device.Gone {
		return s.detachGone(ctx, id, *device)
	}
	all, err := s.options.attachments()
	if err != nil || !all.unused(*device) {
		return err
	}
	return trace.Step(ctx, "detach loop device", func() error {
		return deviceError(s.options.Devices.Detach(ctx, *device))
	})
}

// detachGone is detach where the filesystem of the file is gone. The device would keep what
// is left of that, which could not be repaired then. What it was published for tells whose
// it is: a volume of that name, and the kernel has that name of the file too.
func (s *Set) detachGone(ctx context.Context, id VolumeID, device loop.Device) error {
	if !device.Was(id.name, diskName) {
		return nil
	}
	published, err := s.options.Mounts.Published(s.options.Dev)
	if err != nil || len(published[device.Name]) > 0 {
		return err
	}
	return deviceError(s.options.Devices.Detach(ctx, device))
}

// publishedDeviceAt answers ErrNotFound unless the path carries a device of the volume.
func (s *Set) publishedDeviceAt(v *found, at bind.Target) error {
	file, err := v.diskID()
	if err != nil {
		return err
	}
	device, err := s.deviceAt(at)
	if err != nil {
		return err
	}
	if device != nil && device.Gone {
		return fmt.Errorf("%w: the filesystem of the device at %s is gone", ErrDamaged, at)
	}
	if device != nil && device.Silent {
		return fmt.Errorf("%w: the device at %s: %w", ErrUnavailable, at, loop.ErrSilent)
	}
	if device == nil || device.Backing != file {
		return fmt.Errorf("%w: it is not published at %s", ErrNotFound, at)
	}
	return nil
}

// growFile makes the file of a block volume larger, and its limit before that, and
// answers the size that the file had. What of it fails changes nothing.
func (v *found) growFile(ctx context.Context, to entry) (had int64, err error) {
	s := v.session
	disk, err := v.openDisk()
	if err != nil {
		return 0, err
	}
	defer func() { _ = disk.Close() }()
	if had, err = disk.Size(); err != nil {
		return 0, err
	}
	if err = s.limit(v.dir, to); err == nil {
		err = disk.Grow(ctx, to.record.Bytes, to.record.allocation())
	}
	if err != nil {
		return 0, errors.Join(err, s.limit(v.dir, v.entry))
	}
	return had, nil
}

// cutFile undoes growFile where the record was not written: no device has grown yet.
// It goes no further than that, since what the file had before may be in use, and
// leaves a file whose record tells of it.
func (v *found) cutFile(had int64) error {
	if !v.entry.block() || v.entry.record.Bytes > had {
		return nil
	}
	disk, err := v.openDisk()
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	return errors.Join(disk.Cut(had), v.session.limit(v.dir, v.entry))
}

// grownTo is the size to promise where a growth was interrupted: that of the file,
// which is larger than its record then, and never shrinks.
func (v *found) grownTo(bytes int64, r Range) (int64, error) {
	if !v.entry.block() {
		return bytes, nil
	}
	disk, err := v.openDisk()
	if err != nil {
		return 0, err
	}
	has, err := disk.Size()
	if err := errors.Join(err, disk.Close()); err != nil || has <= bytes {
		return bytes, err
	}
	if r.Limit > 0 && has > r.Limit {
		return 0, fmt.Errorf("%w: its file has %d bytes already, from a growth that was interrupted, and never shrinks", ErrOutOfRange, has)
	}
	return has, nil
}

// growDevices makes the devices of a volume as large as its file is.
func (v *found) growDevices() error {
	if !v.entry.block() {
		return nil
	}
	file, err := v.diskID()
	if err != nil {
		return err
	}
	all, err := v.attachments()
	if err != nil {
		return err
	}
	for _, device := range all.of(file) {
		if device.Ours {
			_, growErr := v.session.pool.options.Devices.Grow(device)
			err = errors.Join(err, growErr)
		}
	}
	return deviceError(err)
}

// sweepLimit is how long a look may wait for devices that are in use.
const sweepLimit = time.Second

// sweepDevices detaches what backs the pool's files and is published nowhere: a crash
// came before its publication, or after the end of that.
func (s *session) sweepDevices(ctx context.Context) {
	if !s.pool.any(card.mayHaveDevices) {
		return
	}
	all, err := s.pool.options.attachments()
	if err != nil {
		s.pool.log.Error(err, "devices that are published nowhere could not be looked for")
		return
	}
	leaked := make(map[dir.ID]bool)
	for _, device := range all.devices {
		if all.unused(device) {
			leaked[device.Backing] = true
		}
	}
	if len(leaked) == 0 {
		return
	}
	ctx, stop := context.WithTimeout(ctx, sweepLimit)
	defer stop()
	for id := range s.pool.each(card.mayHaveDevices) {
		s.pool.steps.Add(1)
		if err := s.sweepDevice(ctx, id, leaked); err != nil {
			s.pool.log.Error(err, "the device of a volume that is published nowhere is still attached", "volume", id.name)
		}
	}
}

func (s *session) sweepDevice(ctx context.Context, id VolumeID, leaked map[dir.ID]bool) error {
	unlock, err := s.pool.locks.TryLock(id)
	if err != nil {
		return nil // a call is at work on it, and sees to it
	}
	defer unlock()
	file, ok, err := s.backing(id)
	if err != nil || !ok || !leaked[file] {
		return err
	}
	return s.pool.detachUnpublished(ctx, file)
}

// finishFiles finishes growths that a crash came upon between file and record: the record
// gets the size of the file.
func (s *session) finishFiles() {
	for id := range s.pool.each(card.mayHaveDevices) {
		s.pool.steps.Add(1)
		if err := s.pool.unlessBusy(id, func() error { return s.finishFile(id) }); err != nil {
			s.pool.log.Error(err, "the file of a volume may be larger than what was promised", "volume", id.name)
		}
	}
}

func (s *session) finishFile(id VolumeID) error {
	if larger, err := s.fileBytes(id); err != nil || larger <= s.pool.known(id).promised {
		return err
	}
	unlock, err := s.tryLockToPromise(id)
	if errors.Is(err, ErrBusy) {
		s.pool.skipped = true // another node of a shared pool may be about to write the record
		return nil
	}
	if err != nil {
		return err
	}
	defer unlock()
	bytes, err := s.fileBytes(id)
	if err != nil {
		return err
	}
	rec, err := readRecord(s.volumes, id)
	if err != nil || rec == nil || rec.Mode != ModeBlock || bytes <= rec.Bytes {
		return err
	}
	s.pool.log.Info("finished to make a volume larger", "volume", id.name, "had", rec.Bytes, "has", bytes)
	rec.Bytes = bytes
	if err := writeRecord(s.volumes, rec); err != nil {
		return ignoreReadOnly(err)
	}
	s.pool.note(id, entry{record: rec, present: true})
	return nil
}

// fileBytes is the size that the file of a block volume allows to promise; 0 if it has
// no file.
func (s *session) fileBytes(id VolumeID) (int64, error) {
	d, err := s.root.Open(id.name)
	if err != nil {
		return 0, err
	}
	defer func() { _ = d.Close() }()
	disk, err := openDisk(id, d)
	if errors.Is(err, ErrDamaged) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	bytes, err := disk.Size()
	return bytes / loop.Unit * loop.Unit, errors.Join(err, disk.Close())
}

// finishDevices makes devices as large as their volumes: a crash came between record
// and device.
func (s *session) finishDevices() {
	if !s.pool.any(card.mayHaveDevices) {
		return
	}
	all, err := s.pool.options.attachments()
	if err != nil {
		s.pool.log.Error(err, "devices that are smaller than their volumes could not be looked for")
		return
	}
	if len(all.devices) == 0 {
		return
	}
	for id := range s.pool.each(card.mayHaveDevices) {
		s.pool.steps.Add(1)
		if err := s.pool.unlessBusy(id, func() error { return s.finishDevice(id, all) }); err != nil {
			s.pool.log.Error(err, "the device of a volume may be smaller than the volume", "volume", id.name)
		}
	}
}

func (s *session) finishDevice(id VolumeID, all attachments) error {
	file, ok, err := s.backing(id)
	if err != nil || !ok {
		return err
	}
	for _, device := range all.of(file) {
		if device.Ours && device.SizeBytes < s.pool.known(id).promised {
			_, growErr := s.pool.options.Devices.Grow(device)
			err = errors.Join(err, growErr)
		}
	}
	return err
}

// lookAtDisk has the facts of a block volume be those of its file, which keeps its size
// whether there is a limit or not.
func lookAtDisk(id VolumeID, d *dir.Dir, e entry, whole dir.Space, facts *health.Facts) {
	facts.Unenforced, facts.LimitOff, facts.InodesCounted = false, "", false
	facts.FreeBytes = health.NotAsked // all of its space is set aside
	if e.record.Thin {
		facts.FreeBytes, facts.SizeBytes = whole.FreeBytes, whole.SizeBytes
	}
	disk, err := openDisk(id, d)
	if err != nil {
		facts.IO = errors.Join(facts.IO, err)
		return
	}
	bytes, err := disk.Size()
	facts.IO = errors.Join(facts.IO, err, disk.Close())
	facts.Short = err == nil && bytes < e.record.Bytes
}

// deviceError translates the errors of the loop devices into those of this package.
func deviceError(err error) error {
	switch {
	case errors.Is(err, loop.ErrSilent):
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case errors.Is(err, loop.ErrNoDevice):
		return fmt.Errorf("%w: %w", ErrNoSpace, err)
	case errors.Is(err, loop.ErrBusy), errors.Is(err, loop.ErrForeign):
		return fmt.Errorf("%w: %w", ErrInUse, err)
	}
	return err
}
