package pool

import (
	"context"
	"errors"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Surveyed is what the last look at a volume saw.
type Surveyed struct {
	ID    VolumeID
	Pool  Name
	Bytes int64 // promised, or the size of the pool where nothing was
	// Used bytes and Inodes are what a quota counts, or NotKnown. Of a block volume there
	// is neither.
	Used, Inodes int64
	// Untaken is what the volume may still take of its promise, in bytes, or NotKnown where
	// nothing but the end of the disk stops it.
	Untaken   int64
	Condition health.Condition
}

// Surveyed tells of each volume, from memory and without a lock, if the options ask for
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

// upToDate tells of volumes whose pool ceased to serve that it did.
func (p *Pool) upToDate(volumes []Surveyed) []Surveyed {
	err := p.state.Load().err
	if err == nil {
		return volumes
	}
	away := make([]Surveyed, 0, len(volumes))
	for _, v := range volumes {
		away = append(away, Surveyed{
			ID: v.ID, Pool: v.Pool, Bytes: v.Bytes, Used: NotKnown, Inodes: NotKnown, Untaken: NotKnown,
			Condition: health.Facts{Pool: err}.Condition(),
		})
	}
	return away
}

// A survey is what a look at each volume of a pool gave.
type survey struct {
	abnormal map[health.Reason]int
	// unlimited is how many volumes only the end of the disk stops, and untaken what the
	// others may still take of their promises, in bytes.
	unlimited int
	untaken   int64
	// unread has what was told of the volumes that could not be read.
	unread  map[VolumeID]string
	volumes []Surveyed // if they are asked for
}

// add counts a volume, and leaves it to others whether it is remembered.
func (s *survey) add(v Surveyed) {
	if v.Condition.Abnormal {
		s.abnormal[v.Condition.Reason]++
	}
	if v.Untaken == NotKnown {
		s.unlimited++
	} else {
		s.untaken += v.Untaken
	}
}

// surveyAll looks at each volume now and then until ctx ends: so what nobody asks about is
// noticed too.
func (p *Pool) surveyAll(ctx context.Context) {
	select {
	case <-p.looked:
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
	found := &survey{abnormal: make(map[health.Reason]int), unread: make(map[VolumeID]string)}
	for ids := p.after(VolumeID{}, burst, card.exists); len(ids) > 0; ids = p.after(ids[len(ids)-1], burst, card.exists) {
		began := time.Now()
		if err := p.surveySome(ids, found); err != nil {
			return // the look at the pool tells it
		}
		if rest(ctx, min(leisure*time.Since(began), longestLeisure)) != nil {
			return
		}
	}
	if p.state.Load().err == nil {
		p.surveyed.Store(found)
	}
}

func (p *Pool) surveySome(ids []VolumeID, found *survey) error {
	s, err := p.enter()
	if err != nil {
		return err
	}
	defer s.close()
	space, err := s.space()
	if err != nil {
		return err
	}
	l := &listing{pool: p, session: s, space: space}
	for _, id := range ids {
		v, ok := l.survey(id)
		if !ok {
			continue
		}
		found.add(v)
		if v.Condition.Reason == health.ReadFailed {
			p.tellUnread(v, found)
		}
		if p.options.EachVolume {
			found.volumes = append(found.volumes, v)
		}
	}
	return nil
}

// tellUnread tells of a volume that cannot be read, unless the last survey told the same.
func (p *Pool) tellUnread(v Surveyed, found *survey) {
	p.noteError()
	found.unread[v.ID] = v.Condition.Message
	if last := p.surveyed.Load(); last == nil || last.unread[v.ID] != v.Condition.Message {
		p.log.Error(errors.New(v.Condition.Message), "a volume cannot be read", "volume", v.ID.name)
	}
}

// survey looks at one volume, unless a call is making or removing it.
func (l *listing) survey(id VolumeID) (Surveyed, bool) {
	e, d, err := l.session.lookupSettled(id)
	if err != nil {
		c := l.pool.known(id)
		return l.surveyed(id, c, c.facts(nil, err)), c.exists()
	}
	if !e.exists() {
		return Surveyed{}, false
	}
	if d != nil {
		defer func() { _ = d.Close() }() // opened for reading
	}
	c := e.card()
	used, facts := l.session.measure(id, d, e, l.space)
	v := l.surveyed(id, c, facts)
	if l.session.enforced(c) && d != nil && !e.block() {
		v.Used = used.UsedBytes
	}
	if v.Used != NotKnown && used.Inodes > 0 {
		v.Inodes = used.InodesUsed
	}
	v.Untaken = l.session.untaken(id, d, e, used, facts)
	return v, true
}

// untaken is what a volume may still take of its promise, or NotKnown where nothing but the
// end of the disk stops it, as far as anybody can tell.
func (s *session) untaken(id VolumeID, d *dir.Dir, e entry, used dir.Space, facts health.Facts) int64 {
	switch {
	case d == nil:
		return 0
	case e.block():
		return max(0, e.promised()-allocated(id, d))
	case !s.enforced(e.card()), facts.LimitDiffers, facts.IO != nil:
		return NotKnown
	}
	return max(0, e.promised()-used.UsedBytes)
}

// allocated is the space that the file of a block volume has. Users of a thick one can give
// some back, as those of a thin one can. One that cannot be read has none.
func allocated(id VolumeID, d *dir.Dir) int64 {
	disk, err := openDisk(id, d)
	if err != nil {
		return 0
	}
	defer func() { _ = disk.Close() }() // opened for reading
	bytes, err := disk.Allocated()
	if err != nil {
		return 0
	}
	return bytes
}

func (l *listing) surveyed(id VolumeID, c card, facts health.Facts) Surveyed {
	return Surveyed{
		ID: id, Pool: l.pool.config.Name, Bytes: l.pool.volume(id, c, l.space).Bytes,
		Used: NotKnown, Inodes: NotKnown, Untaken: NotKnown, Condition: facts.Condition(),
	}
}

// lookupSettled is lookup for callers that hold no lock: of a volume that a call makes or
// removes at the moment, on whatever node, it answers that there is none.
func (s *session) lookupSettled(id VolumeID) (entry, *dir.Dir, error) {
	e, d, err := s.lookup(id)
	if err != nil || !e.lost() {
		return e, d, err
	}
	unlock, err := s.tryLock(id)
	if errors.Is(err, ErrBusy) {
		return entry{}, nil, nil
	}
	if err != nil {
		return entry{}, nil, err
	}
	defer unlock()
	return s.lookup(id)
}
