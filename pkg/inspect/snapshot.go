package inspect

import (
	"slices"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/pool/upstream"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func (r *reader) seeSnapshot(l *reconcile.Listing, id volume.ID, e store.Entry, d *dir.Dir) seen {
	v := seen{Volume: r.Volume(id, reconcile.InfoOf(e), l.Space), entry: e}
	v.Condition = l.Snapshot(id, e, d)
	return v
}

func (v *seen) describeSnapshot() Snapshot {
	name, _ := v.ID.Snapshot()
	s := Snapshot{
		Name:      name,
		Abnormal:  v.Condition.Abnormal,
		Condition: v.Condition.Message,
		Reason:    string(v.Condition.Reason),
		Lost:      v.Lost,
	}
	if rec := v.entry.Record; rec != nil {
		of := rec.Origin
		s.Source, s.Mode, s.SizeBytes, s.HeldBytes = of.ID, string(rec.Mode), &of.Bytes, &rec.Bytes
		s.Method, s.Consistency, s.Cut = string(of.Method), string(of.Consistency), &of.Cut
		s.TookMillis, s.StallMillis = &of.TookMillis, &of.StallMillis
	}
	return s
}

// addUpstream adds the snapshots of the upstream KubeVirt driver in the pool's snapshotPath.
func (r *reader) addUpstream(p *Pool) {
	in, err := upstream.In(r.Store.Root(), r.Config)
	if err == nil && in == nil {
		return
	}
	var all []volume.ID
	if err == nil {
		defer func() { _ = in.Close() }() // opened for reading
		all, err = upstream.List(in)
	}
	if err != nil {
		p.SnapshotsError = err.Error()
	}
	for _, id := range all {
		r.steps.Add(1)
		p.Snapshots = append(p.Snapshots, describeUpstream(in, id))
	}
}

func describeUpstream(in *dir.Dir, id volume.ID) Snapshot {
	name, _ := id.Snapshot()
	is, err := upstream.Read(in, id)
	if err != nil {
		c := health.Facts{IO: err}.OfSnapshot()
		return Snapshot{Name: name, Upstream: true, Abnormal: c.Abnormal, Condition: c.Message, Reason: string(c.Reason)}
	}
	of := is.Origin()
	return Snapshot{
		Name: name, Upstream: true, Condition: "of the upstream driver, which does not mark incomplete copies: it may be incomplete",
		Source: of.ID, Mode: string(volume.ModeMount), Method: string(of.Method), Consistency: string(of.Consistency), Cut: &of.Cut,
	}
}

// OnlySnapshots leaves nothing in the report but the snapshots, those that are being made, and
// those that are being erased.
func (r *Report) OnlySnapshots() {
	other := func(l Leftover) bool { return !strings.HasPrefix(l.Name, volume.FirstSnapshot().String()) }
	for i := range r.Pools {
		p := &r.Pools[i]
		p.Volumes, p.OnDeleted, p.DevicesError = []Volume{}, nil, ""
		p.Creating = slices.DeleteFunc(p.Creating, other)
		p.Trash = slices.DeleteFunc(p.Trash, other)
	}
	r.count()
}

var snapshotHeader = []string{"SNAPSHOT", "SOURCE", "MODE", "SIZE", "HELD", "METHOD", "CONSISTENCY", "TOOK", "STALL", "AGE", "CONDITION"}

func (s Snapshot) row(now time.Time) []string {
	age := "-"
	if s.Cut != nil {
		age = ago(now.Sub(*s.Cut))
	}
	return []string{
		clean(s.Name), orDash(clean(s.Source)), orDash(s.Mode), size(s.SizeBytes), size(s.HeldBytes), orDash(s.Method), orDash(s.Consistency),
		millis(s.TookMillis), millis(s.StallMillis), age, condition(s.Abnormal, s.Condition),
	}
}

func millis(n *int64) string {
	switch {
	case n == nil:
		return "-"
	case *n == 0:
		return "<1ms"
	}
	return (time.Duration(*n) * time.Millisecond).String()
}
