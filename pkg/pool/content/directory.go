package content

import (
	"context"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// directoryMode lets pods that are not root write, whatever the umask.
const directoryMode = 0o777

// A Directory is the content of a directory volume: the volume's own directory.
type Directory struct {
	Host Host
	ID   volume.ID
	// Relabel says how much of a volume with a foreign SELinux label is relabelled.
	Relabel label.Scope
}

// Make lets pods into a new directory.
func (c Directory) Make(_ context.Context, d *dir.Dir) error {
	if c.Relabel != label.None {
		if _, err := c.Host.Labels.Ensure(d, label.Root); err != nil {
			return err
		}
	}
	return d.Chmod(directoryMode)
}

// Check has nothing to compare.
func (Directory) Check(*dir.Dir) error { return nil }

// Grow has nothing to do: a directory is as large as its limit.
func (Directory) Grow(context.Context, *dir.Dir, int64) error { return nil }

// Publish mounts the directory.
func (c Directory) Publish(ctx context.Context, d *dir.Dir, at Target) error {
	if changed, err := c.Host.Labels.Ensure(d, c.Relabel); err != nil {
		return err
	} else if changed {
		c.Host.Log.Info("Relabelled a volume", "volume", c.ID.String())
	}
	flags := at.Flags
	if at.ReadOnly {
		flags = flags.With(bind.ReadOnly())
	}
	return trace.Step(ctx, "mount", func() error {
		return MountError(c.Host.Mounts.Publish(d, at.Path, flags))
	})
}

// Measure has nothing to add.
func (Directory) Measure(_ *dir.Dir, space, _ dir.Space, _ *health.Facts) dir.Space { return space }
