package devices

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// A Found is a device in the directory of the configuration.
type Found struct {
	Number blockdev.Number
	// Path is the first that leads to it, which a new volume gets.
	Path string
}

// Scan finds the devices of the configuration, in the order of their paths, each once.
// The directory itself may be a link. What cannot be read is a problem of its own, and keeps no other device from being found.
func Scan(c Config) (found []Found, directories []string, problems []Problem) {
	s := scanner{filter: c.Filter}
	// No error ends it.
	_ = filepath.WalkDir(c.DeviceDir+"/", func(path string, entry fs.DirEntry, err error) error {
		s.visit(path, entry, err)
		return nil
	})
	return s.found, s.directories, s.problems
}

type scanner struct {
	filter      *regexp.Regexp
	found       []Found
	directories []string
	problems    []Problem
}

func (s *scanner) visit(path string, entry fs.DirEntry, err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return // it has just gone
	case err != nil:
		s.problems = append(s.problems, Problem{Path: path, Reason: Unreadable, Detail: err.Error()})
		return
	case entry.IsDir():
		s.directories = append(s.directories, path)
		return
	case !s.filter.MatchString(filepath.Base(path)):
		return
	}
	number, err := blockdev.At(path)
	if errors.Is(err, blockdev.ErrNotBlock) {
		return // as /dev/mapper/control, or a link to a directory, which is not followed
	}
	if err != nil {
		s.problems = append(s.problems, Problem{Path: path, Reason: reasonOf(err), Detail: err.Error()})
		return
	}
	if !slices.ContainsFunc(s.found, func(f Found) bool { return f.Number == number }) {
		s.found = append(s.found, Found{number, path})
	}
}

// A Reason is why a device is not offered or cleaned, in one word for events and metrics.
type Reason string

// The reasons.
const (
	New           Reason = "New"
	Attaching     Reason = "Attaching"
	Unreadable    Reason = "Unreadable"
	NotABlock     Reason = "NotABlockDevice"
	Gone          Reason = "Gone"
	Empty         Reason = "ZeroSize"
	ReadOnly      Reason = "ReadOnly"
	HasHolders    Reason = "HasHolders"
	HasPartitions Reason = "HasPartitions"
	DiskInUse     Reason = "DiskIsOffered"
	HasLoop       Reason = "FileOfLoopDevice"
	IsSwap        Reason = "Swap"
	Mounted       Reason = "Mounted"
	InUse         Reason = "InUse"
	Hidden        Reason = "UsersHidden"
	IsPartition   Reason = "IsPartition"
	Reserved      Reason = "ReservedPartition"
	HasData       Reason = "HasData"
	MayBeMissing  Reason = "MayBeMissing"
	NotIdentified Reason = "NotIdentified"
	HalfClean     Reason = "HalfClean"
	HasSignature  Reason = "HasSignature"
	WasBound      Reason = "VolumeDisappeared"
	OtherDevice   Reason = "OtherDevice"
	Twice         Reason = "OfferedTwice"
	OfOthers      Reason = "ForeignVolume"
	NotConfirmed  Reason = "NotConfirmed"
	NotOffered    Reason = "NotOffered"
	Contradiction Reason = "RecordDiffers"
	Failed        Reason = "IOError"
	Hangs         Reason = "DoesNotAnswer"
)

// UsedByNode says that a device without a volume is refused because the node has it for itself, as its system disk is, or may be about to: no
// error.
func (p Problem) UsedByNode() bool {
	switch p.Reason {
	case New, Attaching, Mounted, IsSwap, InUse, HasHolders, HasLoop, HasPartitions, DiskInUse, IsPartition, Reserved:
		return p.Volume == ""
	}
	return false
}

// A Problem is a device that cannot be used, or a volume whose device is not as it was.
type Problem struct {
	// Volume is the volume's name, if the device has one.
	Volume string
	Path   string
	Reason Reason
	Detail string
}

// Error has all fields.
func (p Problem) Error() string {
	if strings.Contains(p.Detail, p.Path) {
		return fmt.Sprintf("%s: %s", p.Reason, p.Detail)
	}
	return fmt.Sprintf("%s: %s: %s", p.Path, p.Reason, p.Detail)
}

func reasonOf(err error) Reason {
	var p Problem
	switch {
	case errors.As(err, &p):
		return p.Reason
	case errors.Is(err, blockdev.ErrNotBlock):
		return NotABlock
	case errors.Is(err, blockdev.ErrGone):
		return Gone
	case errors.Is(err, blockdev.ErrBusy):
		return InUse
	case errors.Is(err, blockdev.ErrHidden):
		return Hidden
	case errors.Is(err, blockdev.ErrReadOnly):
		return ReadOnly
	}
	return Failed
}
