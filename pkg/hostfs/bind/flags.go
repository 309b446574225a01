package bind

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrFlag reports a mount flag that a published directory cannot have.
var ErrFlag = errors.New("unknown mount flag")

// Flags are the attributes of a publication. The zero value takes those of the
// mount on which the directory lies.
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

// ReadOnly is the flag of a publication that nothing can be written through.
func ReadOnly() Flags { return known["ro"] }

// ParseFlags takes the names of mount(8); where two contradict, the later holds.
// All unknown ones are named in the error.
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

// With adds flags, which hold where they contradict.
func (f Flags) With(g Flags) Flags {
	return Flags{
		set:   f.set&^g.clear | g.set,
		clear: f.clear&^g.set | g.clear,
	}
}

func (f Flags) attr() unix.MountAttr {
	clearBits := f.clear
	if clearBits&unix.MOUNT_ATTR__ATIME != 0 {
		// The kernel takes the access time field only as a whole.
		clearBits |= unix.MOUNT_ATTR__ATIME
	}
	return unix.MountAttr{Attr_set: f.set, Attr_clr: clearBits}
}

// statfsBits maps attributes to what statfs(2) shows of them.
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

const (
	statfsAtime = unix.ST_NOATIME | unix.ST_RELATIME
	statfsMask  = statfsAtime | unix.ST_RDONLY | unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC | unix.ST_NODIRATIME
)

// statfs is what statfs(2) shows of a publication whose source shows base.
func (f Flags) statfs(base int64) int64 {
	want := base & statfsMask
	for _, bit := range statfsBits {
		if f.clear&bit.attr != 0 {
			want &^= bit.st
		}
		if f.set&bit.attr != 0 {
			want |= bit.st
		}
	}
	if f.clear&unix.MOUNT_ATTR__ATIME == 0 {
		return want
	}
	want &^= statfsAtime
	switch {
	case f.set&unix.MOUNT_ATTR_NOATIME != 0:
		want |= unix.ST_NOATIME
	case f.set&unix.MOUNT_ATTR_STRICTATIME == 0:
		want |= unix.ST_RELATIME
	}
	return want
}
