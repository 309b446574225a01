package mounts

import (
	"fmt"
	"path"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Position is a place in a filesystem, wherever and however often that is mounted.
type Position struct {
	Major, Minor int
	Path         string // from the root of the filesystem
}

// Position is where something lies in its filesystem. The table has to be newer than the mount on which it is.
func (t Table) Position(d *dir.Dir) (Position, error) {
	m, err := t.MountOf(d)
	if err != nil {
		return Position{}, err
	}
	seen, err := dir.Seen(d)
	if err != nil {
		return Position{}, err
	}
	below, found := strings.CutPrefix(seen, strings.TrimSuffix(m.Mountpoint, "/"))
	if !found || m.Cut {
		return Position{}, fmt.Errorf("find %s in its filesystem: it is seen as %s, and its mount is at %s", d, seen, m.Mountpoint)
	}
	return Position{m.Major, m.Minor, path.Join(m.Root, below)}, nil
}

// Inside reports whether a position is another one, or below it.
func (p Position) Inside(of Position) bool {
	return p.Major == of.Major && p.Minor == of.Minor && (p.Path == of.Path || strings.HasPrefix(p.Path, strings.TrimSuffix(of.Path, "/")+"/"))
}
