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

// noteEvery is how often the progress of cleaning is said.
var noteEvery = 2 * time.Second

// askEvery is how often it is asked, while a disk that other nodes may see is cleaned, whether it is reserved for this node still.
var askEvery = 5 * time.Second

// checkEvery is how often a device is checked for users, and the API asked for volumes of it, while it is cleaned, or waits for its turn: an
// exclusive open keeps out no program that opens the device without one.
var checkEvery = time.Minute

// A job checks one device, and cleans it if that is allowed and needed. Different devices have jobs in parallel.
type job struct {
	number blockdev.Number
	path   string
	// disk is what it is reserved by.
	disk string
	// volume is the released one whose device it is; its name is empty for a device without a volume.
	volume Volume
	wipe   Wipe
	// partitions is how one without a record is taken.
	partitions Partitions
	// as is what a device without a volume was when the job was started, and foreign that another program may be about to use it.
	as      string
	foreign bool
	// onlyLook is for one that had a user the last time.
	onlyLook bool
	// before is why the device was refused the last time that it was checked.
	before error

	// wanted says that the pass which is under way, or was the last, has asked for it. All others end.
	wanted bool
	cancel context.CancelFunc
	done   chan struct{}
	result // after done

	mu  sync.Mutex
	now status
}

// A result is what comes of a job.
type result struct {
	err   error
	held  *Held           // of a device that can be offered
	clean string          // what had been written to the device when it was found to be clean; empty if it may be more than at the end of its cleaning
	names map[string]bool // that volumes of all nodes have
	// reserves says that it has asked for its disk to be reserved, which it does when it has found no reason of its own to refuse it.
	reserves bool
}

// ErrChanged says that the API has changed, so that there is nothing to do before a cache has that too.
var ErrChanged = errors.New("the volumes have changed meanwhile")

func (j *job) refuse(reason Reason, format string, args ...any) error {
	return Problem{Path: j.path, Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

func (a *Agent) start(j *job) {
	ctx, cancel := context.WithCancel(a.ctx)
	j.cancel, j.done, j.now.moved = cancel, make(chan struct{}), time.Now()
	j.wanted, a.jobs[j.number] = true, j
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

// isFor says whether it is that of a volume, and of the claim that this is of now.
func (j *job) isFor(v Volume) bool {
	return j.volume.Name == v.Name && j.volume.UID == v.UID && j.volume.ClaimUID == v.ClaimUID
}

func (j *job) stale(wanted *job) bool {
	return j.path != wanted.path || !j.isFor(wanted.volume) ||
		!j.wipe.covers(wanted.wipe) || j.partitions != wanted.partitions ||
		errors.Is(j.err, context.Canceled)
}

// A status is how far a job is.
type status struct {
	progress Progress
	moved    time.Time
	waiting  bool // for other devices to be cleaned, or for the API
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
	held, err := Hold(Look{Path: j.path, Number: j.number, Ours: released, Record: record, Partitions: j.partitions, View: a.View})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil || released {
			err = errors.Join(err, held.Close())
		}
	}()
	if !released {
		if err := a.mayOffer(ctx, j, held, record); err != nil {
			return nil, err
		}
		return held, nil
	}
	may, err := a.permit(ctx, j, held, record)
	if err != nil || may == nil {
		return nil, err
	}
	if err := errors.Join(a.clean(ctx, j, may), may.writer.Close()); err != nil {
		return nil, err
	}
	return nil, held.check() // it took its time
}

// mayOffer refuses a device without a volume that must not become one. Nothing is written to it.
func (a *Agent) mayOffer(ctx context.Context, j *job, held *Held, record Record) error {
	if j.onlyLook {
		return j.refuse(New, "it was in use a moment ago: %s", a.waits())
	}
	j.clean = held.Facts.Written()
	if err := errors.Join(j.same(held.Facts), a.knownElsewhere(j, held)); err != nil {
		return err
	}
	known, err := record.of(held.Facts)
	if err != nil {
		return err
	}
	if err := j.empty(ctx, held, record, known); err != nil {
		return err
	}
	return a.confirm(ctx, j, held.Facts, known)
}

// An erasable device is one that may be written to: that of a volume that a claim had and that is released, held without any user. The API
// has just said so too. Only permit makes one, and opens a device for writing, and nothing else can be cleaned.
type erasable struct {
	*Held
	writer *blockdev.Writer
	// record is written before the device is.
	record Record
	// done is what an earlier agent has done of the same, in bytes.
	done int64
}

// permit returns the device of a released volume if it has to be cleaned, and nil if it is clean.
func (a *Agent) permit(ctx context.Context, j *job, held *Held, record Record) (*erasable, error) {
	if err := errors.Join(a.knownElsewhere(j, held), j.isOfVolume(held.Facts, record)); err != nil {
		return nil, err
	}
	written := held.Facts.Written()
	if record.State == Clean && record.ClaimUID == j.volume.ClaimUID && record.Bytes == held.Facts.SizeBytes && record.Wipe.covers(j.wipe) &&
		(record.Left == "" || record.Left == leftAs(held.Facts)) {
		if record.Left != "" {
			j.clean = written
		}
		return nil, nil
	}
	before, err := record.of(held.Facts)
	if err != nil {
		return nil, err
	}
	if err := a.confirm(ctx, j, held.Facts, before); err != nil {
		return nil, err
	}
	// The API may have taken its time.
	if err := held.check(); err != nil {
		return nil, err
	}
	next, err := recordNow(j.path, held.Facts)
	if err != nil {
		return nil, err
	}
	next.State, next.Wipe = Cleaning, j.wipe
	next.Volume, next.VolumeUID, next.ClaimUID, next.Claim = j.volume.Name, j.volume.UID, j.volume.ClaimUID, j.volume.Claim
	var done int64
	if before.State == Cleaning && before.ClaimUID == next.ClaimUID && before.Bytes == next.Bytes && before.Wipe != "" && before.Wipe.covers(j.wipe) {
		next.Wipe = before.Wipe // as was promised
		if before.Left != "" && before.Left == leftAs(held.Facts) {
			done = before.Done
		}
	}
	writer, err := held.ForWriting()
	if err != nil {
		return nil, j.refuse(reasonOf(err), "%v", err)
	}
	return &erasable{held, writer, next, done}, nil
}

// knownElsewhere refuses a device that had the data of a claim under another path, unless it is that of its volume.
func (a *Agent) knownElsewhere(j *job, held *Held) error {
	records, err := a.Records.BoundElsewhere(j.path, held.Facts.Alike)
	if err != nil {
		return err
	}
	for _, record := range records {
		if j.volume.Name == "" {
			return j.wasBound(record, "it has")
		}
		if !record.agrees(j.volume) {
			return record.contradiction(j.volume)
		}
	}
	return nil
}

// wasBound refuses a device without a volume for the data of a claim.
func (j *job) wasBound(record Record, has string) error {
	return j.refuse(WasBound, "%s data of the claim %s: it was the device %s of the PersistentVolume %s, which was deleted before it was clean; %s, and remove its record %s",
		has, record.Claim, record.Path, record.Volume, j.byHand(), record.file())
}

// byHand is how an administrator gives what is on a device.
func (j *job) byHand() string {
	return fmt.Sprintf("to offer it without that, erase it (blkdiscard --zeroout %s)", j.path)
}

// empty refuses a device without a volume that may have anything on it. The record is what there is of its path, and known is that if it is
// surely about this device.
func (j *job) empty(ctx context.Context, held *Held, record, known Record) error {
	facts := held.Facts
	record = record.asOf(facts)
	may := record.State == Bound && (record.Bytes == facts.SizeBytes || record.Identity == facts.Identity) || record.State == Cleaning && record.is(facts)
	switch {
	case known.State == Bound, known.State == Cleaning:
		return j.wasBound(record, "it has")
	case may:
		return j.wasBound(record, "it may have")
	case record.is(facts) && record.Wipe != "" && !record.Wipe.covers(j.wipe):
		return j.refuse(HasData, "what earlier claims left on it was cleaned with %s %s, and not %s; %s, and remove its record %s", KeyWipe, record.Wipe, j.wipe, j.byHand(), file(j.path))
	}
	signatures, err := Signatures(ctx, held)
	if err != nil {
		return err
	}
	if len(signatures) > 0 {
		return j.refuse(HasSignature, "it has %s; %s", describe(signatures), j.byHand())
	}
	empty, err := blank(ctx, held, known.parts(facts.SizeBytes))
	if err == nil && !empty {
		err = j.refuse(HasData, "it does not read as zeroes, so that it may have data of a kind that is not known; %s", j.byHand())
	}
	return err
}

// isOfVolume refuses what is not known to be the device of the released volume: by the volume, and by the record, which must not contradict it.
func (j *job) isOfVolume(facts blockdev.Facts, record Record) error {
	if err := j.volume.leadsTo(facts, record); err != nil {
		return err
	}
	if record.State != "" && record.Volume == j.volume.Name && !record.is(facts) {
		return j.refuse(OtherDevice, "it has %d bytes and is %q; it had %d bytes and was %q", facts.SizeBytes, facts.Alike, record.Bytes, record.alike())
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
	v, record = v.asOf(facts), record.asOf(facts)
	if v.Identity != "" && facts.Identity != v.Identity {
		return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to %q, and the PersistentVolume was made of %s", v.Path, facts.Alike, v.Identity)}
	}
	if record.Volume == v.Name && record.beginsElsewhere(facts) {
		return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to a partition that begins at byte %d of its disk, and led to one at byte %d when it was recorded", v.Path, facts.Start, record.Start)}
	}
	known := facts.Identity != "" && (v.Identity == facts.Identity || record.Volume == v.Name && record.Identity == facts.Identity) ||
		record.Volume == v.Name && record.isAttached(facts)
	if facts.SizeBytes == v.Bytes || known && facts.SizeBytes > v.Bytes {
		return nil
	}
	return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s has %d bytes, and the PersistentVolume has %d", v.Path, facts.SizeBytes, v.Bytes)}
}

// surely says whether a device is known to be that of a volume: by its identity, or for one without any since the node was booted. A
// volume without a record may be of a backup, whose claim is made anew, and has its data.
func (v Volume) surely(facts blockdev.Facts, record Record) (bool, error) {
	if !record.isSurelyOf(v) {
		return false, nil
	}
	if facts.Identity != "" {
		return v.Identity == facts.Identity || record.Identity == facts.Identity, nil
	}
	return record.isSurely(facts)
}

// notIdentified is the problem of a released volume whose device was never recorded, or cannot be told from others: another disk may be
// at its path. An administrator says that it is the one, or gives the volume up.
func (v Volume) notIdentified(facts blockdev.Facts, record Record) error {
	letGo := "delete the PersistentVolume, and erase the device by hand if its data may go"
	if !record.isSurelyOf(v) {
		return Problem{v.Name, v.Path, NotIdentified, "the node has no record that a claim had it, as when it was restored from a backup: " + letGo}
	}
	if facts.Identity != "" {
		letGo = fmt.Sprintf("if it is, \"kubectl annotate --overwrite pv %s '%s=%s'\" says so; otherwise %s", v.Name, IdentityAnnotation, facts.Identity, letGo)
	}
	return Problem{v.Name, v.Path, NotIdentified, "no recorded identity shows that it is the device that the PersistentVolume was made of: " + letGo}
}

// confirm asks the API itself, while the device is held, whether it may be cleaned or offered. The record is zero if there is
// none of the device.
func (a *Agent) confirm(ctx context.Context, j *job, facts blockdev.Facts, record Record) error {
	j.wait(true) // for the API, and not for the device
	defer j.wait(false)
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

// leftAs tells a device to which nothing was written since from all others; empty if that cannot be known.
func leftAs(facts blockdev.Facts) string {
	instance, err := facts.Instance()
	written := facts.Written()
	if err != nil || instance == "" || written == "" {
		return ""
	}
	return instance + " " + written
}

// clean cleans a device: the record says so before anything is written, and in the end that the device is clean. It goes on only where it was
// ended for no reason of the device, and nothing was written to that since.
func (a *Agent) clean(ctx context.Context, j *job, held *erasable) error {
	if err := a.Records.Put(held.record); err != nil {
		return err
	}
	wipe := held.record.Wipe
	log := a.Log.WithValues("device", j.path, "volume", j.volume.Name, "wipe", wipe)
	log.Info("Cleaning a device", "bytes", held.Facts.SizeBytes, "doneBytes", held.done)
	started := time.Now()
	c := cleaning{agent: a, job: j, held: held, record: held.record, log: log, noted: started, asked: started, checked: started, done: held.done}
	w := wiper{device: held, wipe: wipe, turn: c.turn, stepped: c.noteProgress}
	err := w.run(ctx, held.done)
	// A job that is cancelled alone may have no volume any more, and its path another.
	if reason := reasonOf(err); errors.Is(err, context.Canceled) && a.ctx.Err() != nil || reason == NotConfirmed || reason == Attaching {
		return errors.Join(err, c.leave())
	}
	if err == nil {
		err = errors.Join(held.writer.Sync(), held.check()) // it took its time
	}
	if err != nil {
		return err
	}
	log.Info("Device is clean", "took", time.Since(started).Round(time.Millisecond).String())
	j.clean = held.Facts.Written()
	c.record.State, c.record.Left = Clean, leftAs(held.Facts)
	return a.Records.Put(c.record)
}

// A cleaning is one that is under way.
type cleaning struct {
	agent  *Agent
	job    *job
	held   *erasable
	record Record // as it was written last
	log    logr.Logger
	// noted is when its progress was logged last, asked when the API was, and checked when it was looked for users.
	noted, asked, checked time.Time
	done                  int64 // how far it is, in bytes
}

// leave notes for the next try how far it is, of a device that has no user, after what was written is on it.
func (c *cleaning) leave() error {
	if err := errors.Join(c.held.check(), c.held.writer.Sync()); err != nil {
		return err
	}
	c.record.Done, c.record.Left = c.done, leftAs(c.held.Facts)
	if c.record.Left == "" {
		return nil
	}
	return c.agent.Records.Put(c.record)
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

// stillMay asks the API, and looks for users of the device, if it is time for that.
func (c *cleaning) stillMay(ctx context.Context) error {
	if time.Since(c.checked) >= checkEvery {
		if err := c.agent.confirm(ctx, c.job, c.held.Facts, c.record); err != nil {
			return err
		}
		if err := c.held.check(); err != nil { // the API may have taken its time
			return err
		}
		c.checked, c.asked = time.Now(), time.Now()
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

// noteProgress says now and then how far it is.
func (c *cleaning) noteProgress(p Progress) {
	c.job.move(p)
	c.agent.Wiped(p.Done - c.done)
	c.done = p.Done
	if p.Done < p.Total && time.Since(c.noted) < noteEvery {
		return
	}
	c.noted = time.Now()
	c.log.Info("Cleaning a device", "progress", p.String())
	c.agent.Changed()
}

// detail is a problem without the rest of its report.
func detail(err error) string {
	if p, ok := errors.AsType[Problem](err); ok {
		return p.Detail
	}
	return err.Error()
}
