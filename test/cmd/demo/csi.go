package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// The volumes, as they are made.
var (
	large    = drivertest.Volume{ID: "pvc-demo", Pool: poolName, Bytes: volumeBytes}
	small    = drivertest.Volume{ID: "pvc-small", Pool: poolName, Bytes: smallBytes}
	restored = drivertest.Volume{ID: "pvc-restored", Pool: poolName, Bytes: volumeBytes}
	disk     = drivertest.Volume{ID: "pvc-disk", Pool: poolName, Bytes: diskBytes, Block: true}
)

func (s *scene) askName(ctx context.Context) (answer, error) {
	info, err := s.Identity().GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return answer{}, err
	}
	return fine("%s", info.GetName())
}

func (s *scene) probe(ctx context.Context) (answer, error) {
	health, err := s.Identity().Probe(ctx, &csi.ProbeRequest{})
	if err != nil {
		return answer{}, err
	}
	if !health.GetReady().GetValue() {
		return answer{}, errors.New("the driver has become ready and is so no longer")
	}
	return fine("ready")
}

func (s *scene) askNode(ctx context.Context) (answer, error) {
	info, err := s.Kubelet().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	if err != nil {
		return answer{}, err
	}
	const key = "topology.hostpath.csi/node"
	if got := info.GetAccessibleTopology().GetSegments()[key]; got != nodeName {
		return answer{}, fmt.Errorf("%s is %q, want %q", key, got, nodeName)
	}
	return fine("%s", info.GetNodeId())
}

func (s *scene) askRoom(ctx context.Context) (answer, error) {
	room, err := s.Capacity(ctx, poolName)
	if err != nil {
		return answer{}, err
	}
	s.room = room
	return fine("%s", size(room))
}

// askRoomLeft allows for the capacity being reported in steps of up to 64 MiB.
func (s *scene) askRoomLeft(ctx context.Context) (answer, error) {
	const rounding = 64 << 20
	before := s.room
	left, err := s.askRoom(ctx)
	if err != nil {
		return answer{}, err
	}
	if s.room > before-volumeBytes+rounding {
		return answer{}, fmt.Errorf("%s of %s left, although %s are promised", size(s.room), size(before), size(volumeBytes))
	}
	return fine("%s, %s less", left.text, size(before-s.room))
}

func (s *scene) create(ctx context.Context) (answer, error) {
	return s.createVolume(ctx, large, s.enforced())
}

func (s *scene) createSmall(ctx context.Context) (answer, error) {
	return s.createVolume(ctx, small, s.enforced())
}

// createVolume expects the driver to promise the size asked for, and to report whether
// the kernel enforces it.
func (s *scene) createVolume(ctx context.Context, v drivertest.Volume, enforced bool) (answer, error) {
	created, err := s.Create(ctx, v)
	return wantCreated(created, err, v, enforced)
}

func wantCreated(created *csi.CreateVolumeResponse, err error, v drivertest.Volume, enforced bool) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	if got := created.GetVolume().GetCapacityBytes(); got != v.Bytes {
		return answer{}, fmt.Errorf("the volume has %d bytes, want %d", got, v.Bytes)
	}
	if got, want := created.GetVolume().GetVolumeContext()["sizeEnforced"], strconv.FormatBool(enforced); got != want {
		return answer{}, fmt.Errorf("sizeEnforced is %s, want %s", got, want)
	}
	return fine("%s, %s", v.ID, size(v.Bytes))
}

// enforced reports whether the kernel enforces the sizes of volumes.
func (s *scene) enforced() bool { return s.keeper != "" }

func (s *scene) grow(ctx context.Context) (answer, error) {
	return s.growTo(ctx, small, filler, grownBytes)
}

func (s *scene) growTo(ctx context.Context, v drivertest.Volume, pod string, bytes int64) (answer, error) {
	v.Bytes = bytes
	grown, err := s.Expand(ctx, v, pod)
	if err != nil {
		return answer{}, err
	}
	if got := grown.GetCapacityBytes(); got != bytes {
		return answer{}, fmt.Errorf("the volume has %d bytes, want %d", got, bytes)
	}
	return fine("%s", size(bytes))
}

func (s *scene) publish(ctx context.Context) (answer, error) {
	return s.publishOnce(ctx, large, writer, "mounted")
}

func (s *scene) publishSmall(ctx context.Context) (answer, error) {
	return s.publishOnce(ctx, small, filler, "mounted")
}

func (s *scene) publishAgain(ctx context.Context) (answer, error) {
	return s.publishOnce(ctx, large, writer, "still one mount")
}

func (s *scene) publishOnce(ctx context.Context, v drivertest.Volume, pod, text string) (answer, error) {
	if err := s.Publish(ctx, v, pod); err != nil {
		return answer{}, err
	}
	if err := s.wantMounts(pod, 1); err != nil {
		return answer{}, err
	}
	return fine("%s", text)
}

// The pods, by the names of their directories.
const (
	writer   = "pod-writer"
	filler   = "pod-filler"
	reader   = "pod-reader"
	intruder = "pod-intruder"
	machine  = "pod-machine"
)

func (s *scene) wantMounts(pod string, want int) error {
	mounts, err := mountns.Below(s.Target(pod))
	if err != nil {
		return err
	}
	if len(mounts) != want {
		return fmt.Errorf("%d mounts at %s, want %d", len(mounts), s.Target(pod), want)
	}
	return nil
}

func (s *scene) stats(ctx context.Context) (answer, error) {
	usage, err := s.bytesOf(ctx, large, writer)
	if err != nil {
		return answer{}, err
	}
	if usage.GetUsed() < int64(len(data())) {
		return answer{}, fmt.Errorf("%s used, although %s are written", size(usage.GetUsed()), size(int64(len(data()))))
	}
	return fine("%s of %s used", size(usage.GetUsed()), size(usage.GetTotal()))
}

// statsFull expects a volume to be distinguished from its pool.
func (s *scene) statsFull(ctx context.Context) (answer, error) {
	return s.statsBetween(ctx, small, filler, smallBytes-slack, smallBytes)
}

func (s *scene) statsUntouched(ctx context.Context) (answer, error) {
	return s.statsBetween(ctx, large, writer, int64(len(data())), volumeBytes)
}

func (s *scene) statsBetween(ctx context.Context, v drivertest.Volume, pod string, low, total int64) (answer, error) {
	if !s.enforced() {
		return notTried, nil
	}
	usage, err := s.bytesOf(ctx, v, pod)
	if err != nil {
		return answer{}, err
	}
	if used := usage.GetUsed(); usage.GetTotal() != total || used < low || used > low+2*slack {
		return answer{}, fmt.Errorf("%d of %d bytes used, want about %d of %d", used, usage.GetTotal(), low, total)
	}
	return fine("%s of %s used", size(usage.GetUsed()), size(usage.GetTotal()))
}

func (s *scene) bytesOf(ctx context.Context, v drivertest.Volume, pod string) (*csi.VolumeUsage, error) {
	stats, err := s.Stats(ctx, v.ID, pod)
	if err != nil {
		return nil, err
	}
	for _, usage := range stats.GetUsage() {
		if usage.GetUnit() == csi.VolumeUsage_BYTES {
			return usage, nil
		}
	}
	return nil, fmt.Errorf("no usage in bytes: %v", stats.GetUsage())
}

func (s *scene) publishReadOnly(ctx context.Context) (answer, error) {
	if err := s.PublishReadOnly(ctx, large, reader); err != nil {
		return answer{}, err
	}
	return fine("mounted")
}

// refusedAs expects a call to be answered with a code.
func refusedAs(err error, want codes.Code) (answer, error) {
	if got := status.Code(err); got != want {
		return answer{}, fmt.Errorf("got %s (%v), want %s", codeName(got), orNil(err), codeName(want))
	}
	return answer{"refused: " + codeName(want), refused}, nil
}

func (s *scene) publishHostile(ctx context.Context) (answer, error) {
	err := s.Publish(ctx, drivertest.Volume{ID: "../../etc", Pool: poolName}, intruder)
	if e := s.wantMounts(intruder, 0); e != nil {
		return answer{}, e
	}
	return refusedAs(err, codes.InvalidArgument)
}

func (s *scene) createTooLarge(ctx context.Context) (answer, error) {
	_, err := s.Create(ctx, drivertest.Volume{ID: "pvc-too-large", Pool: poolName, Bytes: s.room + volumeBytes})
	return refusedAs(err, codes.ResourceExhausted)
}

func (s *scene) deleteInUse(ctx context.Context) (answer, error) {
	return refusedAs(s.Delete(ctx, large.ID), codes.FailedPrecondition)
}

func (s *scene) crash(ctx context.Context) (answer, error) {
	if err := s.Process.Kill(); err != nil {
		return answer{}, err
	}
	if err := s.Process.Restart(ctx); err != nil {
		return answer{}, err
	}
	return fine("ready again")
}

func (s *scene) unpublish(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, large, writer)
}

func (s *scene) unpublishReadOnly(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, large, reader)
}

func (s *scene) unpublishSmall(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, small, filler)
}

func (s *scene) unpublishAt(ctx context.Context, v drivertest.Volume, pod string) (answer, error) {
	if err := s.Unpublish(ctx, v.ID, pod); err != nil {
		return answer{}, err
	}
	if _, err := os.Lstat(s.Target(pod)); !errors.Is(err, os.ErrNotExist) {
		return answer{}, fmt.Errorf("the target is still there (%v)", orNil(err))
	}
	return fine("unmounted and removed")
}

// takeSnapshot expects the snapshot to be complete: from then on it needs its volume no more.
func (s *scene) takeSnapshot(ctx context.Context) (answer, error) {
	snapshot, err := s.Snapshot(ctx, "snapshot-demo", large.ID, "")
	if err != nil {
		return answer{}, err
	}
	if !snapshot.GetReadyToUse() {
		return answer{}, errors.New("the snapshot is not ready to use")
	}
	s.snapshot = snapshot.GetSnapshotId()
	return fine("%s", s.snapshot)
}

func (s *scene) restore(ctx context.Context) (answer, error) {
	created, err := s.Restore(ctx, restored, s.snapshot)
	return wantCreated(created, err, restored, s.enforced())
}

func (s *scene) publishRestored(ctx context.Context) (answer, error) {
	return s.publishOnce(ctx, restored, writer, "mounted")
}

func (s *scene) unpublishRestored(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, restored, writer)
}

func (s *scene) removeRestored(ctx context.Context) (answer, error) {
	return s.removeVolume(ctx, restored)
}

// removeSnapshot expects none to be listed afterwards.
func (s *scene) removeSnapshot(ctx context.Context) (answer, error) {
	if err := s.DeleteSnapshot(ctx, s.snapshot); err != nil {
		return answer{}, err
	}
	left, err := s.Snapshots(ctx, "")
	if err != nil {
		return answer{}, err
	}
	if len(left) > 0 {
		return answer{}, fmt.Errorf("snapshots are still listed: %v", left)
	}
	return fine("it is gone")
}

func (s *scene) remove(ctx context.Context) (answer, error) {
	return s.removeVolume(ctx, large)
}

func (s *scene) removeSmall(ctx context.Context) (answer, error) {
	return s.removeVolume(ctx, small)
}

func (s *scene) removeVolume(ctx context.Context, v drivertest.Volume) (answer, error) {
	if err := s.Delete(ctx, v.ID); err != nil {
		return answer{}, err
	}
	if _, err := os.Lstat(filepath.Join(s.pool(), v.ID)); !errors.Is(err, os.ErrNotExist) {
		return answer{}, fmt.Errorf("its directory is still in the pool (%v)", orNil(err))
	}
	return fine("it is gone")
}
