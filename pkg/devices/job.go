package devices

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// noteEvery is how often the progress of cleaning is made durable.
var noteEvery = 2 * time.Second

// askEvery is how often it is asked, while a disk that other nodes may see is cleaned, whether it is reserved for this node still.
var askEvery = 5 * time.Second

// checkEvery is how often a device is checked for users while it is cleaned, or waits for its turn: an exclusive open keeps out no program that
// opens the device without one.
var checkEvery = time.Minute

// A job checks one device, and cleans it if that is allowed and needed. Different devices have jobs in parallel.
type job struct {
	number blockdev.Number
	path   string
	// disk is what it is reserved by.
	disk string
	// volume is the released one whose device it is; its name is empty for a device without a volume.
	volume   Volume
	wipe     Wipe
	existing ExistingData
	// partitions is how one without a record is taken.
	partitions Partitions
	// as is what a device without a volume was when the job was started, and foreign that another program may be about to use it.
	as      string
	foreign bool
	// onlyLook is for one that had a user the last time.
	onlyLook bool
	// before is why the device was refused the last time that it was checked.
	before error
	// unsigned says that the device was found without signatures, and empty by which way of cleaning it was found to be clean.
	unsigned bool
	empty    Wipe

	cancel context.CancelFunc
	done   chan struct{}
	result // after done

	mu  sync.Mutex
	now status
}

// A result is what comes of a job.
type result struct {
	// written is what had been written to the device when the job that has cleaned it, or a part, let go of it.
	written string
	err     error
	held    *Held           // of a device that can be offered
	clean   string          // what had been written to that when it was found to be clean
	names   map[string]bool // that volumes of all nodes have
}

// ErrChanged says that the API has changed, so that there is nothing to do before a cache has that too.
var ErrChanged = errors.New("the volumes have changed meanwhile")

func (j *job) refuse(reason Reason, format string, args ...any) error {
	return Problem{Path: j.path, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

func (a *Agent) start(j *job) {
	ctx, cancel := context.WithCancel(a.ctx)
	j.cancel, j.done, j.now.moved = cancel, make(chan struct{}), time.Now()
	a.jobs[j.number] = j
	a.wait.Go(func() {
		defer a.Changed()
		defer close(j.done)
		j.held, j.err = a.run(ctx, j)
	})
}

func (j *job) finished() bool {
	select {
	case <-j.done:
		return true
	default:
		return false
	}
}

func (j *job) stale(wanted *job) bool {
	return j.path != wanted.path || j.volume.Name != wanted.volume.Name || j.volume.UID != wanted.volume.UID || j.volume.ClaimUID != wanted.volume.ClaimUID ||
		!j.wipe.covers(wanted.wipe) || j.existing != wanted.existing || j.partitions != wanted.partitions ||
		errors.Is(j.err, context.Canceled)
}

// A status is how far a job is.
type status struct {
	progress Progress
	moved    time.Time
	waiting  bool // for other devices to be cleaned
}

func (j *job) status() status {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.now
}

func (j *job) wait(waiting bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.now.waiting, j.now.moved = waiting, time.Now()
}

func (j *job) move(p Progress) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.now.progress, j.now.moved = p, time.Now()
}

// run returns the device, held, if it can be offered.
func (a *Agent) run(ctx context.Context, j *job) (_ *Held, err error) {
	record, err := a.Records.Get(j.path)
	if err != nil {
		return nil, err
	}
	released := j.volume.Name != ""
	// Hold would take it for one that was never ours.
	if facts, err := inspect(j.number); err == nil && released && facts.IsPartition() {
		if err := j.isOfVolume(facts, record); err != nil {
			return nil, err
		}
	}
	held, err := Hold(Look{Path: j.path, Number: j.number, Ours: released || record.State == Cleaning, Record: record, Partitions: j.partitions, View: a.View})
	if err != nil {
		return nil, errors.Join(err, a.withdraw(record, err))
	}
	defer func() {
		if err != nil || released {
			err = errors.Join(err, held.Close())
		}
	}()
	if j.onlyLook {
		return nil, j.refuse(New, "it was in use a moment ago: %s", a.waits())
	}
	j.clean = held.Facts.Written()
	if err := errors.Join(j.same(held.Facts), a.knownElsewhere(j, held)); err != nil {
		return nil, err
	}
	may, err := a.permit(ctx, j, held, record)
	if err != nil {
		return nil, err
	}
	if may != nil {
		if err := a.clean(ctx, j, may); err != nil {
			return nil, err
		}
		j.clean = j.written
		if err := held.check(); err != nil { // it took its time
			return nil, err
		}
	}
	if released {
		return nil, nil
	}
	return held, nil
}

// An erasable device is one that may be written to: it is held without any user, nothing on it is still wanted, and the API
// has just said so too. Only permit makes one, and nothing else can be cleaned.
type erasable struct {
	*Held
	// record is what is known of the device, and zero if that is about another one.
	record Record
}

// permit returns the device if it has to be cleaned, and nil if it is clean.
func (a *Agent) permit(ctx context.Context, j *job, held *Held, record Record) (*erasable, error) {
	needed, err := j.needs(ctx, held, record)
	if err != nil {
		return nil, err
	}
	if record, err = record.of(held.Facts); err != nil {
		return nil, err
	}
	if needed || j.volume.Name == "" {
		if err := a.confirm(ctx, j, held.Facts, record); err != nil {
			return nil, err
		}
	}
	if !needed {
		return nil, nil
	}
	return &erasable{held, record}, nil
}

// withdraw has a device that is in use be kept from now on: what its user leaves on it is not the data of the claim that
// was deleted.
func (a *Agent) withdraw(record Record, refused error) error {
	if !inUse(refused) || !record.givenUp() {
		return nil
	}
	record.State = Bound
	return a.Records.Put(record)
}

// knownElsewhere refuses a device that had the data of a claim under another path, unless it is that of its volume.
func (a *Agent) knownElsewhere(j *job, held *Held) error {
	if j.volume.Name == "" && j.existing == Erase {
		return nil
	}
	records, err := a.Records.BoundElsewhere(j.path, held.Facts.Alike)
	if err != nil {
		return err
	}
	for _, record := range records {
		if j.volume.Name == "" {
			return j.refuse(WasBound, "it has the data of the claim %s: it was the device %s of the PersistentVolume %s", record.Claim, record.Path, record.Volume)
		}
		if !record.agrees(j.volume) {
			return record.contradiction(j.volume)
		}
	}
	return nil
}

// needs decides whether the device has to be cleaned, or must not be.
func (j *job) needs(ctx context.Context, held *Held, record Record) (bool, error) {
	if j.volume.Name != "" {
		return j.releasedNeeds(held, record)
	}
	known, err := record.of(held.Facts)
	if err != nil {
		return false, err
	}
	if record.State == Bound && known.State == "" && j.existing != Erase && (record.Bytes == held.Facts.SizeBytes || record.Identity == held.Facts.Identity) {
		return false, j.refuse(WasBound, "it may have the data of the claim %s: it has %d bytes and is %q, and its PersistentVolume %s, which was deleted without being released, had %d bytes and was %q",
			record.Claim, held.Facts.SizeBytes, held.Facts.Identity, record.Volume, record.Bytes, record.Identity)
	}
	record = known
	if len(held.Facts.Partitions) > 0 && !record.permitsErasing(held.Facts) && !record.Erased {
		return false, j.refuse(HasPartitions, "it has %s", partitionsOf(held.Facts))
	}
	return j.unclaimedNeeds(ctx, held, record)
}

// releasedNeeds decides whether the device of a released volume has to be cleaned.
func (j *job) releasedNeeds(held *Held, record Record) (bool, error) {
	if err := j.isOfVolume(held.Facts, record); err != nil {
		return false, err
	}
	done := !record.unknown() && record.ClaimUID == j.volume.ClaimUID && record.State == Clean && record.Bytes == held.Facts.SizeBytes
	return !done || !record.Wipe.covers(j.wipe), nil
}

// isOfVolume refuses what is not known to be the device of the released volume: by the volume, and by the record, which must not contradict it.
func (j *job) isOfVolume(facts blockdev.Facts, record Record) error {
	if err := j.volume.leadsTo(facts, record); err != nil {
		return err
	}
	if record.State != "" && record.Volume == j.volume.Name && !record.is(facts) {
		return j.refuse(OtherDevice, "it has %d bytes and is %q; it had %d bytes and was %q", facts.SizeBytes, facts.Identity, record.Bytes, record.Identity)
	}
	if !record.agrees(j.volume) {
		return record.contradiction(j.volume)
	}
	known, err := j.volume.surely(facts, record)
	if err == nil && !known {
		err = j.volume.notIdentified(facts, record)
	}
	return err
}

// leadsTo refuses another device than that of a volume, as far as that can be known. One that has grown is the same.
func (v Volume) leadsTo(facts blockdev.Facts, record Record) error {
	if v.Identity != "" && facts.Identity != v.Identity {
		return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to %q, and the PersistentVolume was made of %s", v.Path, facts.Identity, v.Identity)}
	}
	if record.Volume == v.Name && record.beginsElsewhere(facts) {
		return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to a partition that begins at byte %d of its disk, and led to one at byte %d when it was recorded", v.Path, facts.Start, record.Start)}
	}
	known := facts.Identity != "" && (v.Identity == facts.Identity || record.Volume == v.Name && record.Identity == facts.Identity)
	if facts.SizeBytes == v.Bytes || known && facts.SizeBytes > v.Bytes {
		return nil
	}
	return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s has %d bytes, and the PersistentVolume has %d", v.Path, facts.SizeBytes, v.Bytes)}
}

// surely says whether a device is known to be that of a volume: by its identity, or for one without any since the node was booted. A
// volume without a record may be of a backup, whose claim is made anew, and has its data.
func (v Volume) surely(facts blockdev.Facts, record Record) (bool, error) {
	if record.Volume != v.Name {
		return false, nil
	}
	if facts.Identity != "" {
		return v.Identity == facts.Identity || record.Identity == facts.Identity, nil
	}
	instance, err := facts.Instance()
	return record.Instance != "" && record.Instance == instance, err
}

// notIdentified is the problem of a released volume whose device was never recorded, or cannot be told from others: another disk may be
// at its path. An administrator says that it is the one, or gives the volume up.
func (v Volume) notIdentified(facts blockdev.Facts, record Record) error {
	letGo := "delete the PersistentVolume, and erase the device by hand if its data may go"
	if record.Volume != v.Name {
		return Problem{v.Name, v.Path, NotIdentified, "the node has no record that a claim had it, as when it was restored from a backup: " + letGo}
	}
	if facts.Identity != "" {
		letGo = fmt.Sprintf("if it is, \"kubectl annotate --overwrite pv %s '%s=%s'\" says so; otherwise %s", v.Name, IdentityAnnotation, facts.Identity, letGo)
	}
	return Problem{v.Name, v.Path, NotIdentified, "no recorded identity shows that it is the device that the PersistentVolume was made of: " + letGo}
}

// unclaimedNeeds decides whether a device without a volume has to be cleaned before it is offered, or must not be.
func (j *job) unclaimedNeeds(ctx context.Context, held *Held, record Record) (bool, error) {
	if record.permitsErasing(held.Facts) {
		return true, nil
	}
	signatures, err := Signatures(ctx, held)
	if err != nil {
		return false, err
	}
	switch {
	case j.existing == Erase && (len(signatures) > 0 || record.State == Bound):
		return true, nil
	case record.State == Bound:
		return false, j.refuse(WasBound, "it has the data of the claim %s; its PersistentVolume %s was deleted without being released", record.Claim, record.Volume)
	case len(signatures) > 0:
		return false, j.refuse(HasSignature, "it has %s", describe(signatures))
	}
	j.unsigned = true
	parts, by, err := record.emptyParts(held.Facts)
	if err != nil {
		return false, err
	}
	empty, err := blank(ctx, held, parts)
	switch {
	case err != nil:
		return false, j.refuse(reasonOf(err), "%v", err)
	case !empty && j.existing != Erase:
		return false, j.refuse(HasData, "it does not read as zeroes, so that it may have data of a kind that is not known")
	}
	if empty {
		j.empty = by
	}
	return !empty || record.State != Clean || record.Bytes != held.Facts.SizeBytes || !record.Wipe.covers(j.wipe), nil
}

// confirm asks the API itself, while the device is held, whether it may be cleaned or offered. The record is zero if there is
// none of the device.
func (a *Agent) confirm(ctx context.Context, j *job, facts blockdev.Facts, record Record) error {
	if err := a.reserve(ctx, j, facts, record); err != nil {
		return err
	}
	if err := a.attached(ctx, j); err != nil {
		return err
	}
	volumes, names, err := a.API.Volumes(ctx)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return j.refuse(NotConfirmed, "%v", err)
	}
	j.names = names
	released := false
	for _, v := range volumes {
		if v.Name == j.volume.Name && v.UID == j.volume.UID && v.Released && v.ClaimUID == j.volume.ClaimUID && !v.Foreign && !v.Elsewhere {
			released = true
			continue
		}
		if err := a.conflict(j, v, facts, record); err != nil {
			return err
		}
	}
	if released != (j.volume.Name != "") {
		return ErrChanged
	}
	return nil
}

// attached refuses a device while a volume of another driver is being attached to the node: it may be that.
func (a *Agent) attached(ctx context.Context, j *job) error {
	if !j.foreign {
		return nil
	}
	volume, err := a.API.Attaching(ctx)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return j.refuse(NotConfirmed, "%v", err)
	case volume != "":
		return j.refuse(Attaching, "it may be the volume %s, which is being attached to the node or detached", volume)
	}
	return nil
}

// conflict refuses a device that is, or may be, that of another volume than the job's.
func (a *Agent) conflict(j *job, v Volume, facts blockdev.Facts, record Record) error {
	switch {
	case v.Elsewhere && shared(v.Identity) && sameDisk(v.Identity, facts.Alike):
		return j.refuse(Twice, "it is the same disk, %s, as %s of the PersistentVolume %s of another node", facts.Alike, v.Path, v.Name)
	case v.Elsewhere:
		return nil
	}
	number, err := a.View.At(v.Path)
	same, overlaps := number == j.number, slices.Contains(facts.Overlapping(), number)
	switch {
	case err == nil && (same || overlaps) && v.Foreign:
		return j.refuse(OfOthers, "it is, or has blocks of, %s of the PersistentVolume %s, which does not have the label of this node's volumes", v.Path, v.Name)
	case err == nil && (same || overlaps):
		return ErrChanged
	case v.Foreign:
		return nil
	case sameDisk(v.Identity, facts.Alike):
		return j.refuse(MayBeMissing, "it is the disk of the PersistentVolume %s, %s, whose path %s does not lead to it any more", v.Name, v.Identity, v.Path)
	}
	known := record.State != "" || j.volume.Identity != "" && j.volume.Identity == facts.Identity
	if known || v.Bytes != facts.SizeBytes {
		return nil
	}
	missing, err := a.missing(v)
	if err == nil && missing {
		err = j.refuse(MayBeMissing, "it may be the disk of the PersistentVolume %s, whose path %s does not lead to it any more: it is as large, and there is no record of it", v.Name, v.Path)
	}
	return err
}

// missing says whether the path of a volume leads to its device no more.
func (a *Agent) missing(v Volume) (bool, error) {
	record, err := a.Records.Get(v.Path)
	if err != nil {
		return false, err
	}
	number, gone := blockdev.At(v.Path)
	if gone == nil {
		var facts blockdev.Facts
		if facts, gone = inspect(number); gone == nil {
			gone = v.leadsTo(facts, record)
			if record.State != "" && record.Volume == v.Name && !record.is(facts) {
				return true, nil
			}
		}
	}
	return gone != nil, nil
}

// clean cleans a device, from where an earlier agent stopped: the record says so before anything is written, as far as it came from time
// to time, and in the end that the device is clean.
func (a *Agent) clean(ctx context.Context, j *job, held *erasable) error {
	if held.record.State == Cleaning && held.record.Wipe.covers(j.wipe) {
		j.wipe = held.record.Wipe // as was promised
	}
	next, err := j.recordToClean(held)
	if err != nil {
		return err
	}
	if err := a.Records.Put(next); err != nil {
		return err
	}
	defer j.noteWritten(held)
	log := a.Log.WithValues("device", j.path, "volume", j.volume.Name, "wipe", j.wipe)
	log.Info("Cleaning a device", "bytes", held.Facts.SizeBytes, "doneBytes", next.Done)
	started := time.Now()
	c := cleaning{agent: a, job: j, held: held, record: next, log: log, noted: started, asked: started, checked: started, counted: next.Done}
	w := wiper{device: held, wipe: j.wipe, turn: c.turn, erased: c.noteErased, checkpoint: c.noteProgress}
	if err := w.run(ctx, next.Done); err != nil {
		return err
	}
	if err := a.forgetElsewhere(j.path, held.Facts.Identity); err != nil {
		return err
	}
	log.Info("Device is clean", "took", time.Since(started).Round(time.Millisecond).String())
	c.record.State, c.record.Done, c.record.Erased = Clean, 0, false
	return a.Records.Put(c.record)
}

// noteWritten counts what is in the page cache too. What cannot be written counts as another program's when it is, one day.
func (j *job) noteWritten(held *erasable) {
	_ = held.Sync()
	j.written = held.Facts.Written()
}

// A cleaning is one that is under way.
type cleaning struct {
	agent  *Agent
	job    *job
	held   *erasable
	record Record // as it was written last
	log    logr.Logger
	// noted is when its progress was written last, asked when the API was, and checked when it was looked for users.
	noted, asked, checked time.Time
	counted               int64 // how far it is counted, in bytes
}

// turn waits for the turn of the device, and makes sure that it may still be cleaned.
func (c *cleaning) turn(ctx context.Context) (done func(), err error) {
	if done, err = c.agent.turn(ctx, c.job); err != nil {
		return nil, err
	}
	if err := c.stillMay(ctx); err != nil {
		done()
		return nil, err
	}
	return done, nil
}

// stillMay looks for users of the device, and asks the API, if it is time for that.
func (c *cleaning) stillMay(ctx context.Context) error {
	if time.Since(c.checked) >= checkEvery {
		if err := c.held.check(); err != nil {
			return err
		}
		c.checked = time.Now()
	}
	if time.Since(c.asked) < askEvery {
		return nil
	}
	if err := c.agent.reserve(ctx, c.job, c.held.Facts, c.record); err != nil {
		return err
	}
	c.asked = time.Now()
	return nil
}

// noteErased notes that what a claim left has no signature any more.
func (c *cleaning) noteErased() error {
	c.record.Erased, c.record.Seen = true, seen(c.held.Facts)
	return c.agent.Records.Put(c.record)
}

// noteProgress notes now and then how far it is, after what was written is on the device.
func (c *cleaning) noteProgress(p Progress) error {
	c.job.move(p)
	c.agent.Wiped(p.Done - c.counted)
	c.counted = p.Done
	if p.Done < p.Total && time.Since(c.noted) < noteEvery {
		return nil
	}
	if err := c.held.Sync(); err != nil {
		return err
	}
	c.noted, c.record.Done = time.Now(), p.Done
	c.log.Info("Cleaning a device", "progress", p.String())
	c.agent.Changed()
	return c.agent.Records.Put(c.record)
}

// recordToClean is the record of a device that is about to be cleaned. It has what an earlier agent has done of the same, and whose data may
// go, also the next time, if this is interrupted.
func (j *job) recordToClean(held *erasable) (next Record, err error) {
	before, facts := held.record, held.Facts
	next = Record{Path: j.path, Bytes: facts.SizeBytes, Identity: facts.Identity, Alike: alikeOf(facts), Start: facts.Start, State: Cleaning,
		Volume: j.volume.Name, VolumeUID: j.volume.UID, ClaimUID: j.volume.ClaimUID, Claim: j.volume.Claim, Wipe: j.wipe, Erased: j.unsigned, Empty: j.empty, Seen: seen(facts)}
	if j.volume.Name == "" && before.State == Cleaning {
		next.Volume, next.VolumeUID, next.ClaimUID, next.Claim = before.Volume, before.VolumeUID, before.ClaimUID, before.Claim
	}
	if before.State == Cleaning && before.Wipe == j.wipe && before.Bytes == next.Bytes && (j.volume.Name == "" || before.ClaimUID == j.volume.ClaimUID) {
		next.Done, next.Erased = before.Done, before.Erased || j.unsigned
	}
	if next.Identity == "" {
		next.Instance, err = facts.Instance()
	}
	return next, err
}

// forgetElsewhere notes that the data is gone which a device had under other paths. What becomes of it then is not noted
// there, so that it is not said to be clean.
func (a *Agent) forgetElsewhere(path, identity string) error {
	records, err := a.Records.BoundElsewhere(path, identity)
	for _, record := range records {
		record.State, record.ClaimUID, record.Claim = Offered, "", ""
		err = errors.Join(err, a.Records.Put(record))
	}
	return err
}

// detail is a problem without the rest of its report.
func detail(err error) string {
	if p, ok := errors.AsType[Problem](err); ok {
		return p.Detail
	}
	return err.Error()
}
