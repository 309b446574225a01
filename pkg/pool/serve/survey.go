package serve

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/upstream"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// surveys go over the volumes of a pool now and then.
type surveys struct {
	pool *Pool
	last atomic.Pointer[reconcile.Survey] // nil before the first
}

// Surveyed reports on each volume, from memory and without a lock, if the options ask for
// that. It is as old as the last survey.
func (n *Node) Surveyed() []Surveyed {
	var all []Surveyed
	for _, p := range n.Pools {
		if last := p.surveys.last.Load(); last != nil {
			all = append(all, p.surveys.upToDate(last.Volumes)...)
		}
	}
	return all
}

// upToDate has volumes whose pool ceased to serve report that.
func (s *surveys) upToDate(volumes []Surveyed) []Surveyed {
	err := s.pool.state.Load().err
	if err == nil {
		return volumes
	}
	away := make([]Surveyed, 0, len(volumes))
	for _, v := range volumes {
		away = append(away, Surveyed{
			ID: v.ID, Pool: v.Pool, Bytes: v.Bytes, Used: volume.Unknown, Inodes: volume.Unknown, Unused: volume.Unknown,
			Condition: health.Facts{Pool: err}.Condition(), Conditions: health.Facts{Pool: err}.Conditions(),
		})
	}
	return away
}

// Ill are up to most volumes that may be abnormal, in the order of their ids, beginning after an id: those
// that the last survey found so, or all of a pool that does not serve or was not surveyed yet.
func (p *Pool) Ill(after volume.ID, most int) []reconcile.Ill {
	last := p.surveys.last.Load()
	if last == nil || p.state.Load().err != nil {
		var all []reconcile.Ill
		for _, v := range p.Ledger.Volumes(after, most) {
			all = append(all, reconcile.Ill{ID: v.ID})
		}
		return all
	}
	from, found := slices.BinarySearchFunc(last.Ill, after, reconcile.Ill.Compare)
	if found {
		from++
	}
	return last.Ill[from:min(len(last.Ill), from+most)]
}

// ill is what the last survey found of a volume, if it was abnormal.
func (s *surveys) ill(id volume.ID) (reconcile.Ill, bool) {
	last := s.last.Load()
	if last == nil {
		return reconcile.Ill{}, false
	}
	at, found := slices.BinarySearchFunc(last.Ill, id, reconcile.Ill.Compare)
	if !found {
		return reconcile.Ill{}, false
	}
	return last.Ill[at], true
}

// run checks each volume now and then until ctx ends, so that problems of volumes without calls are noticed too.
func (s *surveys) run(ctx context.Context) {
	select {
	case <-s.pool.checks.done:
	case <-ctx.Done():
		return
	}
	tick := time.NewTicker(s.pool.Options.SyncEvery)
	defer tick.Stop()
	for {
		s.survey(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

const (
	// leisure is how much longer a survey rests than it works.
	leisure = 9
	// longestLeisure bounds each rest, as longestPause does.
	longestLeisure = 10 * time.Second
)

// survey goes over the volumes and then the snapshots in the order of their ids, some at a time. In between nothing
// is held, so that an administrator can unmount the pool. If the pool ceases to serve, the
// last survey stays.
func (s *surveys) survey(ctx context.Context) {
	found := &reconcile.Survey{Abnormal: make(map[health.Reason]int), Unread: make(map[volume.ID]string)}
	for some := s.pool.Ledger.After(volume.ID{}, reconcile.Burst); len(some) > 0; some = s.pool.Ledger.After(some[len(some)-1].ID, reconcile.Burst) {
		began := time.Now()
		if err := s.surveySome(some, found); err != nil {
			return // the check of the pool says why
		}
		if reconcile.Rest(ctx, min(leisure*time.Since(began), longestLeisure)) != nil {
			return
		}
	}
	found.Upstream = s.countUpstream()
	if s.pool.state.Load().err == nil {
		last := s.last.Swap(found)
		s.logAbnormal(last, found)
		s.doubtLimits(found)
	}
}

// logAbnormal logs how many volumes are abnormal, by each reason of which a survey found more or fewer than the last one.
func (s *surveys) logAbnormal(last, found *reconcile.Survey) {
	before := make(map[health.Reason]int)
	if last != nil {
		before = last.Abnormal
	}
	for _, reason := range health.Reasons() {
		if found.Abnormal[reason] != before[reason] {
			s.pool.Log.Info("The number of abnormal volumes has changed", "reason", reason, "volumes", found.Abnormal[reason], "before", before[reason])
		}
	}
}

// doubtLimits has the next check compare all limits with the promises if a survey found one that differs: quotas that were
// switched off and on again between two checks look as before. Those that cannot be restored are not tried again by each survey.
func (s *surveys) doubtLimits(found *reconcile.Survey) {
	if int64(found.Abnormal[health.LimitDiffers]) > s.pool.checks.unrestorable.Load() {
		s.pool.checks.limitsDiffer.Store(true)
		s.pool.checks.now()
	}
}

// countUpstream is how many snapshots the pool's snapshotPath seems to have; volume.Unknown if it cannot be read. One outside of the
// pool is not asked: if its filesystem hangs, each survey would leave a thread behind.
func (s *surveys) countUpstream() int {
	if _, inside := upstream.Below(&s.pool.Config); !inside {
		return volume.Unknown
	}
	v, err := s.pool.enter()
	if err != nil {
		return volume.Unknown
	}
	defer v.Close()
	all, err := v.upstreamInside()
	if err != nil { // who asks for one of them gets the reason
		return volume.Unknown
	}
	return len(all)
}

// upstreamInside are what may be snapshots in a snapshotPath that lies in the pool.
func (v *Visit) upstreamInside() ([]volume.ID, error) {
	if _, inside := upstream.Below(&v.Pool.Config); !inside {
		return nil, nil
	}
	in, err := upstream.In(v.Store.Root(), &v.Pool.Config)
	if in == nil || err != nil { // nil: the upstream driver has made none
		return nil, err
	}
	defer func() { _ = in.Close() }() // opened for reading
	return upstream.List(in)
}

func (s *surveys) surveySome(some []ledger.Volume, found *reconcile.Survey) error {
	visit, err := s.pool.enter()
	if err != nil {
		return err
	}
	defer visit.Close()
	space, err := visit.Store.Space()
	if err != nil {
		return err
	}
	l := &reconcile.Listing{In: visit.View(), Space: space}
	for _, known := range some {
		if known.ID.IsSnapshot() {
			if l.SnapshotLost(known.ID) {
				found.LostSnapshots++
			}
			continue
		}
		v, ok := l.Survey(known.ID)
		if !ok {
			if last, ill := s.ill(known.ID); ill { // a call is at work on it
				found.Ill = append(found.Ill, last)
			}
			continue
		}
		if err := s.pool.Node.Ambiguous(known.ID); err != nil {
			v.Conditions = reconcile.Unread(known.ID, err)
			v.Condition = v.Conditions[0]
		}
		found.Add(v)
		if v.Condition.Reason.Unread() {
			s.logUnread(v, found)
		}
		if s.pool.Options.EachVolume {
			found.Volumes = append(found.Volumes, v)
		}
	}
	return nil
}

// logUnread logs a volume that cannot be read, unless the last survey logged the same.
func (s *surveys) logUnread(v Surveyed, found *reconcile.Survey) {
	s.pool.problems.note()
	found.Unread[v.ID] = v.Condition.Message
	if last := s.last.Load(); last == nil || last.Unread[v.ID] != v.Condition.Message {
		s.pool.Log.Error(errors.New(v.Condition.Message), "Failed to read a volume", "volume", v.ID.String(), "reason", v.Condition.Reason)
	}
}

// InTwo is the error of a volume that two pools have.
func InTwo(id volume.ID, first, second *Pool) error {
	return fmt.Errorf("%s %w: %q and %q; move one of the two away", id.Named(), volume.ErrAmbiguous, first.Config.Name, second.Config.Name)
}

// Ambiguous returns InTwo for a volume that the indexes of several pools have.
func (n *Node) Ambiguous(id volume.ID) error {
	var in *Pool
	for _, p := range n.Pools {
		switch {
		case !p.Ledger.Known(id).Exists():
		case in != nil:
			return InTwo(id, in, p)
		default:
			in = p
		}
	}
	return nil
}
