package loop

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Kernel attaches devices by the loop driver.
type Kernel struct {
	dev   *dir.Dir
	pause func(ctx context.Context, d time.Duration) error
}

// NewKernel takes the directory of device nodes, which has to stay open: the host's
// own /dev, where the kernel makes the nodes of new devices (devtmpfs).
func NewKernel(dev *dir.Dir) *Kernel { return &Kernel{dev: dev, pause: pause} }

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// Attach makes the file a device, or answers the one that it is: ours, of the same
// ReadOnly, whatever its other options. Errors: ErrNoDevice; ErrForeign where the
// device is to be writable and somebody else's already is; ErrSize for a file whose
// size is not a multiple of Unit; ErrBusy for a device that is about to end and
// cannot be kept.
func (k *Kernel) Attach(f *File, o Options) (Device, error) {
	return Device{}, fmt.Errorf("attach %s: %w", f, errors.ErrUnsupported)
}

// Attached are all attached devices, those of others included. It opens each, for an
// instant.
func (k *Kernel) Attached() ([]Device, error) { return nil, errors.ErrUnsupported }

// Inspect asks about one device by the name of its node, in microseconds. It answers
// ErrNotAttached.
func (k *Kernel) Inspect(name string) (Device, error) { return Device{}, errors.ErrUnsupported }

// Grow makes the device as large as its file is now, while it is in use, and answers
// it as it is then. It answers ErrNotAttached if it is not that of the file any more.
func (k *Kernel) Grow(d Device) (Device, error) { return Device{}, errors.ErrUnsupported }

// Detach takes the device off its file. One that is not attached to it any more is no
// error. It answers ErrForeign for another's, and ErrBusy for one that somebody has
// open, which then stays attached: half a second is waited for those that only look
// at each device that changes, as udev does. A mount of the node that nobody has open
// does not keep a device: see to it that it is published nowhere.
func (k *Kernel) Detach(ctx context.Context, d Device) error { return errors.ErrUnsupported }
