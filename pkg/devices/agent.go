package devices

import (
	"cmp"
	"context"
	"fmt"
	"slices"
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
	// or is about to.
	Released, Used bool
	// ClaimUID and Claim are of the claim that has or had it.
	ClaimUID, Claim string
	// Wipe is how it is cleaned at least, and empty if any way will do.
	Wipe Wipe
	// Foreign is a volume of the node that somebody else has made: Pass gets none.
	Foreign bool
	// FSType is the filesystem that kubelet makes on it; it is empty for a volume without one.
	FSType string
}

// API is asked right before a device is overwritten or offered: no cache may answer.
type API interface {
	// Volumes are those of the node, whoever has made them, and the names that volumes of all nodes have.
	Volumes(ctx context.Context) (volumes []Volume, names map[string]bool, err error)
}

// An Offer is a clean device that no volume has. It is held until Offered is called.
type Offer struct {
	Name, Path string
	Bytes      int64
	number     blockdev.Number
}

// A Wiping is a device that is being cleaned.
type Wiping struct {
	// Volume is empty for a device that is new.
	Volume, Path string
	Progress     Progress
}

// A Report is what a pass over the devices of a node has found.
type Report struct {
	// Offers are to become volumes.
	Offers []Offer
	// Cleaned are the names of released volumes whose device is clean, to be deleted.
	Cleaned []string
	// Wiping are the devices that are not ready yet, those that hang among them.
	Wiping   []Wiping
	Problems []Problem
	// Available is how many volumes have their device.
	Available int
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
}

// NewAgent makes an agent. Close ends what it does.
func NewAgent(o Options) *Agent {
	ctx, cancel := context.WithCancel(context.Background())
	return &Agent{Options: o, ctx: ctx, cancel: cancel, jobs: make(map[blockdev.Number]*job)}
}

// Close stops all cleaning at its next step and waits for that. The next agent continues it from the records.
func (a *Agent) Close() {
	a.cancel()
	a.wait.Wait()
	for number := range a.jobs {
		a.drop(number)
	}
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
}

// A pass is one check of all devices.
type pass struct {
	*Agent
	Request
	// owners are the volumes of a device, by its number.
	owners map[blockdev.Number][]Volume
	// disks are the volumes of a disk, by what diskOf says.
	disks map[string][]Volume
	// names and paths are those of the volumes.
	names, paths map[string]bool
	report       Report
}

// Pass compares devices and volumes, starts what takes time, and returns what is known. It does not wait for any
// device. It must not be called by two at once.
func (a *Agent) Pass(r Request) Report {
	p := &pass{Agent: a, Request: r, owners: make(map[blockdev.Number][]Volume), disks: make(map[string][]Volume),
		names: make(map[string]bool), paths: make(map[string]bool)}
	for _, v := range r.Volumes {
		p.names[v.Name], p.paths[v.Path] = true, true
		if number, err := blockdev.At(v.Path); err == nil {
			p.owners[number] = append(p.owners[number], v)
			if facts, err := blockdev.Inspect(number); err == nil {
				p.disks[diskOf(facts)] = append(p.disks[diskOf(facts)], v)
			}
		}
	}
	seen := make(map[blockdev.Number]bool)
	for _, v := range r.Volumes {
		p.volume(v, seen)
	}
	if r.Offer != nil && !r.Frozen {
		p.scan(seen)
	}
	for number, j := range a.jobs {
		if !seen[number] {
			j.cancel()
			if j.finished() {
				a.drop(number)
			}
		}
	}
	return p.report
}

// Offered lets go of a device after its volume was made, or was not. It notes the offer beforehand with Offering.
func (a *Agent) Offered(o Offer) { a.drop(o.number) }

// Offering notes that a device is about to become a volume.
func (a *Agent) Offering(o Offer) error {
	record, err := a.Records.Get(o.Path)
	if err != nil {
		return err
	}
	record.State, record.Volume = Offered, o.Name
	record.VolumeUID, record.ClaimUID, record.Claim = "", "", ""
	return a.Records.Put(record)
}

// Deleted notes that a released volume went before its device was cleaned: its data may go all the same. Nothing is noted of
// a volume that the record is not of.
func (a *Agent) Deleted(v Volume) error {
	record, err := a.Records.Get(v.Path)
	if err != nil || !v.Released || record.State != Bound || record.unknown() || !record.isOf(v) || record.ClaimUID != v.ClaimUID {
		return err
	}
	record.State, record.Done = Cleaning, 0
	return a.Records.Put(record)
}

func (p *pass) problem(volume, path string, reason Reason, format string, args ...any) {
	p.report.Problems = append(p.report.Problems, Problem{volume, path, reason, fmt.Sprintf(format, args...)})
}

// volume takes care of the device of a volume.
func (p *pass) volume(v Volume, seen map[blockdev.Number]bool) {
	number, err := blockdev.At(v.Path)
	if err != nil {
		p.problem(v.Name, v.Path, reasonOf(err), "%v", err)
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
	if j := p.jobs[number]; j != nil && (!v.Released || j.volume.ClaimUID != v.ClaimUID || p.Frozen) {
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
	if err := p.note(v, number); err != nil {
		p.problem(v.Name, v.Path, reasonOf(err), "%v", err)
		return
	}
	p.report.Available++
}

// released has the device of a volume cleaned, unless it shares its blocks with another one's.
func (p *pass) released(v Volume, number blockdev.Number) {
	facts, err := blockdev.Inspect(number)
	if err != nil {
		p.problem(v.Name, v.Path, reasonOf(err), "%v", err)
		return
	}
	for _, overlapping := range facts.Overlapping() {
		if owners := p.owners[overlapping]; len(owners) > 0 {
			p.problem(v.Name, v.Path, Twice, "its blocks are also those of %s of the PersistentVolume %s: one is the disk of the other; delete one of the two PersistentVolumes",
				owners[0].Path, owners[0].Name)
			return
		}
	}
	wanted := &job{volume: v, path: v.Path, wipe: p.Wipe, existing: Keep}
	if v.Wipe != "" && v.Wipe.covers(p.Wipe) {
		wanted.wipe = v.Wipe
	}
	if p.Offer != nil {
		wanted.existing = p.Offer.ExistingData
	}
	p.follow(number, wanted)
}

// note keeps the record of a volume that is available or bound.
func (p *pass) note(v Volume, number blockdev.Number) error {
	facts, err := blockdev.Inspect(number)
	if err != nil {
		return err
	}
	record, err := p.Records.Get(v.Path)
	if err != nil {
		return err
	}
	if other := p.twin(v, facts); other.Name != "" {
		return Problem{v.Name, v.Path, Twice, fmt.Sprintf("it is the same disk, %s, as %s of the PersistentVolume %s", facts.Identity, other.Path, other.Name)}
	}
	if facts.SizeBytes != v.Bytes {
		return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s has %d bytes, and the PersistentVolume has %d", v.Path, facts.SizeBytes, v.Bytes)}
	}
	if record.State != "" && record.Volume == v.Name && record.Identity != "" && record.Identity != facts.Identity {
		return Problem{v.Name, v.Path, OtherDevice, fmt.Sprintf("%s now leads to %s, and led to %s when it was recorded", v.Path, facts.Identity, record.Identity)}
	}
	// A claim that has its volume has its data, also where both were made anew from a backup.
	if record.State == Bound && !record.isOf(v) && (!v.Used || record.Claim != v.Claim) {
		return record.contradiction(v)
	}
	next := Record{Version: recordVersion, Path: v.Path, Bytes: facts.SizeBytes, Identity: facts.Identity, State: Offered,
		Volume: v.Name, VolumeUID: v.UID, ClaimUID: v.ClaimUID, Claim: v.Claim, Wipe: record.Wipe}
	switch {
	case v.Used:
		next.State = Bound
	case record.State == Bound: // somebody has taken the claim from the volume, and its data is still there
		next.State, next.ClaimUID, next.Claim = Bound, record.ClaimUID, record.Claim
	}
	if next == record {
		return nil
	}
	return p.Records.Put(next)
}

// twin is another volume of the same disk, by another path; its name is empty if there is none.
func (p *pass) twin(v Volume, facts blockdev.Facts) Volume {
	for _, other := range p.disks[diskOf(facts)] {
		if facts.Identity != "" && other.Name != v.Name {
			return other
		}
	}
	return Volume{}
}

// diskOf distinguishes disks that have an identity.
func diskOf(facts blockdev.Facts) string {
	return fmt.Sprintf("%d %s", facts.SizeBytes, facts.Identity)
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
		facts, err := blockdev.Inspect(f.Number)
		if err != nil {
			p.problem("", f.Paths[0], reasonOf(err), "%v", err)
			continue
		}
		if owners := p.owners[facts.Disk]; len(owners) > 0 {
			p.problem("", f.Paths[0], DiskInUse, "its disk is the PersistentVolume %s", owners[0].Name)
			continue
		}
		if owner := p.ownerOf(facts.Partitions); owner != "" {
			p.problem("", f.Paths[0], HasPartitions, "one of its partitions is the PersistentVolume %s", owner)
			continue
		}
		p.follow(f.Number, &job{path: f.Paths[0], wipe: p.Offer.Wipe, existing: p.Offer.ExistingData})
	}
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

// follow starts a job, or reports what has become of it.
func (p *pass) follow(number blockdev.Number, wanted *job) {
	j := p.jobs[number]
	if j != nil && j.finished() && (j.stale(wanted) || p.Retry && j.err != nil) {
		if !j.stale(wanted) {
			wanted.before = j.err
		}
		p.drop(number)
		j = nil
	}
	if j == nil {
		wanted.number = number
		p.start(wanted)
		p.stillRefused(wanted) // what comes of it is reported when it is known
		return
	}
	status := j.status()
	switch {
	case !status.finished:
		p.report.Wiping = append(p.report.Wiping, Wiping{j.volume.Name, j.path, status.progress})
		if quiet := time.Since(status.moved); quiet > hangs {
			p.problem(j.volume.Name, j.path, Hangs, "it has not answered for %s", quiet.Round(time.Second))
		} else if status.progress.Total == 0 {
			p.stillRefused(j)
		}
	case j.err != nil:
		p.problem(j.volume.Name, j.path, reasonOf(j.err), "%s", detail(j.err))
	case j.volume.Name != "":
		p.report.Cleaned = append(p.report.Cleaned, j.volume.Name)
	case j.held != nil:
		name := VolumeName(p.Node, j.path, func(name string) bool { return p.names[name] || j.names[name] })
		p.names[name] = true
		p.report.Offers = append(p.report.Offers, Offer{name, j.path, j.held.Facts.SizeBytes, number})
	}
}

// stillRefused reports why a device was refused while it is checked again, so that nothing seems to change.
func (p *pass) stillRefused(j *job) {
	if j.before != nil {
		p.problem(j.volume.Name, j.path, reasonOf(j.before), "%s", detail(j.before))
	}
}

// drop forgets a job that has finished.
func (a *Agent) drop(number blockdev.Number) {
	j := a.jobs[number]
	if j == nil {
		return
	}
	delete(a.jobs, number)
	j.cancel()
	if j.held != nil {
		if err := j.held.Close(); err != nil {
			a.Log.Error(err, "failed to close a device", "device", j.path)
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
