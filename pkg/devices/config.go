// Package devices decides which block devices of a node are offered as volumes, and cleans them between two users. It
// knows no Kubernetes: what the API has of the volumes is given to it, and it returns what to do there.
//
// Only the device of a volume that a claim had, and that was released, is written to. That is known by the volume and by a
// record on the node's disk, and not by how the device looks: any other one is open for reading only. A device is opened
// exclusively, is checked while it is held, and is cleaned through that very descriptor.
package devices

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Modes of a volume.
const (
	Filesystem = "Filesystem"
	Block      = "Block"
)

// DefaultStorageClass is the class of volumes where a configuration names none.
const DefaultStorageClass = "local-storage"

// A Wipe is a way to clean a device.
type Wipe string

// The ways to clean a device.
const (
	// WipeSignatures erases all signatures, the head, the tail, and where Ceph and btrfs have copies. What else was
	// on the device can still be read from it.
	WipeSignatures Wipe = "signatures"
	// WipeDiscard has the device forget everything, so that it reads as zeroes. A device that does not promise that
	// is overwritten.
	WipeDiscard Wipe = "discard"
	// WipeZero overwrites everything with zeroes.
	WipeZero Wipe = "zero"
)

// The keys of a configuration.
const (
	KeyStorageClass = "storageClassName"
	KeyVolumeMode   = "volumeMode"
	KeyFSType       = "fsType"
	KeyDeviceDir    = "deviceDir"
	KeyFilter       = "deviceNameFilter"
	KeyWipe         = "wipe"
	KeyPartitions   = "partitions"
)

var keys = []string{KeyStorageClass, KeyVolumeMode, KeyFSType, KeyDeviceDir, KeyFilter, KeyWipe, KeyPartitions}

// A Config says which devices of a node are offered, and how.
type Config struct {
	StorageClass string
	VolumeMode   string
	FSType       string // only of Filesystem volumes
	DeviceDir    string
	Filter       *regexp.Regexp
	Wipe         Wipe
	Partitions   Partitions
}

// ParseConfig reads the data of a ConfigMap. The error has all problems, each on a line of its own.
func ParseConfig(data map[string]string) (Config, error) {
	p := parser{data: data}
	c := Config{
		StorageClass: cmp.Or(data[KeyStorageClass], DefaultStorageClass),
		VolumeMode:   p.oneOf(KeyVolumeMode, "", Filesystem, Block),
		Wipe:         Wipe(p.oneOf(KeyWipe, string(WipeSignatures), string(WipeSignatures), string(WipeDiscard), string(WipeZero))),
		Partitions:   Partitions(p.oneOf(KeyPartitions, string(RefusePartitions), string(RefusePartitions), string(OfferPartitions))),
		DeviceDir:    p.directory(KeyDeviceDir),
		Filter:       p.expression(KeyFilter),
	}
	if c.VolumeMode == Filesystem {
		c.FSType = p.oneOf(KeyFSType, "", "ext4", "xfs", "btrfs")
	} else if data[KeyFSType] != "" && c.VolumeMode == Block {
		p.problem("%s is %q, and a volume of the mode %s has no filesystem; remove the key, or make %s %s", KeyFSType, data[KeyFSType], Block, KeyVolumeMode, Filesystem)
	}
	p.unknown()
	return c, errors.Join(p.problems...)
}

type parser struct {
	data     map[string]string
	problems []error
}

func (p *parser) problem(format string, args ...any) {
	p.problems = append(p.problems, fmt.Errorf(format, args...))
}

func (p *parser) required(key string) (string, bool) {
	value := p.data[key]
	if value == "" {
		p.problem("%s is missing", key)
	}
	return value, value != ""
}

// oneOf reads a key with few possible values. Without a default it is required.
func (p *parser) oneOf(key, otherwise string, allowed ...string) string {
	value := cmp.Or(p.data[key], otherwise)
	switch {
	case value == "":
		p.problem("%s is missing; it has to be %s", key, strings.Join(allowed, " or "))
	case !slices.Contains(allowed, value):
		p.problem("%s is %q; it has to be %s", key, value, strings.Join(allowed, " or "))
	}
	return value
}

func (p *parser) directory(key string) string {
	value, ok := p.required(key)
	if !ok {
		return ""
	}
	if !filepath.IsAbs(value) {
		p.problem("%s is %q; it has to be an absolute path", key, value)
		return value
	}
	info, err := os.Stat(value)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		p.problem("%s: there is no %s on this node", key, value)
	case err != nil:
		p.problem("%s: %v", key, err)
	case !info.IsDir():
		p.problem("%s: %s is not a directory", key, value)
	}
	return value
}

func (p *parser) expression(key string) *regexp.Regexp {
	value, ok := p.required(key)
	if !ok {
		return nil
	}
	expression, err := regexp.Compile(value)
	if err != nil {
		p.problem("%s is %q: %v", key, value, err)
	}
	return expression
}

// unknown reports keys that are ours but for a typing error, or were: others are ignored, as they always were.
func (p *parser) unknown() {
	for key := range p.data {
		if strings.EqualFold(key, "existingData") {
			p.problem("%s is not known any more: no device that was not a PersistentVolume is overwritten; remove the key, and erase the device by hand (blkdiscard --zeroout DEVICE)", key)
		}
		for _, ours := range keys {
			if key != ours && strings.EqualFold(key, ours) {
				p.problem("%s is not known; the key is %s", key, ours)
			}
		}
	}
}
