package inspect

import (
	"context"
	"math"
	"slices"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

type seen struct {
	reconcile.Volume
	entry store.Entry
	// limitBytes is the limit that the kernel enforces, and usedBytes what it counts;
	// volume.Unknown if it does neither. Of a block volume they include what the filesystem
	// needs to keep track of the file.
	limitBytes, usedBytes int64
	carried               quota.ID            // what the directory is counted by; 0 for nothing
	file                  *content.VolumeFile // by which its devices are known; nil without one
	// fileBytes and allocatedBytes are those of the file; volume.Unknown if there is none.
	fileBytes, allocatedBytes int64
	extents                   *int               // of the file
	published                 []bind.Publication // its mounts on this node, those of its devices included
	devices                   []loop.Device
}

// What is wrong with a volume is checked again: a call of the driver may have come between what
// was read first and last. It is reported when two readings agree.
const (
	betweenReadings = time.Second
	moreReadings    = 5
)

// readVolumes reads all volumes and snapshots, and again those that are not in order.
func (r *reader) readVolumes(ctx context.Context, l *reconcile.Listing) ([]seen, error) {
	var all []seen
	for _, known := range r.Ledger.After(volume.ID{}, math.MaxInt) {
		v, ok, err := r.readVolume(l, known.ID)
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, v)
		}
	}
	readings := moreReadings
	if l.Err != nil || l.Space.ReadOnly {
		readings = 0 // no volume will be better soon
	}
	for range readings {
		sure, err := r.readAgain(ctx, l, &all)
		if err != nil || sure {
			return all, err
		}
	}
	return all, nil
}

// readAgain reads again what is not in order, after a while. It returns true if that is the
// same as before: not that another volume by that name is not in order now.
func (r *reader) readAgain(ctx context.Context, l *reconcile.Listing, all *[]seen) (sure bool, err error) {
	if !slices.ContainsFunc(*all, func(v seen) bool { return v.Condition.Abnormal }) {
		return true, nil
	}
	if err := reconcile.Rest(ctx, betweenReadings); err != nil {
		return false, err
	}
	// The ids as well: one that was read of a record which is gone by now may be another's.
	r.forgetClaims()
	if err := r.Index().Load(); err != nil {
		return false, err
	}
	last := (*all)[:0:0]
	sure = true
	for _, v := range *all {
		if before := v; before.Condition.Abnormal {
			var ok bool
			if v, ok, err = r.readVolume(l, v.ID); err != nil {
				return false, err
			}
			if !ok {
				continue
			}
			sure = sure && (!v.Condition.Abnormal || v.uid() == before.uid() && v.Condition == before.Condition)
		}
		last = append(last, v)
	}
	*all = last
	return sure, nil
}

// forgetClaims has no volume own an id, as before the records were read.
func (r *reader) forgetClaims() { r.Enforcer = r.Enforcer.WithClaims(&limit.Claims{}) }

// readVolume reads one volume. It returns false for one that is being made or removed, or is
// gone.
func (r *reader) readVolume(l *reconcile.Listing, id volume.ID) (seen, bool, error) {
	r.steps.Add(1)
	e, d, err := r.Store.LookupUnlocked(id)
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	if err != nil || !e.Exists() {
		r.Ledger.Note(id, reconcile.InfoOf(store.Entry{}))
		return seen{}, false, err
	}
	r.Ledger.Note(id, reconcile.InfoOf(e))
	return r.see(l, id, e, d), true, nil
}

// see has what the answers of CSI on one volume would, and more.
func (r *reader) see(l *reconcile.Listing, id volume.ID, e store.Entry, d *dir.Dir) seen {
	if id.IsSnapshot() {
		return r.seeSnapshot(l, id, e, d)
	}
	v := seen{
		Volume:         r.Volume(id, reconcile.InfoOf(e), l.Space),
		entry:          e,
		limitBytes:     volume.Unknown,
		usedBytes:      volume.Unknown,
		fileBytes:      volume.Unknown,
		allocatedBytes: volume.Unknown,
		published:      slices.Clone(l.Published[id.String()]),
	}
	_, facts := r.Measure(id, d, e, l.Space)
	facts.Pool = l.Err
	facts.InlineUnpublished = l.LeftBehind(id, e)
	if d != nil {
		r.count(&v, d)
		v.readFile(d)
	}
	facts.LimitDiffers = facts.LimitDiffers && !r.mayBeGrowing(&v)
	v.Enforced = v.Enforced && !facts.LimitDiffers
	v.Condition = facts.Condition()
	v.Nodes = r.Nodes(v.published, l.Elsewhere[id.String()])
	return v
}

// expandedLately is how long an expansion may be between its record and its limit: a
// disk can take a while to make the record durable.
const expandedLately = time.Minute

// mayBeGrowing reports whether a limit that is not what was promised can be that of an
// expansion which is under way. Of a block volume the limit comes first, and while its
// file is allocated that can take long; of others it comes last.
func (r *reader) mayBeGrowing(v *seen) bool {
	promised := v.entry.Promised()
	if v.entry.Block() {
		return v.limitBytes > promised
	}
	written, err := r.Store.Records().Changed(v.ID)
	since := time.Since(written)
	return err == nil && v.limitBytes != volume.Unknown && v.limitBytes < promised && 0 <= since && since < expandedLately
}

// count asks who counts the directory for its numbers. What cannot be read is not known:
// whether that makes the volume abnormal is for Measure to say, as in a driver.
func (r *reader) count(v *seen, d *dir.Dir) {
	usage, id, ok := r.Enforcer.Counted(d)
	v.carried = id
	if !ok {
		return
	}
	v.usedBytes = usage.Bytes
	if usage.Limit.Bytes > 0 {
		v.limitBytes = usage.Limit.Bytes
	}
}

// readFile reads what the devices of the volume are attached to, if it can be read.
func (v *seen) readFile(d *dir.Dir) {
	if !reconcile.InfoOf(v.entry).MayBeBlock() {
		return
	}
	disk, err := content.OpenFile(v.ID, d)
	if err != nil {
		return
	}
	defer func() { _ = disk.Close() }() // opened for reading
	if file, err := content.FileOf(v.ID, d); err == nil {
		file = file.Keep()
		v.file = &file
	}
	if bytes, err := disk.Size(); err == nil {
		v.fileBytes = bytes
	}
	if bytes, err := disk.Allocated(); err == nil {
		v.allocatedBytes = bytes
	}
	if n, err := content.Extents(d); err == nil {
		v.extents = &n
	}
}

func (v *seen) uid() string {
	if v.entry.Record == nil {
		return ""
	}
	return v.entry.Record.UID
}

func (v *seen) describe() Volume {
	d := Volume{
		ID:        v.ID.String(),
		Mode:      string(v.Mode),
		Abnormal:  v.Condition.Abnormal,
		Condition: v.Condition.Message,
		Reason:    string(v.Condition.Reason),
		Recorded:  v.entry.Record != nil || v.entry.Damage != nil,
		Lost:      v.Lost,
		Enforced:  v.Enforced,
		Sizes: Sizes{
			LimitBytes:     known(v.limitBytes),
			UsedBytes:      known(v.usedBytes),
			QuotaID:        uint64(v.carried),
			FileBytes:      known(v.fileBytes),
			AllocatedBytes: known(v.allocatedBytes),
			Extents:        v.extents,
		},
		Published: []Place{},
		Nodes:     []string{},
		Devices:   []Device{},
	}
	if rec := v.entry.Record; rec != nil {
		d.Thin, d.Inline, d.RecordQuotaID = rec.Thin, rec.Inline, rec.ProjectID
		if !rec.Created.IsZero() {
			d.Created, d.PromisedBytes = &rec.Created, &v.Bytes
		}
		if m := rec.Move; m != (store.Move{}) {
			d.Move = &Move{ID: m.ID, Role: string(m.Role), Peer: m.Peer, Whole: m.Role == store.MoveTarget && m.Fence != "", HandedOver: m.HandedOver}
		}
	}
	for _, at := range v.published {
		d.Published = append(d.Published, Place{Path: at.Path, Inside: at.Inside})
	}
	slices.SortFunc(d.Published, func(a, b Place) int { return strings.Compare(a.Path, b.Path) })
	for _, node := range v.Nodes {
		d.Nodes = append(d.Nodes, node.String())
	}
	for _, device := range v.devices {
		d.Devices = append(d.Devices, Device{Name: device.Name, SizeBytes: device.SizeBytes, ReadOnly: device.ReadOnly, Foreign: !device.Ours})
	}
	return d
}

func known(bytes int64) *int64 {
	if bytes == volume.Unknown {
		return nil
	}
	return &bytes
}
