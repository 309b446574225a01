package pool

import (
	"context"
	"errors"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Surveyed is what the last check at a volume saw.
type Surveyed struct {
	ID    volume.ID
	Pool  volume.PoolName
	Bytes int64 // promised, or the size of the pool where nothing was
	// Used bytes and Inodes are what a quota counts, or NotKnown. Of a block volume there
	// is neither.
	Used, Inodes int64
	// Unused is what the volume may still take of its promise, in bytes, or NotKnown where
	// nothing but the end of the disk stops it.
	Unused    int64
	Condition health.Condition
}

// Surveyed reports on each volume, from memory and without a lock, if the options ask for
// that. It is as old as the last survey.
func (s *Set) Surveyed() []Surveyed {
	var all []Surveyed
	for _, p := range s.pools {
		if last := p.surveyed.Load(); last != nil {
			all = append(all, p.upToDate(last.volumes)...)
		}
	}
	return all
}

// upToDate has volumes whose pool ceased to serve say so.
func (p *Pool) upToDate(volumes []Surveyed) []Surveyed {
	err := p.state.Load().err
	if err == nil {
		return volumes
	}
	away := make([]Surveyed, 0, len(volumes))
	for _, v := range volumes {
		away = append(away, Surveyed{
			ID: v.ID, Pool: v.Pool, Bytes: v.Bytes, Used: volume.Unknown, Inodes: volume.Unknown, Unused: volume.Unknown,
			Condition: health.Facts{Pool: err}.Condition(),
		})
	}
	return away
}

// A survey is what a check at each volume of a pool gave.
type survey struct {
	abnormal map[health.Reason]int
	// unlimited is how many volumes only the end of the disk stops, and unused what the
	// others may still take of their promises, in bytes.
	unlimited int
	unused    int64
	// unread has what was logged of the volumes that could not be read.
	unread  map[volume.ID]string
	volumes []Surveyed // if they are asked for
}

// add counts a volume, and leaves it to others whether it is remembered.
func (s *survey) add(v Surveyed) {
	if v.Condition.Abnormal {
		s.abnormal[v.Condition.Reason]++
	}
	if v.Unused == volume.Unknown {
		s.unlimited++
	} else {
		s.unused += v.Unused
	}
}

// surveyAll checks each volume now and then until ctx ends: so what nobody asks about is
// noticed too.
func (p *Pool) surveyAll(ctx context.Context) {
	select {
	case <-p.checked:
	case <-ctx.Done():
		return
	}
	tick := time.NewTicker(p.options.SyncEvery)
	defer tick.Stop()
	for {
		p.survey(ctx)
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

// survey goes over the volumes in the order of their ids, some at a time. In between nothing
// is held, so that an administrator can unmount the pool. If the pool ceases to serve, the
// last survey stays.
func (p *Pool) survey(ctx context.Context) {
	found := &survey{abnormal: make(map[health.Reason]int), unread: make(map[volume.ID]string)}
	for some := p.ledger.After(volume.ID{}, burst); len(some) > 0; some = p.ledger.After(some[len(some)-1].ID, burst) {
		began := time.Now()
		if err := p.surveySome(some, found); err != nil {
			return // the check of the pool says why
		}
		if rest(ctx, min(leisure*time.Since(began), longestLeisure)) != nil {
			return
		}
	}
	if p.state.Load().err == nil {
		p.surveyed.Store(found)
	}
}

func (p *Pool) surveySome(some []ledger.Volume, found *survey) error {
	s, err := p.enter()
	if err != nil {
		return err
	}
	defer s.close()
	space, err := s.store.Space()
	if err != nil {
		return err
	}
	l := &listing{pool: p, visit: s, space: space}
	for _, known := range some {
		v, ok := l.survey(known.ID)
		if !ok {
			continue
		}
		found.add(v)
		if v.Condition.Reason == health.ReadFailed {
			p.logUnread(v, found)
		}
		if p.options.EachVolume {
			found.volumes = append(found.volumes, v)
		}
	}
	return nil
}

// logUnread logs a volume that cannot be read, unless the last survey logged the same.
func (p *Pool) logUnread(v Surveyed, found *survey) {
	p.noteError()
	found.unread[v.ID] = v.Condition.Message
	if last := p.surveyed.Load(); last == nil || last.unread[v.ID] != v.Condition.Message {
		p.log.Error(errors.New(v.Condition.Message), "failed to read a volume", "volume", v.ID.String())
	}
}

// survey checks one volume, unless a call is making or removing it.
func (l *listing) survey(id volume.ID) (Surveyed, bool) {
	e, d, err := l.visit.lookupSettled(id)
	if err != nil {
		c := l.pool.ledger.Known(id)
		return l.surveyed(id, c, rememberedFacts(c, nil, err)), c.Exists()
	}
	if !e.Exists() {
		return Surveyed{}, false
	}
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	c := cardOf(e)
	used, facts := l.visit.measure(id, d, e, l.space)
	facts.InlineUnpublished = l.leftBehind(id, e)
	v := l.surveyed(id, c, facts)
	if l.visit.keeper.Enforces(c) && d != nil && !e.Block() {
		v.Used = used.UsedBytes
	}
	if v.Used != volume.Unknown && used.Inodes > 0 {
		v.Inodes = used.InodesUsed
	}
	v.Unused = l.visit.unused(id, d, e, used, facts)
	return v, true
}

// unused is what a volume may still take of its promise, or NotKnown where nothing but the
// end of the disk stops it, as far as anybody knows.
func (v *visit) unused(id volume.ID, d *dir.Dir, e store.Entry, used dir.Space, facts health.Facts) int64 {
	switch {
	case d == nil:
		return 0
	case e.Block():
		return max(0, e.Promised()-content.Allocated(id, d))
	case !v.keeper.Enforces(cardOf(e)), facts.LimitDiffers, facts.IO != nil:
		return volume.Unknown
	}
	return max(0, e.Promised()-used.UsedBytes)
}

func (l *listing) surveyed(id volume.ID, c ledger.Card, facts health.Facts) Surveyed {
	return Surveyed{
		ID: id, Pool: l.pool.config.Name, Bytes: l.pool.volume(id, c, l.space).Bytes,
		Used: volume.Unknown, Inodes: volume.Unknown, Unused: volume.Unknown, Condition: facts.Condition(),
	}
}
