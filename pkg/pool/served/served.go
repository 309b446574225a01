// Package served remembers on a node which pools its driver has served, and what was in them. A pool that is taken out
// of the configuration is unknown to the driver from then on, and its volumes would look like ones that were deleted.
package served

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

const (
	directory = "pools"
	suffix    = ".json"
	// changing follows the uuid of a pool in which something may have been made since its volumes were noted.
	changing = ".changing"

	maxNote = 64 << 20 // bytes
)

// A Memory is a directory of the node. A nil one remembers nothing.
type Memory struct {
	path   string
	byHand bool
}

// In keeps the memory below a directory that stays when the driver is restarted or replaced; an empty path stands for
// none.
func In(path string) *Memory {
	if path == "" {
		return nil
	}
	return &Memory{path: path}
}

// ByHand is In for a program without a command that forgets a pool: an administrator removes its file.
func ByHand(path string) *Memory {
	m := In(path)
	if m != nil {
		m.byHand = true
	}
	return m
}

// An Entry is what is remembered of one pool.
type Entry struct {
	Name   string `json:"name"`
	Path   string `json:"path"`
	UUID   string `json:"uuid"`
	Shared bool   `json:"shared,omitempty"`
	// Volumes are the ids of all that the pool had, snapshots included, in their order.
	Volumes []string `json:"volumes"`
	// Partial says that there may be others: the driver was killed, or other nodes made them.
	Partial bool `json:"-"`
}

// May reports whether a volume may be in the pool.
func (p *Entry) May(id string) bool { return p.Partial || p.Had(id) }

// Had reports whether a volume was in the pool when that was noted last.
func (p *Entry) Had(id string) bool {
	_, found := slices.BinarySearch(p.Volumes, id)
	return found
}

// Advice says what to do about a pool that is not in use any more and may have volumes.
func (m *Memory) Advice(p Entry) string {
	forget := fmt.Sprintf("with `/hostpath-csi-driver forget-pool --pool=%s` in the container driver of this node", p.Name)
	if m.byHand {
		forget = fmt.Sprintf("by removing the file %s on this node", path.Join(m.path, directory, p.UUID+suffix))
	}
	return fmt.Sprintf("pool %q at %s may have it, which this node served and which is not configured any more, not mounted, or below another mount: "+
		"configure and mount it again to delete its volumes, or leave them on the disk, as they are, %s", p.Name, p.Path, forget)
}

// OutOfUse are the pools that may have volumes and are not in use any more.
func (m *Memory) OutOfUse(inUse func(Entry) bool) (pools []Entry, err error) {
	err = m.in((*dir.Dir).Open, func(d *dir.Dir) error {
		for entry, err := range d.Entries() {
			if err != nil {
				return err
			}
			uuid, is := noteOf(entry)
			if !is {
				continue
			}
			p, err := read(d, uuid)
			if errors.Is(err, fs.ErrNotExist) {
				continue // forgotten meanwhile
			}
			if err != nil {
				return err
			}
			if (p.Partial || len(p.Volumes) > 0) && !inUse(p) {
				pools = append(pools, p)
			}
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	slices.SortFunc(pools, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	return pools, err
}

// noteOf returns the uuid of the pool that a file is the note of. What a driver was killed while writing is none.
func noteOf(entry dir.Entry) (uuid string, is bool) {
	uuid, is = strings.CutSuffix(entry.Name, suffix)
	_, unfinished := dir.Temporary(entry.Name)
	return uuid, is && !unfinished && !entry.IsDir
}

// Forget removes what is remembered of a pool.
func (m *Memory) Forget(p Entry) error {
	return m.in((*dir.Dir).Open, func(d *dir.Dir) error { return forget(d, p.UUID) })
}

func forget(d *dir.Dir, uuid string) error {
	for _, name := range []string{uuid + suffix, uuid + changing} {
		if err := d.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return d.Sync()
}

func (m *Memory) in(open func(parent *dir.Dir, name string) (*dir.Dir, error), do func(*dir.Dir) error) error {
	if m == nil {
		return nil
	}
	parent, err := dir.Open(m.path)
	if err != nil {
		return err
	}
	defer func() { _ = parent.Close() }()
	d, err := open(parent, directory)
	if err != nil {
		return err
	}
	return errors.Join(do(d), d.Close())
}

func read(d *dir.Dir, uuid string) (Entry, error) {
	// First: a driver that writes the note at this moment removes the file changing after it.
	changed, err := d.Exists(uuid + changing)
	if err != nil {
		return Entry{}, err
	}
	text, err := d.ReadFile(uuid+suffix, maxNote)
	if err != nil {
		return Entry{}, err
	}
	var p Entry
	if err := json.Unmarshal(text, &p); err != nil {
		return Entry{}, fmt.Errorf("%s/%s%s is unreadable, and so is what its pool had; remove that file to have all of it count as deleted: %w", d, uuid, suffix, err)
	}
	p.UUID = uuid
	p.Partial = changed || p.Shared
	return p, nil
}

// A Note is the memory of a pool that is served.
type Note struct {
	Memory *Memory

	mu     sync.Mutex // held across writes to the memory
	making int        // calls that may make something now
	marked bool       // the file changing is there
	noted  string     // what was noted last
}

// Making is called before something is made in a pool, and done afterwards, when it is among the volumes of the pool. Of a new
// pool no note may have been written yet: then one is, without volumes.
func (n *Note) Making(p Entry) (done func(), err error) {
	if n.Memory == nil {
		return func() {}, nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.marked {
		if err := n.Memory.in((*dir.Dir).Ensure, func(d *dir.Dir) error { return mark(d, p) }); err != nil {
			return func() {}, err
		}
		n.marked = true
	}
	n.making++
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.making--
	}, nil
}

func mark(d *dir.Dir, p Entry) error {
	noted, err := d.Exists(p.UUID + suffix)
	if err == nil && !noted {
		var text []byte
		if text, err = json.Marshal(p); err == nil {
			err = d.WriteFile(p.UUID+suffix, text)
		}
	}
	if err != nil {
		return err
	}
	return d.WriteFile(p.UUID+changing, nil)
}

// Write notes what a pool has, unless something is being made in it. What was at its path before is not forgotten: it may
// be below a mount, or on another disk.
func (n *Note) Write(p Entry, volumes func() []string) error {
	if n.Memory == nil {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.making > 0 {
		return nil
	}
	p.Volumes = volumes()
	text, err := json.Marshal(p)
	if err != nil {
		return err
	}
	err = n.Memory.in((*dir.Dir).Ensure, func(d *dir.Dir) error {
		if !n.marked && n.noted == string(text) {
			if noted, err := d.Exists(p.UUID + suffix); noted || err != nil { // or forget-pool has removed it
				return err
			}
		}
		if err := d.WriteFile(p.UUID+suffix, text); err != nil {
			return err
		}
		err := d.Remove(p.UUID + changing)
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return errors.Join(err, d.Sync())
	})
	if err != nil {
		return err
	}
	n.marked, n.noted = false, string(text)
	return nil
}

// Forget removes the note of a pool that is known to be empty, and that others may serve as long as they have not made anything.
func (n *Note) Forget(uuid string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.marked, n.noted = false, ""
	err := n.Memory.Forget(Entry{UUID: uuid})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil // none was written yet
	}
	return err
}
