package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/diff"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Difference is what changed from one snapshot of a volume to another: an entry of the tree,
// or a range of the image. It is a line of the output of Compare.
type Difference struct {
	Change string `json:"change"` // added, removed or changed
	// Path in the volume, and What of the entry has changed: see diff.Change.
	Path string   `json:"path,omitempty"`
	What []string `json:"what,omitempty"`
	// Offset and Bytes of a range of an image.
	Offset *int64 `json:"offset,omitempty"`
	Bytes  *int64 `json:"bytes,omitempty"`
}

// WriteJSON writes the difference as one line.
func (d Difference) WriteJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(d)
}

// WriteText writes the difference as one line, with what can be long at its end.
func (d Difference) WriteText(w io.Writer) error {
	var err error
	if d.Bytes != nil {
		_, err = fmt.Fprintf(w, "%-8s  %d bytes at %d\n", d.Change, *d.Bytes, *d.Offset)
	} else {
		_, err = fmt.Fprintf(w, "%-8s  %-16s  %s\n", d.Change, orDash(strings.Join(d.What, ",")), clean(d.Path))
	}
	return err
}

// Compare calls found for what changed from one snapshot to another of the same volume, or to
// the volume itself if to is the zero id. A pool that gets nowhere for Options.HangAfter is left
// behind. Errors: volume.ErrNotFound, ErrInvalid for snapshots that are not of one volume,
// ErrDamagedRecord.
func Compare(ctx context.Context, configs []poolconfig.Config, options Options, from, to volume.ID, found func(Difference) error) error {
	n := &node{options: options.withDefaults()}
	var problems []error
	for i := range configs {
		r := n.reader(&configs[i])
		has, err := whileStepping(ctx, r, func() (bool, error) { return r.holds(from) })
		switch {
		case has:
			return r.compare(ctx, from, to, found)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			problems = append(problems, fmt.Errorf("pool %q: %w", r.Config.Name, err))
		}
	}
	return errors.Join(append(problems, fmt.Errorf("%s: %w", from.Named(), volume.ErrNotFound))...)
}

// holds opens the pool's layout, and leaves it open if the pool has an entry.
func (r *reader) holds(id volume.ID) (bool, error) {
	if _, err := r.notePlace(); err != nil {
		return false, err
	}
	s, _, err := store.OpenReadOnly(r.at)
	if err != nil {
		return false, err
	}
	if has, err := s.Records().Read(id); has == nil && err == nil {
		s.Close()
		return false, nil
	}
	r.Store = s
	return true, nil
}

// compare hands over what changed as it is found. Only reading has to get on: found may wait for
// a person who reads its output page by page.
func (r *reader) compare(ctx context.Context, from, to volume.ID, found func(Difference) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	all := make(chan Difference)
	reading := hang.Start(func() (struct{}, error) {
		defer close(all)
		defer r.Store.Close()
		return struct{}{}, r.differences(ctx, from, to, func(d Difference) error {
			select {
			case all <- d:
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
	})
	for {
		var err error
		before := r.steps.Load()
		select {
		case d, more := <-all:
			if !more {
				_, err := reading.Wait(ctx, 0)
				return err
			}
			err = found(d)
		case <-time.After(r.options.HangAfter):
			if r.steps.Load() == before {
				err = fmt.Errorf("pool %q: %w", r.Config.Name, hang.Stuck(r.options.HangAfter))
			}
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		if err != nil {
			reading.Abandon(nil)
			return err
		}
	}
}

func (r *reader) differences(ctx context.Context, from, to volume.ID, found func(Difference) error) error {
	a, inA, err := r.openToCompare(from)
	if err != nil {
		return err
	}
	defer func() { _ = inA.Close() }() // opened for reading
	of := *a.Origin
	if to == (volume.ID{}) {
		if to, err = volume.ParseEntry(of.ID); err != nil {
			return err
		}
	}
	b, inB, err := r.openToCompare(to)
	if err != nil {
		return err
	}
	defer func() { _ = inB.Close() }() // opened for reading
	is := volume.Origin{ID: b.ID, UID: b.UID}
	if to.IsSnapshot() {
		is = *b.Origin
	}
	if of.ID != is.ID || of.UID != is.UID {
		return fmt.Errorf("%w: %s is of volume %s (%s), and %s of volume %s (%s)", volume.ErrInvalid, from.Named(), of.ID, of.UID, to.Named(), is.ID, is.UID)
	}
	step := func() error {
		r.steps.Add(1)
		return ctx.Err()
	}
	if a.Mode == volume.ModeBlock {
		return compareImages(step, inA, inB, found)
	}
	return diff.Trees(step, inA, inB, func(c diff.Change) error {
		return found(Difference{Change: string(c.Kind), Path: c.Path, What: c.What})
	})
}

func (r *reader) openToCompare(id volume.ID) (*store.Record, *dir.Dir, error) {
	e, d, err := r.Store.LookupUnlocked(id)
	if unusable := e.Usable(); err == nil && unusable != nil {
		err = fmt.Errorf("%s: %w", id.Named(), unusable)
	}
	if err == nil && e.Record == nil {
		err = fmt.Errorf("%w of %s: there is none", volume.ErrDamagedRecord, id.Named())
	}
	if err != nil && d != nil {
		_ = d.Close() // opened for reading
	}
	if err != nil {
		return nil, nil, err
	}
	return e.Record, d, nil
}

func compareImages(step func() error, from, to *dir.Dir, found func(Difference) error) error {
	a, err := from.OpenFile(content.FileName)
	if err != nil {
		return err
	}
	defer func() { _ = a.Close() }() // opened for reading
	b, err := to.OpenFile(content.FileName)
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }() // opened for reading
	return diff.Files(step, a, b, func(r diff.Range) error {
		return found(Difference{Change: string(diff.Changed), Offset: &r.Offset, Bytes: &r.Bytes})
	})
}
