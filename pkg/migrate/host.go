package migrate

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/handover"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// A watched is a directory that other paths may lead to: a volume, where it is or where it goes, or a pool.
type watched struct {
	place  handover.Place
	within dir.ID  // the directory that it is in
	id     *dir.ID // nil if it is not there
}

// watch reads what directories are.
func (m *migration) watch(places ...handover.Place) (all []watched, err error) {
	for _, p := range places {
		w := watched{place: p}
		own, err := dir.Open(p.Directory)
		if err != nil {
			return nil, err
		}
		if w.within, err = own.ID(); err == nil {
			w.id, err = idOf(own, p.Name)
		}
		if err := errors.Join(err, own.Close()); err != nil {
			return nil, err
		}
		// Where paths are looked up has to be the root directory of the node: elsewhere each would lead nowhere.
		at, err := m.host.Lookup(p.Directory)
		if err == nil && at[0] != w.within {
			err = errors.New("another directory is there")
		}
		if err != nil {
			return nil, fmt.Errorf("--host-root=%s is not the root directory of the node: look for %s there: %w", m.HostRoot, p.Directory, err)
		}
		all = append(all, w)
	}
	return all, nil
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

// leadsTo reports whether a path of the node leads to one of the directories or into it: as it is written, or by links and mounts. What
// is not there yet counts by where it would be made.
func (m *migration) leadsTo(path string, directories []watched) (bool, error) {
	if !filepath.IsAbs(path) {
		return false, nil
	}
	if slices.ContainsFunc(directories, func(w watched) bool { return origin.Inside(path, w.place.String()) }) {
		return true, nil
	}
	at, missing := filepath.Clean(path), "" // the first part that is not there
	upwards, err := m.host.Lookup(at)
	for dir.IsMissing(err) && at != "/" {
		at, missing = filepath.Split(at)
		at = filepath.Clean(at)
		upwards, err = m.host.Lookup(at)
	}
	if err != nil {
		return false, fmt.Errorf("look where %s leads: %w", path, err)
	}
	return slices.ContainsFunc(directories, func(w watched) bool {
		return w.id != nil && slices.Contains(upwards, *w.id) || missing == w.place.Name && upwards[0] == w.within
	}), nil
}

// isDirectory reports whether a path of the node leads to a directory.
func (m *migration) isDirectory(path, directory string) (bool, error) {
	if !filepath.IsAbs(path) {
		return false, nil
	}
	at, err := m.host.Lookup(path)
	if dir.IsMissing(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look where %s leads: %w", path, err)
	}
	want, err := m.host.Lookup(directory)
	return err == nil && at[0] == want[0], err
}
