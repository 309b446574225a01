package devices

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// A Volume is the PersistentVolume of a device, as the API has it.
type Volume struct {
	// UID distinguishes a volume from earlier and later ones of its name.
	Name, UID string
	// Path is the device as it was found when the volume was made.
	Path  string
	Bytes int64
	// Released says that a claim had it and has been deleted, so that the data may go. Used says that a claim has it,
	// or is about to, and Bound that it has.
	Released, Used, Bound bool
	// ClaimUID and Claim are of the claim that has or had it.
	ClaimUID, Claim string
	// Wipe is how it is cleaned at least, and empty if any way will do.
	Wipe Wipe
	// Deleted says that it is being deleted, after its claim: who deletes a volume has its device, so that it is as one that a claim has.
	Deleted bool
	// Foreign is a volume of the node that another client has made, and Elsewhere one of another node, whose path says nothing
	// here: Pass gets none of either.
	Foreign, Elsewhere bool
	// Identity is that of the device it was made of, and empty if that is not known. Unidentified says that the device had none.
	Identity     string
	Unidentified bool
}

// API is asked right before a device is overwritten or offered: no cache may answer.
type API interface {
	// Volumes are those of the node, whichever client has made them, those of other nodes that have an identity, and the names that
	// volumes of all nodes have.
	Volumes(ctx context.Context) (volumes []Volume, names map[string]bool, err error)
	// Attaching names a volume that is being attached to the node, or detached, and is empty if none is.
	Attaching(ctx context.Context) (volume string, err error)
	// Reserve reserves a disk for this node, unless a node has it already, and answers which one has it.
	Reserve(ctx context.Context, disk string) (node string, err error)
}

// An Offer is a clean device that no volume has. It is held until Offered is called.
type Offer struct {
	Name, Path, Identity string
	Bytes                int64
	number               blockdev.Number
}

// A Known is what was found of the device of a volume, and what the volume does not say.
type Known struct {
	Name, Identity string
	Bytes          int64
}

// A Wiping is a device that is being cleaned.
type Wiping struct {
	// Volume is empty for a device without one.
	Volume, Path string
	Progress     Progress
}

// A Report is what a pass over the devices of a node has found.
type Report struct {
	// Offers are to become volumes.
	Offers []Offer
	// Cleaned are the names of released volumes whose device is clean, to be deleted.
	Cleaned []string
	// HalfClean are the names of volumes without a claim whose device is not clean yet, to be deleted.
	HalfClean []string
	// Known are volumes to be brought up to date.
	Known []Known
	// Wiping are the devices that are not ready yet, those that hang among them.
	Wiping   []Wiping
	Problems []Problem
	// GivenUp are disks that may be reserved for this node, and that it does not use any more, and NotReserved those with data of claims that
	// were not reserved for it: Unreserved and Reserve have to follow.
	GivenUp, NotReserved []string
	// Available is how many volumes have their device.
	Available int
	// Settles is when the next device that is new will have been unchanged for long enough; zero if there is none.
	Settles time.Time
	// Directories are those to watch for new devices.
	Directories []string
}

// Options are what an agent needs.
type Options struct {
	Node    string
	Records *Records
	API     API
	Log     logr.Logger
	// Changed is called when a pass would find something new. It must not block.
	Changed func()
	// View is what is seen of the users of devices.
	View blockdev.View
	// AtOnce is how many devices are written to at once; 0 means 4.
	AtOnce int
	// Settle is how long a device without a volume has to be unused and unchanged before it is offered, from the start of this agent on: it may be one that another program has just attached.
	Settle time.Duration
	// Now is time.Now if it is nil.
	Now func() time.Time
	// Wiped is called with the bytes of each step.
	Wiped func(bytes int64)
}

// An Agent checks, offers and cleans the devices of a node.
type Agent struct {
	Options
	ctx    context.Context
	cancel context.CancelFunc
	jobs   map[blockdev.Number]*job
	wait   sync.WaitGroup
	turns  chan struct{}
	// sightings are Pass's.
	sightings map[blockdev.Number]sighting

	// others are the nodes that have reserved a disk on which this one has data, by disk. It is of Pass and Reserve.
	others map[string]string

	mu sync.Mutex
	// reserved are the disks that may be reserved for this node: as the API had them last, and since.
	reserved map[string]bool
}

// NewAgent makes an agent. Close ends what it does.
func NewAgent(o Options) *Agent {
	ctx, cancel := context.WithCancel(context.Background())
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Agent{Options: o, sightings: make(map[blockdev.Number]sighting), ctx: ctx, cancel: cancel, jobs: make(map[blockdev.Number]*job), turns: make(chan struct{}, cmp.Or(o.AtOnce, 4)),
		others: make(map[string]string), reserved: make(map[string]bool)}
}

// Close stops all cleaning at its next step and waits for that. The next agent continues it.
func (a *Agent) Close() {
	a.cancel()
	a.wait.Wait()
	for number := range a.jobs {
		a.drop(number)
	}
}

// turn has a job wait until few enough devices are written to. One that does not answer keeps no other waiting.
func (a *Agent) turn(ctx context.Context, j *job) (done func(), err error) {
	j.wait(true)
	defer j.wait(false)
	select {
	case a.turns <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	end := sync.OnceFunc(func() { <-a.turns })
	late := time.AfterFunc(hangs, end)
	return func() { late.Stop(); end() }, nil
}

// hangs is how long a device may take to answer.
const hangs = 30 * time.Second

// A Request is what a pass works on.
type Request struct {
	// Volumes are all of the node.
	Volumes []Volume
	// Wipe is how released volumes are cleaned.
	Wipe Wipe
	// Offer says which other devices are offered; nil offers none.
	Offer *Config
	// Frozen has nothing be cleaned or offered: volumes are compared with their devices, and that is noted.
	Frozen bool
	// Retry has devices checked again that were refused.
	Retry bool
	// Reserved are the disks that are reserved for the node; nil if that is not known.
	Reserved []string
}

type pass struct {
	*Agent
	Request
	// owners are the volumes of a device, by its number.
	owners map[blockdev.Number][]Volume
	// disks are the volumes of a disk, by what diskOf says.
	disks map[string][]Volume
	// names and paths are those of the volumes, and alike is what the devices at the paths are known by, alone or with others.
	names, paths map[string]bool
	alike        map[string]string
	// doubted are the disks of devices without a volume whose record says that they have data, or cannot be read, with the path.
	doubted map[string]string
	// remains are the disks of those that were cleaned: what earlier claims left may be on them, and other nodes do not know how much that is.
	remains map[string]bool
	report  Report
}

// Pass compares devices and volumes, starts what takes time, and returns what is known. It does not wait for any
// device. It must not be called by two at once.
func (a *Agent) Pass(r Request) Report {
	p := &pass{Agent: a, Request: r, owners: make(map[blockdev.Number][]Volume), disks: make(map[string][]Volume),
		names: make(map[string]bool), paths: make(map[string]bool), alike: make(map[string]string), doubted: make(map[string]string), remains: make(map[string]bool)}
	for _, v := range r.Volumes {
		p.names[v.Name], p.paths[v.Path] = true, true
		if number, err := blockdev.At(v.Path); err == nil {
			p.owners[number] = append(p.owners[number], v)
			if facts, err := inspect(number); err == nil {
				p.disks[diskOf(facts)] = append(p.disks[diskOf(facts)], v)
				p.alike[v.Path] = facts.Alike
			}
		}
	}
	for _, j := range a.jobs {
		j.wanted = false
	}
	seen := make(map[blockdev.Number]bool)
	for _, v := range r.Volumes {
		p.volume(v, seen)
	}
	if r.Offer != nil && !r.Frozen {
		p.scan(seen)
	}
	p.forget(seen)
	for number, j := range a.jobs {
		if !j.wanted {
			j.cancel()
			if j.finished() {
				a.drop(number)
			}
		}
	}
	p.reservations()
	return p.report
}

// Offering asks the API once more whether a device may become a volume, looks at that again, and notes that it may have become one. Offered has
// to follow, whatever comes of it.
func (a *Agent) Offering(ctx context.Context, o Offer) error {
	j := a.jobs[o.number]
	if j == nil || j.held == nil {
		return ErrChanged // by an earlier Offered
	}
	record, err := a.Records.Get(o.Path)
	if err != nil {
		return err
	}
	if record, err = record.of(j.held.Facts); err != nil {
		return err
	}
	if err := a.confirm(ctx, j, j.held.Facts, record); err != nil {
		return err
	}
	// Time has passed, and an exclusive open keeps out no program that opens the device without one.
	if err := errors.Join(j.held.check(), j.asClean()); err != nil {
		return err
	}
	next, err := recordNow(o.Path, j.held.Facts)
	if err != nil {
		return err
	}
	next.State, next.Volume = Offered, o.Name
	next.Wipe = record.wipeOf(next.Bytes)
	return a.Records.Put(next)
}

// Offered lets go of a device after its volume was made, whose UID it notes, or was not.
func (a *Agent) Offered(o Offer, uid string, failed error) error {
	j := a.jobs[o.number]
	if j == nil || j.held == nil {
		return nil
	}
	if failed == nil {
		a.had(o.number)
		a.drop(o.number)
		record, err := a.Records.Get(o.Path)
		if err == nil && record.State == Offered && record.Volume == o.Name {
			record.VolumeUID = uid
			err = a.Records.Put(record)
		}
		return err
	}
	// It is offered again when refused devices are checked again.
	j.err = failed
	if _, known := errors.AsType[Problem](failed); !known && !errors.Is(failed, ErrChanged) {
		j.err = Problem{Path: o.Path, Reason: NotOffered, Detail: failed.Error()}
	}
	err := j.held.Close()
	j.held = nil
	return err
}

func (p *pass) problem(volume, path string, reason Reason, format string, args ...any) {
	p.report.Problems = append(p.report.Problems, Problem{volume, path, reason, fmt.Sprintf(format, args...)})
}

// fail reports an error, of which the reason is said once.
func (p *pass) fail(volume, path string, err error) {
	p.problem(volume, path, reasonOf(err), "%s", detail(err))
}

func (p *pass) volume(v Volume, seen map[blockdev.Number]bool) {
	number, err := blockdev.At(v.Path)
	if err != nil {
		p.fail(v.Name, v.Path, err)
		return
	}
	seen[number] = true
	if owners := p.owners[number]; len(owners) > 1 {
		other := owners[0]
		if other.Name == v.Name {
			other = owners[1]
		}
		p.problem(v.Name, v.Path, Twice, "it is the same device as %s of the PersistentVolume %s", other.Path, other.Name)
		return
	}
	if j := p.jobs[number]; j != nil && (!v.Released || !j.isFor(v) || p.Frozen) {
		// It is not to be cleaned any more, or was just offered.
		j.cancel()
		if !j.finished() {
			p.report.Wiping = append(p.report.Wiping, Wiping{j.volume.Name, j.path, j.status().progress})
			return
		}
		p.drop(number)
	}
	if v.Released {
		if !p.Frozen {
			p.released(v, number)
		}
		return
	}
	half, err := p.halfClean(v)
	if half {
		return
	}
	if err == nil {
		err = p.note(v, number)
	}
	if err != nil {
		p.fail(v.Name, v.Path, err)
		return
	}
	p.report.Available++
	if !v.Deleted { // its device may have been cleaned, and written to since
		p.had(number)
	}
}

// halfClean has a volume be deleted that is available, as when its claim was taken from it by hand, while its device was
// not clean: the next claim would get what is left of the data. One that a claim has got already is that claim's.
func (p *pass) halfClean(v Volume) (bool, error) {
	record, err := p.Records.Get(v.Path)
	if err != nil || record.State != Cleaning || v.Deleted || !record.mayBeOf(v) {
		return false, err
	}
	text := "its device was being cleaned when its claim was taken from it"
	if v.Used {
		p.problem(v.Name, v.Path, HalfClean, "%s, and the claim %s has got it: what is left of the earlier data can be read by it", text, v.Claim)
		return false, nil
	}
	p.problem(v.Name, v.Path, HalfClean, "%s: it is deleted, so that no claim gets what is left of the data", text)
	p.report.HalfClean = append(p.report.HalfClean, v.Name)
	return true, nil
}

// released has the device of a volume cleaned, unless it shares its blocks with another one's.
func (p *pass) released(v Volume, number blockdev.Number) {
	facts, err := inspect(number)
	if err != nil {
		p.fail(v.Name, v.Path, err)
		return
	}
	for _, overlapping := range facts.Overlapping() {
		if owners := p.owners[overlapping]; len(owners) > 0 {
			p.problem(v.Name, v.Path, Twice, "its blocks are also those of %s of the PersistentVolume %s: one is the disk of the other; delete one of the two PersistentVolumes",
				owners[0].Path, owners[0].Name)
			return
		}
	}
	wanted := &job{volume: v, path: v.Path, wipe: p.Wipe, disk: reservable(facts.Alike)}
	if v.Wipe != "" && v.Wipe.covers(p.Wipe) {
		wanted.wipe = v.Wipe
	}
	if p.Offer != nil {
		wanted.partitions = p.Offer.Partitions
	}
	p.follow(number, wanted)
}

// note keeps the record of a volume that is available or bound.
func (p *pass) note(v Volume, number blockdev.Number) error {
	facts, err := inspect(number)
	if err != nil {
		return err
	}
	record, err := p.Records.Get(v.Path)
	if err != nil {
		return err
	}
	v, record = v.asOf(facts), record.asOf(facts)
	if other := p.twin(v, facts); other.Name != "" {
		return Problem{v.Name, v.Path, Twice, fmt.Sprintf("it is the same disk, %s, as %s of the PersistentVolume %s", facts.Alike, other.Path, other.Name)}
	}
	if err := v.leadsTo(facts, record); err != nil {
		return err
	}
	if record.State != "" && record.Volume == v.Name && (record.Identity != "" && record.Identity != facts.Identity || record.looksOther(facts)) {
		return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to %s, and led to %s when it was recorded", v.Path, facts.Alike, record.alike())}
	}
	if err := v.adopts(facts, record); err != nil {
		return err
	}
	if record.hasData() && !record.mayBeOf(v) {
		return record.contradiction(v)
	}
	if facts.Identity != v.Identity || facts.SizeBytes != v.Bytes || facts.Identity == "" && !v.Unidentified {
		p.report.Known = append(p.report.Known, Known{v.Name, facts.Identity, facts.SizeBytes})
	}
	// One that is restored from a backup names a claim that may be gone, and is released as soon as that is known.
	if v.Used && !v.Bound || record.wasCleanedFor(v) {
		return nil
	}
	next := recordOf(v.Path, facts)
	next.State, next.Volume, next.VolumeUID, next.ClaimUID, next.Claim = Offered, v.Name, v.UID, v.ClaimUID, v.Claim
	switch {
	case v.Used:
		next.State = Bound
	case record.State == Bound: // the claim was taken from the volume, and its data is still there
		next.State, next.ClaimUID, next.Claim = Bound, record.ClaimUID, record.Claim
	case record.Volume == v.Name && record.is(facts):
		next.Wipe = record.wipeOf(facts.SizeBytes)
	}
	if next.Instance, err = instance(v, facts, record); err != nil {
		return err
	}
	if next == record {
		return nil
	}
	return p.Records.Put(next)
}

// adopts refuses to take the identity of a device for that of a volume, by which it will be cleaned one day, if the disk of the volume had
// none when it was recorded, or when the volume was made: it may be another one.
func (v Volume) adopts(facts blockdev.Facts, record Record) error {
	recorded := record.Volume == v.Name
	if v.Identity == facts.Identity || recorded && record.Identity == facts.Identity || !recorded && !v.Unidentified {
		return nil
	}
	if now, err := facts.Instance(); err != nil || recorded && now == record.Instance {
		return err
	}
	return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to %s, and led to a disk without an identity when it was recorded; if it is the same, \"kubectl annotate --overwrite pv %s '%s=%s'\" says so",
		v.Path, facts.Identity, v.Name, IdentityAnnotation, facts.Identity)}
}

// instance is what a disk without identity is known by until the node is booted again. Which one it is then is not known, nor where the
// record of a volume is gone that was made of such a disk.
func instance(v Volume, facts blockdev.Facts, record Record) (string, error) {
	recorded := record.Volume == v.Name
	if facts.Identity != "" || v.Unidentified && !recorded || recorded && record.Instance == "" {
		return "", nil
	}
	now, err := facts.Instance()
	if err != nil || !recorded {
		return now, err
	}
	was, _, _ := strings.Cut(record.Instance, "/")
	if boot, _, _ := strings.Cut(now, "/"); boot == was && now != record.Instance {
		return "", Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to another disk than before; neither has an identity", v.Path)}
	}
	return record.Instance, nil
}

// twin is another volume of the same disk, by another path; its name is empty if there is none.
func (p *pass) twin(v Volume, facts blockdev.Facts) Volume {
	for _, other := range p.disks[diskOf(facts)] {
		if facts.Alike != "" && other.Name != v.Name {
			return other
		}
	}
	return Volume{}
}

// diskOf distinguishes disks that are known by anything.
func diskOf(facts blockdev.Facts) string {
	return fmt.Sprintf("%d %s", facts.SizeBytes, facts.Alike)
}

// scan searches for devices that are no volumes.
func (p *pass) scan(seen map[blockdev.Number]bool) {
	found, directories, problems := Scan(*p.Offer)
	p.report.Directories = directories
	for _, problem := range problems {
		if !p.paths[problem.Path] { // else it is a problem of the volume
			p.report.Problems = append(p.report.Problems, problem)
		}
	}
	for _, f := range found {
		seen[f.Number] = true
		if len(p.owners[f.Number]) > 0 {
			continue
		}
		facts, err := inspect(f.Number)
		if err != nil {
			p.fail("", f.Path, err)
			continue
		}
		p.recall(f, facts)
		if owners := p.owners[facts.Disk]; len(owners) > 0 {
			p.problem("", f.Path, DiskInUse, "its disk is the PersistentVolume %s", owners[0].Name)
			continue
		}
		if owner := p.ownerOf(facts.Partitions); owner != "" {
			p.problem("", f.Path, HasPartitions, "one of its partitions is the PersistentVolume %s", owner)
			continue
		}
		p.candidate(f, facts)
	}
}

// recall has the disk of a device without a volume stay reserved for what the record of its path has.
func (p *pass) recall(f Found, facts blockdev.Facts) {
	switch record, err := p.Records.Get(f.Path); {
	case err != nil || record.hasData() && !differ(record.alike(), facts.Alike):
		p.doubted[reservable(facts.Alike)] = f.Path
	case record.is(facts) && record.Wipe != "":
		p.remains[reservable(facts.Alike)] = true
	}
}

// candidate follows a device without a volume once it has been unused and unchanged for long enough.
func (p *pass) candidate(f Found, facts blockdev.Facts) {
	j := p.jobs[f.Number]
	if j != nil && j.volume.Name != "" { // which was deleted
		j.cancel()
		if j.finished() {
			p.drop(f.Number)
			j = nil
		}
	}
	if j != nil && !j.finished() {
		j.wanted = true
		p.underway(j, j.status()) // if it ends now, the next pass sees how
		return
	}
	if !p.unsettled(f, facts) {
		p.follow(f.Number, p.unclaimed(f, facts))
	}
}

// unclaimed is the job of a device without a volume.
func (p *pass) unclaimed(f Found, facts blockdev.Facts) *job {
	j := &job{path: f.Path, disk: reservable(facts.Alike), wipe: p.Offer.Wipe, partitions: p.Offer.Partitions}
	if p.Settle > 0 {
		j.as, j.foreign = appearance(facts), !p.sightings[f.Number].had
	}
	return j
}

// ownerOf is the first volume of any of the devices, or empty.
func (p *pass) ownerOf(numbers []blockdev.Number) string {
	for _, number := range numbers {
		if owners := p.owners[number]; len(owners) > 0 {
			return owners[0].Name
		}
	}
	return ""
}

// follow starts a job, or reports what has become of it. It looks at it once: a job may end at any time.
func (p *pass) follow(number blockdev.Number, wanted *job) {
	j := p.jobs[number]
	var now status
	finished := false
	if j != nil {
		now, finished = j.status(), j.finished()
		j.wanted = true
	}
	if finished && (j.stale(wanted) || p.Retry && j.err != nil) {
		if !j.stale(wanted) {
			wanted.before = j.err
		}
		p.drop(number)
		j = nil
	}
	switch {
	case j == nil:
		wanted.number = number
		p.start(wanted)
		p.stillRefused(wanted) // what comes of it is reported when it is known
	case !finished:
		p.underway(j, now)
	case errors.Is(j.err, ErrChanged):
		// The volumes that the pass was told of are old. The job is stale when they are not, and is tried again at the next poll.
	case j.err != nil:
		p.fail(j.volume.Name, j.path, j.err)
	case j.volume.Name != "":
		p.cleaned(j)
	case j.held != nil:
		name := VolumeName(p.Node, j.path, func(name string) bool { return p.names[name] || j.names[name] })
		p.names[name] = true
		p.report.Offers = append(p.report.Offers, Offer{name, j.path, j.held.Facts.Identity, j.held.Facts.SizeBytes, number})
	}
}

// cleaned reports a device that is clean, unless it was written to since: then it is cleaned anew.
func (p *pass) cleaned(j *job) {
	record, err := p.Records.Get(j.path)
	if err != nil {
		p.fail(j.volume.Name, j.path, err)
		return
	}
	facts, err := inspect(j.number)
	if err != nil {
		p.fail(j.volume.Name, j.path, err)
		return
	}
	if record.Left != "" && record.Left != leftAs(facts) {
		p.drop(j.number)
		p.Changed()
		return
	}
	p.report.Cleaned = append(p.report.Cleaned, j.volume.Name)
	p.sightings[j.number] = sighting{as: appearance(facts), written: j.clean, had: true}
}

// underway reports a job that has not ended, as it was.
func (p *pass) underway(j *job, now status) {
	p.report.Wiping = append(p.report.Wiping, Wiping{j.volume.Name, j.path, now.progress})
	if quiet := time.Since(now.moved); quiet > hangs && !now.waiting {
		p.problem(j.volume.Name, j.path, Hangs, "it has not answered for %s", quiet.Round(time.Second))
	} else if now.progress.Total == 0 {
		p.stillRefused(j)
	}
}

// stillRefused reports why a device was refused while it is checked again, so that nothing seems to change.
func (p *pass) stillRefused(j *job) {
	if j.before != nil && !errors.Is(j.before, ErrChanged) {
		p.fail(j.volume.Name, j.path, j.before)
	}
}

func (a *Agent) drop(number blockdev.Number) {
	j := a.jobs[number]
	if j == nil {
		return
	}
	delete(a.jobs, number)
	j.cancel()
	if j.held != nil {
		if err := j.held.Close(); err != nil {
			a.Log.Error(err, "Failed to close a device", "device", j.path)
		}
	}
}

// SortProblems has them in an order that does not change, one for each device and volume.
func SortProblems(problems []Problem) []Problem {
	slices.SortFunc(problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Volume, b.Volume))
	})
	return slices.CompactFunc(problems, func(a, b Problem) bool { return a.Path == b.Path && a.Volume == b.Volume })
}
