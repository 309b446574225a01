// Package others finds what else has the directory of a volume: a PersistentVolume or a pod, by whatever path leads to it on the
// node. It asks no API server, and changes nothing.
package others

import (
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// A Watch is the directories that other paths may lead to, as the node has them now.
type Watch struct {
	host        *dir.Dir
	mounts      mounts.Table
	directories []watched
}

type watched struct {
	place store.VolumePath
	// above are the directories that the place is in, upwards.
	above []dir.ID
	// id is nil if there is no such directory yet.
	id *dir.ID
	// at is found also by way of a mount of something in the directory, above which a process cannot see.
	at mounts.Position
}

// New reads what directories are. Paths are looked up in host, the root directory of the node, as long as the Watch is used.
func New(host *dir.Dir, places ...store.VolumePath) (w *Watch, err error) {
	w = &Watch{host: host}
	if w.mounts, err = mounts.ReadTable(); err != nil {
		return nil, err
	}
	for _, p := range places {
		d, err := w.read(p)
		if err != nil {
			return nil, err
		}
		w.directories = append(w.directories, d)
	}
	return w, nil
}

func (w *Watch) read(p store.VolumePath) (d watched, err error) {
	own, err := dir.Open(p.Directory)
	if err != nil {
		return d, err
	}
	d.place = p
	within, err := own.ID()
	if err == nil {
		d.id, err = idOf(own, p.Name)
	}
	if err := errors.Join(err, own.Close()); err != nil {
		return d, err
	}
	// Where paths are looked up has to be the root directory of the node: elsewhere each would lead nowhere.
	f, err := w.look(p.Directory)
	if err == nil && f.upwards[0] != within {
		err = errors.New("another directory is there")
	}
	if err != nil {
		return d, fmt.Errorf("%s is not the root directory of the node: look for %s there: %w", w.host, p.Directory, err)
	}
	d.above, d.at = f.upwards, f.at
	d.at.Path = path.Join(d.at.Path, p.Name)
	return d, nil
}

// idOf is what has a name in a directory; nil if there is no directory of the name.
func idOf(d *dir.Dir, name string) (*dir.ID, error) {
	at, err := d.Open(name)
	if dir.IsMissing(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	id, err := at.ID()
	return &id, errors.Join(err, at.Close())
}

// A found is what a path of the node leads to.
type found struct {
	upwards []dir.ID // the identity of it, and of the directories above
	at      mounts.Position
}

func (w *Watch) look(at string) (f found, err error) {
	if f.upwards, err = dir.Lookup(w.host, at); err != nil {
		return f, err
	}
	d, err := dir.Resolve(w.host, at)
	if err != nil {
		return f, err
	}
	f.at, err = w.mounts.Position(d)
	return f, errors.Join(err, d.Close())
}

// LeadsTo reports whether a path of the node leads to one of the directories or into it: as it is written, or by links and mounts. What
// is not there yet counts by where it would be made.
func (w *Watch) LeadsTo(at string) (bool, error) {
	if !filepath.IsAbs(at) {
		return false, nil
	}
	if slices.ContainsFunc(w.directories, func(d watched) bool { return origin.Inside(at, d.place.String()) }) {
		return true, nil
	}
	there, missing := filepath.Clean(at), "" // the first part that is not there
	f, err := w.look(there)
	for dir.IsMissing(err) && there != "/" {
		there, missing = filepath.Split(there)
		there = filepath.Clean(there)
		f, err = w.look(there)
	}
	if err != nil {
		return false, fmt.Errorf("look where %s leads: %w", at, err)
	}
	f.at.Path = path.Join(f.at.Path, missing)
	return slices.ContainsFunc(w.directories, func(d watched) bool {
		return d.id != nil && slices.Contains(f.upwards, *d.id) || f.at.Inside(d.at)
	}), nil
}

// IsAbove reports whether one of the directories is in what a path of the node leads to, or is that.
func (w *Watch) IsAbove(at string) (bool, error) {
	if !filepath.IsAbs(at) {
		return false, nil
	}
	f, err := w.look(at)
	if dir.IsMissing(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look where %s leads: %w", at, err)
	}
	return slices.ContainsFunc(w.directories, func(d watched) bool { return slices.Contains(d.above, f.upwards[0]) || d.at.Inside(f.at) }), nil
}
