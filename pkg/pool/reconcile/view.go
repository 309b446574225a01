// Package reconcile finds what is on the disk of a pool, and puts right what differs from the records. View reads and describes
// volumes; inspect reads pools that others serve in this way too. Index brings the ledger in line with the disk, and Usage measures.
// Leftovers undoes creations, finishes removals and erases trash. Repairs corrects limits, growths and devices. VolumeUse says
// how this node uses a volume. The order of the steps on disk is that of pkg/pool/store.
package reconcile

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A View is a pool that is open for reading.
type View struct {
	Config   *poolconfig.Config
	Node     volume.NodeID
	Host     content.Host
	Store    *store.Store    // nil if the pool does not serve
	Enforcer *limit.Enforcer // nil before the pool was opened
	Ledger   *ledger.Ledger
	Peers    *Peers
	// Errors is how many the filesystem has counted, or volume.Unknown.
	Errors int64
	// SinceBoot is how long the node is up.
	SinceBoot func() time.Duration
	// Lock takes a volume, on all nodes of a shared pool, or returns volume.ErrBusy.
	Lock func(volume.ID) (unlock func(), err error)
	// Steps counts what is done, by which a disk that is slow differs from one that hangs.
	Steps *atomic.Uint64
	// Stepped is called after each; nil for not.
	Stepped func()
	Log     logr.Logger
	// Strays is what left the limit of a volume, as the last search found it, and why that did not
	// come to its end; nil where none was made.
	Strays func(volume.ID) (quota.Strays, error)
	// Failed reports what could not be done in the background.
	Failed func(err error, what string, about ...any)
	// Left reports a leftover that stays where it is, by its path, because its disk cannot read it, or for another reason; nil
	// says that it does not stay. Nothing else depends on one.
	Left func(path string, err error)
}

// Step counts a step.
func (p *View) Step() {
	p.Steps.Add(1)
	if p.Stepped != nil {
		p.Stepped()
	}
}

// Unavailable is an error about a pool that does not serve.
func Unavailable(c *poolconfig.Config, err error) error {
	if errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	return fmt.Errorf("%w: pool %q at %s: %w", volume.ErrUnavailable, c.Name, c.Path, err)
}

// Lookup reads what the disk has of a volume. The directory, if it is not nil, must be closed.
func (p *View) Lookup(id volume.ID) (store.Entry, *dir.Dir, error) {
	return lookup(p.Store, p.Config, id)
}

func lookup(s *store.Store, c *poolconfig.Config, id volume.ID) (store.Entry, *dir.Dir, error) {
	e, d, err := s.Lookup(id)
	if err != nil {
		err = Unavailable(c, err)
	}
	return e, d, err
}

// LookupSettled is Lookup for callers that hold no lock: of a volume that a call makes or
// removes at the moment, on whatever node, it returns that there is none.
func (p *View) LookupSettled(id volume.ID) (store.Entry, *dir.Dir, error) {
	e, d, err := p.Lookup(id)
	if err != nil || !e.Lost() {
		return e, d, err
	}
	unlock, err := p.Lock(id)
	if errors.Is(err, volume.ErrBusy) {
		return store.Entry{}, nil, nil
	}
	if err != nil {
		return store.Entry{}, nil, err
	}
	defer unlock()
	return p.Lookup(id)
}

// InfoOf is what of an entry stays in memory.
func InfoOf(e store.Entry) ledger.Info {
	var flags ledger.Flags
	set := func(flag ledger.Flags, is bool) {
		if is {
			flags |= flag
		}
	}
	set(ledger.HasDirectory, e.Present)
	set(ledger.HasDamage, e.Damage != nil)
	rec := e.Record
	if rec == nil {
		return ledger.NewInfo(0, "", 0, flags)
	}
	set(ledger.HasRecord, true)
	set(ledger.IsBlock, rec.Mode == volume.ModeBlock)
	set(ledger.IsInline, rec.Inline)
	set(ledger.Shares, rec.Family != "")
	set(ledger.IsSnapshot, rec.IsSnapshot())
	set(ledger.IsCrashConsistent, rec.Origin != nil && rec.Origin.Consistency == volume.CrashConsistent)
	set(ledger.IsUnverified, rec.Origin != nil && rec.Origin.Consistency == volume.Unverified)
	return ledger.NewInfo(rec.Bytes, rec.UID, quota.ID(rec.ProjectID), flags|ledger.By(quota.Kind(rec.Quota))).WithInodes(rec.BytesPerInode)
}

// Content is what a volume consists of, as its record says.
func (p *View) Content(id volume.ID, rec *store.Record) content.Content {
	if rec == nil || rec.Mode != volume.ModeBlock {
		return content.Directory{Host: p.Host, ID: id, Relabel: p.Config.Relabel}
	}
	return p.Disk(id, rec)
}

// Disk is the content of a block volume.
func (p *View) Disk(id volume.ID, rec *store.Record) *content.Disk {
	return &content.Disk{Host: p.Host, ID: id, Bytes: rec.Bytes, BlockBytes: rec.BlockBytes, Thin: rec.Thin}
}

// FileOf identifies what devices of a volume are attached to. It returns false where there is
// nothing that could be: the volume is no block volume, or its file is lost. Without a readable
// record, the directory shows what a volume is.
func FileOf(id volume.ID, e store.Entry, d *dir.Dir) (file content.VolumeFile, ok bool, err error) {
	if d == nil || !InfoOf(e).MayBeBlock() {
		return content.VolumeFile{}, false, nil
	}
	file, err = content.FileOf(id, d)
	if errors.Is(err, volume.ErrLost) {
		return content.VolumeFile{}, false, nil
	}
	return file, err == nil, err
}

// WithFile does something with the file of FileOf, if there is one, whatever the record of the volume says.
func (p *View) WithFile(id volume.ID, do func(file content.VolumeFile) error) error {
	d, err := p.Store.Root().Open(id.String())
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	file, ok, err := FileOf(id, store.Entry{}, d)
	if err != nil || !ok {
		return err
	}
	return do(file)
}

// enforces reports whether the kernel enforces the size of a volume; not before the pool is
// opened.
func (p *View) enforces(c ledger.Info) bool { return p.Enforcer != nil && p.Enforcer.Enforces(c) }
