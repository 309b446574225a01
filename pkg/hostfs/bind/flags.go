package bind

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrFlag reports a mount flag that is not supported for a bind mount.
var ErrFlag = errors.New("unknown mount flag")

// Flags are the mount attributes of a publication. The zero value keeps those of the
// directory's mount.
type Flags struct{ set, clear uint64 }

// known maps each mount flag, by its name in mount(8), to the attributes that it
// sets and clears. Access times are one value of several bits (mount_setattr(2)).
var known = map[string]Flags{
	"defaults":    {},
	"rw":          {},
	"ro":          {set: unix.MOUNT_ATTR_RDONLY},
	"nosuid":      {set: unix.MOUNT_ATTR_NOSUID},
	"suid":        {clear: unix.MOUNT_ATTR_NOSUID},
	"nodev":       {set: unix.MOUNT_ATTR_NODEV},
	"dev":         {clear: unix.MOUNT_ATTR_NODEV},
	"noexec":      {set: unix.MOUNT_ATTR_NOEXEC},
	"exec":        {clear: unix.MOUNT_ATTR_NOEXEC},
	"nodiratime":  {set: unix.MOUNT_ATTR_NODIRATIME},
	"diratime":    {clear: unix.MOUNT_ATTR_NODIRATIME},
	"noatime":     {set: unix.MOUNT_ATTR_NOATIME, clear: unix.MOUNT_ATTR__ATIME},
	"strictatime": {set: unix.MOUNT_ATTR_STRICTATIME, clear: unix.MOUNT_ATTR__ATIME},
	"relatime":    {clear: unix.MOUNT_ATTR__ATIME},
	"atime":       {clear: unix.MOUNT_ATTR__ATIME},
}

// ReadOnly is the flag of a read-only publication.
func ReadOnly() Flags { return known["ro"] }

// ParseFlags takes the names of mount(8); of two that contradict each other, the later
// wins. The error names all unknown ones.
func ParseFlags(names []string) (Flags, error) {
	var flags Flags
	var unknown []string
	for _, name := range names {
		f, ok := known[name]
		if !ok {
			unknown = append(unknown, fmt.Sprintf("%q", name))
			continue
		}
		if name == "rw" {
			flags.set &^= unix.MOUNT_ATTR_RDONLY
		}
		flags = flags.With(f)
	}
	if len(unknown) > 0 {
		return Flags{}, fmt.Errorf("%w: %s", ErrFlag, strings.Join(unknown, ", "))
	}
	return flags, nil
}

// With adds flags, which override contradicting ones.
func (f Flags) With(g Flags) Flags {
	return Flags{
		set:   f.set&^g.clear | g.set,
		clear: f.clear&^g.set | g.clear,
	}
}

// Set returns the attributes for a new mount, as fsmount(2) takes them.
func (f Flags) Set() uint64 { return f.set }

func (f Flags) attr() unix.MountAttr {
	clearBits := f.clear
	if clearBits&unix.MOUNT_ATTR__ATIME != 0 {
		// The kernel takes the access time field only as a whole.
		clearBits |= unix.MOUNT_ATTR__ATIME
	}
	return unix.MountAttr{Attr_set: f.set, Attr_clr: clearBits}
}

// statfsBits maps attributes to the bits of statfs(2).
var statfsBits = []struct {
	attr uint64
	st   int64
}{
	{unix.MOUNT_ATTR_RDONLY, unix.ST_RDONLY},
	{unix.MOUNT_ATTR_NOSUID, unix.ST_NOSUID},
	{unix.MOUNT_ATTR_NODEV, unix.ST_NODEV},
	{unix.MOUNT_ATTR_NOEXEC, unix.ST_NOEXEC},
	{unix.MOUNT_ATTR_NODIRATIME, unix.ST_NODIRATIME},
}

const statfsAtime = unix.ST_NOATIME | unix.ST_RELATIME

// statfs are the bits of statfs(2) that the flags name, and those of them that are set in a publication.
func (f Flags) statfs() (named, set int64) {
	for _, bit := range statfsBits {
		if (f.set|f.clear)&bit.attr != 0 {
			named |= bit.st
		}
		if f.set&bit.attr != 0 {
			set |= bit.st
		}
	}
	if f.clear&unix.MOUNT_ATTR__ATIME == 0 {
		return named, set
	}
	named |= statfsAtime
	switch {
	case f.set&unix.MOUNT_ATTR_NOATIME != 0:
		set |= unix.ST_NOATIME
	case f.set&unix.MOUNT_ATTR_STRICTATIME == 0:
		set |= unix.ST_RELATIME
	}
	return named, set
}
