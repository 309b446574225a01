package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func (s *scene) identity() csi.IdentityClient     { return csi.NewIdentityClient(s.node.Conn()) }
func (s *scene) controller() csi.ControllerClient { return csi.NewControllerClient(s.node.Conn()) }
func (s *scene) kubelet() csi.NodeClient          { return csi.NewNodeClient(s.node.Conn()) }

// parameters are those of a StorageClass.
var parameters = map[string]string{"storagePool": poolName}

// filesystem is what the sidecars make of ReadWriteOnce, for a driver that knows
// the finer modes.
var filesystem = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
}

func (s *scene) askName(ctx context.Context) (answer, error) {
	info, err := s.identity().GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return answer{}, err
	}
	return fine("%s", info.GetName())
}

func (s *scene) probe(ctx context.Context) (answer, error) {
	health, err := s.identity().Probe(ctx, &csi.ProbeRequest{})
	if err != nil {
		return answer{}, err
	}
	if !health.GetReady().GetValue() {
		return answer{}, errors.New("the driver has become ready and is so no longer")
	}
	return fine("ready")
}

func (s *scene) askNode(ctx context.Context) (answer, error) {
	info, err := s.kubelet().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
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
	capacity, err := s.controller().GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: parameters})
	if err != nil {
		return answer{}, err
	}
	s.room = capacity.GetAvailableCapacity()
	return fine("%s", size(s.room))
}

// askRoomLeft allows for the capacity being told in steps of up to 64 MiB.
func (s *scene) askRoomLeft(ctx context.Context) (answer, error) {
	const rounding = 64 << 20
	before := s.room
	told, err := s.askRoom(ctx)
	if err != nil {
		return answer{}, err
	}
	if s.room > before-volumeBytes+rounding {
		return answer{}, fmt.Errorf("%s of %s left, although %s are promised", size(s.room), size(before), size(volumeBytes))
	}
	return fine("%s, %s less", told.text, size(before-s.room))
}

func (s *scene) create(ctx context.Context) (answer, error) {
	made, err := s.createSized(ctx, volumeName, volumeBytes)
	if err != nil {
		return answer{}, err
	}
	s.volume = made.GetVolume()
	if got := s.volume.GetCapacityBytes(); got != volumeBytes {
		return answer{}, fmt.Errorf("the volume has %d bytes, want %d", got, int64(volumeBytes))
	}
	return fine("%s, %s", s.volume.GetVolumeId(), size(s.volume.GetCapacityBytes()))
}

func (s *scene) createSized(ctx context.Context, name string, bytes int64) (*csi.CreateVolumeResponse, error) {
	return s.controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{filesystem},
		Parameters:         parameters,
	})
}

// publishAt makes the directory that kubelet would make, and publishes there.
func (s *scene) publishAt(ctx context.Context, id, pod string, readOnly bool) error {
	target := s.target(pod)
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return fmt.Errorf("make the pod's directory: %w", err)
	}
	_, err := s.kubelet().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:         id,
		TargetPath:       target,
		VolumeCapability: filesystem,
		VolumeContext:    s.volume.GetVolumeContext(),
		Readonly:         readOnly,
	})
	return err
}

func (s *scene) publish(ctx context.Context) (answer, error) {
	if err := s.publishAt(ctx, s.volume.GetVolumeId(), writer, false); err != nil {
		return answer{}, err
	}
	if err := s.wantMounts(writer, 1); err != nil {
		return answer{}, err
	}
	return fine("mounted")
}

// The pods, by the names of their directories.
const (
	writer   = "pod-writer"
	reader   = "pod-reader"
	intruder = "pod-intruder"
)

func (s *scene) wantMounts(pod string, want int) error {
	mounts, err := mountns.Below(s.target(pod))
	if err != nil {
		return err
	}
	if len(mounts) != want {
		return fmt.Errorf("%d mounts at %s, want %d", len(mounts), s.target(pod), want)
	}
	return nil
}

func (s *scene) stats(ctx context.Context) (answer, error) {
	told, err := s.kubelet().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: s.volume.GetVolumeId(), VolumePath: s.target(writer),
	})
	if err != nil {
		return answer{}, err
	}
	if condition := told.GetVolumeCondition(); condition.GetAbnormal() {
		return answer{}, fmt.Errorf("the volume is abnormal: %s", condition.GetMessage())
	}
	for _, usage := range told.GetUsage() {
		if usage.GetUnit() == csi.VolumeUsage_BYTES && usage.GetUsed() >= int64(len(data())) {
			return fine("%s of %s used", size(usage.GetUsed()), size(usage.GetTotal()))
		}
	}
	return answer{}, fmt.Errorf("no usage in bytes that has the %s written: %v", size(int64(len(data()))), told.GetUsage())
}

func (s *scene) publishReadOnly(ctx context.Context) (answer, error) {
	if err := s.publishAt(ctx, s.volume.GetVolumeId(), reader, true); err != nil {
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
	err := s.publishAt(ctx, "../../etc", intruder, false)
	if e := s.wantMounts(intruder, 0); e != nil {
		return answer{}, e
	}
	return refusedAs(err, codes.InvalidArgument)
}

func (s *scene) createTooLarge(ctx context.Context) (answer, error) {
	_, err := s.createSized(ctx, volumeName+"-too-large", s.room+volumeBytes)
	return refusedAs(err, codes.ResourceExhausted)
}

func (s *scene) deleteVolume(ctx context.Context) error {
	_, err := s.controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: s.volume.GetVolumeId()})
	return err
}

func (s *scene) deleteInUse(ctx context.Context) (answer, error) {
	return refusedAs(s.deleteVolume(ctx), codes.FailedPrecondition)
}

func (s *scene) crash(ctx context.Context) (answer, error) {
	if err := s.node.Kill(); err != nil {
		return answer{}, err
	}
	if err := s.node.Restart(ctx); err != nil {
		return answer{}, err
	}
	return fine("ready again")
}

func (s *scene) publishAgain(ctx context.Context) (answer, error) {
	if err := s.publishAt(ctx, s.volume.GetVolumeId(), writer, false); err != nil {
		return answer{}, err
	}
	if err := s.wantMounts(writer, 1); err != nil {
		return answer{}, err
	}
	return fine("still one mount")
}

func (s *scene) unpublish(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, writer)
}

func (s *scene) unpublishReadOnly(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, reader)
}

func (s *scene) unpublishAt(ctx context.Context, pod string) (answer, error) {
	_, err := s.kubelet().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: s.volume.GetVolumeId(), TargetPath: s.target(pod),
	})
	if err != nil {
		return answer{}, err
	}
	if _, err := os.Lstat(s.target(pod)); !errors.Is(err, os.ErrNotExist) {
		return answer{}, fmt.Errorf("the target is still there (%v)", orNil(err))
	}
	return fine("unmounted and removed")
}

func (s *scene) remove(ctx context.Context) (answer, error) {
	if err := s.deleteVolume(ctx); err != nil {
		return answer{}, err
	}
	if _, err := os.Lstat(filepath.Join(s.pool(), s.volume.GetVolumeId())); !errors.Is(err, os.ErrNotExist) {
		return answer{}, fmt.Errorf("its directory is still in the pool (%v)", orNil(err))
	}
	return fine("it is gone")
}
