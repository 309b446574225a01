package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/freezer"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// freeze stops the pods that have the source published, for no longer than is allowed.
func (s *source) freeze(ctx context.Context) (still context.Context, thaw func() error, err error) {
	pods, err := s.pods()
	if err != nil {
		return nil, nil, err
	}
	unchanged := func() error {
		now, err := s.pods()
		return errors.Join(err, noOthers(now, pods))
	}
	if len(pods) == 0 {
		return ctx, unchanged, nil
	}
	limit := s.way.frozenAtMost()
	limited, cancel := context.WithTimeoutCause(ctx, limit, errTooLong)
	still, thawed, err := s.in.Pool.Options.Freezer.Freeze(limited, pods)
	if err != nil {
		cancel()
		return nil, nil, err
	}
	return still, func() error {
		defer cancel()
		err := thawed()
		if errors.Is(context.Cause(limited), errTooLong) {
			return fmt.Errorf("%w: %s", errTooLong, limit)
		}
		return errors.Join(err, unchanged())
	}, nil
}

// noOthers returns ErrPrecondition if another pod than those that were stopped has the source now. It did not stand still, and what it has written
// through a mapping may not show.
func noOthers(now, stopped []freezer.Pod) error {
	for _, pod := range now {
		if !slices.Contains(stopped, pod) {
			return fmt.Errorf("%w: pod %s got it while the others were being frozen", volume.ErrPrecondition, pod)
		}
	}
	return nil
}

// frozenAtMost is for how long pods may be frozen.
func (w CopyWay) frozenAtMost() time.Duration {
	if w.MaxStall > 0 {
		return min(freezer.Limit, w.MaxStall)
	}
	return freezer.Limit
}

// errTooLong reports a copy that takes longer than pods may be frozen.
var errTooLong = errors.New("what changed could not be copied within the time for which pods may be frozen")

// pods are those that have the source published, by the mount table.
func (s *source) pods() ([]freezer.Pod, error) {
	published, err := s.in.Use(s.id, s.entry, s.dir).Published()
	if err != nil {
		return nil, err
	}
	var pods []freezer.Pod
	for _, at := range published {
		pod, ok := freezer.PodAt(at.Path)
		if !ok {
			return nil, fmt.Errorf("%w: it is published at %s, which is not in the directory of a pod: the driver cannot determine which pod to freeze", volume.ErrPrecondition, at.Path)
		}
		pods = append(pods, pod)
	}
	slices.SortFunc(pods, func(a, b freezer.Pod) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(pods), nil
}

// refused turns the reasons against a copy of what others use into errors of the domain.
func refused(err error) error {
	switch {
	case errors.Is(err, freezer.ErrBusy):
		return fmt.Errorf("%w: a pod that uses it is frozen: %w", volume.ErrBusy, err)
	case errors.Is(err, freezer.ErrUnavailable):
		return fmt.Errorf("%w: the class asks for consistency: freeze, which needs the component deploy/csi/freeze: %w", volume.ErrPrecondition, err)
	case errors.Is(err, freezer.ErrThawed), errors.Is(err, freezer.ErrUnstoppable), errors.Is(err, errTooLong):
		return fmt.Errorf("%w: %w", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrTooMany):
		return fmt.Errorf("%w: %w, longer than pods may be frozen: they were not", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrLeased):
		return fmt.Errorf("%w: %w: have the process end its lease, or the pod", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrMounted):
		return fmt.Errorf("%w: %w: unmount it, or the copy would lack what is below", volume.ErrPrecondition, err)
	case errors.Is(err, clone.ErrFuture):
		return fmt.Errorf("%w: %w, so that no change of it would be found out before that: unpublish the volume, or have the file take the ctime of now (touch -c -h -a)", volume.ErrPrecondition, err)
	case errors.Is(err, syscall.EDQUOT): // no other node could do better
		return fmt.Errorf("%w: a copy takes more than is counted of the original, whose files are compressed or share blocks, or which grew meanwhile: %v", volume.ErrPrecondition, err)
	case errors.Is(err, dir.ErrMoved):
		return fmt.Errorf("%w: %w", volume.ErrPrecondition, err)
	case uncopyable(err) != "":
		return fmt.Errorf("%w: %s: %w", volume.ErrPrecondition, uncopyable(err), err)
	case errors.Is(err, clone.ErrFragmented):
		return fmt.Errorf("%w: %w, longer than maxStall of the VolumeSnapshotClass allows: have the file rewritten "+
			"(xfs_fsr, btrfs filesystem defragment), or choose a class with a larger maxStall", volume.ErrPrecondition, err)
	}
	return err
}

// uncopyable is why a file can never be copied as its user has made it; empty for another error.
func uncopyable(err error) string {
	switch {
	case errors.Is(err, syscall.E2BIG):
		return "the names of its extended attributes are more than the kernel lists (64 KiB)"
	case errors.Is(err, syscall.EMLINK):
		return "a file has as many hard links as its filesystem allows, and a copy takes one more meanwhile"
	case errors.Is(err, clone.ErrEncrypted):
		return "it has files or directories that its user has encrypted"
	}
	return ""
}
