// Package content has the kinds of what a volume consists of, behind one interface: a directory
// (directory.go), or a disk, which is a file that loop devices make a block device (disk.go,
// devices.go). Where the volume lies, what was promised and who may use it is up to others.
package content

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Mounts publishes directories and devices, as bind.Kernel does.
type Mounts interface {
	Publish(source *dir.Dir, target bind.Target, flags bind.Flags) error
	PublishDevice(dev *dir.Dir, name string, target bind.Target) error
	Published(parent *dir.Dir) (map[string][]bind.Publication, error)
	Open(target bind.Target) (*dir.Dir, error)
}

// Labels labels directories for containers, as label.Kernel does.
type Labels interface {
	Ensure(root *dir.Dir, scope label.Scope) (changed bool, err error)
}

// Devices makes files block devices, as loop.Kernel does.
type Devices interface {
	Attach(f *loop.File, o loop.Options) (loop.Device, error)
	Attached(fileNames ...string) ([]loop.Device, error)
	Inspect(name string) (loop.Device, error)
	FilePath(name string) (string, error)
	Grow(d loop.Device) (loop.Device, error)
	Detach(ctx context.Context, d loop.Device) error
	Restore(d loop.Device) (loop.Device, error)
	CheckNodes() error
	OnDeleted(fileName string) ([]loop.Device, error)
}

// A Host is what contents need of the node.
type Host struct {
	Mounts  Mounts
	Labels  Labels
	Devices Devices
	Dev     *dir.Dir // has the nodes of the devices: the host's /dev
	Log     logr.Logger
}

// Content is what a volume consists of, inside the directory that every volume has.
type Content interface {
	// Make makes the content of a new volume in its directory.
	Make(ctx context.Context, d *dir.Dir) error
	// Check returns volume.ErrLost for content that is not what was promised.
	Check(d *dir.Dir) error
	// Grow makes room for so many bytes before they are recorded. What of it fails changes
	// nothing.
	Grow(ctx context.Context, d *dir.Dir, bytes int64) error
	// Publish makes the content appear at a target. Errors: volume.ErrInvalid, ErrExists,
	// ErrInUse, ErrLost, ErrNoSpace for a node without devices, ErrUnavailable.
	Publish(ctx context.Context, d *dir.Dir, at Target) error
	// Measure adds to the facts of a volume in such a filesystem, and returns its space, which
	// is the one given unless the content has one of its own.
	Measure(d *dir.Dir, space, filesystem dir.Space, facts *health.Facts) dir.Space
}

// A Target is where and how a volume is to be published.
type Target struct {
	Path bind.Target
	// Flags are those of the mount of a directory.
	Flags    bind.Flags
	ReadOnly bool
}

// MountError translates the errors of the mount facility into those of pkg/volume.
func MountError(err error) error {
	switch {
	case errors.Is(err, bind.ErrTarget), errors.Is(err, bind.ErrFlag):
		return fmt.Errorf("%w: %w", volume.ErrInvalid, err)
	case errors.Is(err, bind.ErrOccupied):
		return fmt.Errorf("%w: %w", volume.ErrExists, err)
	case errors.Is(err, bind.ErrBusy):
		return fmt.Errorf("%w: %w", volume.ErrInUse, err)
	}
	return err
}
