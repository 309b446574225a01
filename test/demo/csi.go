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

	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func (s *scene) identity() csi.IdentityClient     { return csi.NewIdentityClient(s.node.Conn()) }
func (s *scene) controller() csi.ControllerClient { return csi.NewControllerClient(s.node.Conn()) }
func (s *scene) kubelet() csi.NodeClient          { return csi.NewNodeClient(s.node.Conn()) }

// parameters are those of a StorageClass.
var parameters = map[string]string{"storagePool": poolName}

// writers is what the sidecars make of ReadWriteOnce, for a driver that knows the
// finer modes.
var writers = &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}

// The two modes of a PersistentVolume.
var (
	filesystem = &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: writers,
	}
	block = &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: writers,
	}
)

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
	made, err := s.createSized(ctx, volumeName, volumeBytes, filesystem)
	if err != nil {
		return answer{}, err
	}
	s.volume = made.GetVolume()
	return told(s.volume, volumeBytes, s.enforced())
}

func (s *scene) createSmall(ctx context.Context) (answer, error) {
	made, err := s.createSized(ctx, smallName, smallBytes, filesystem)
	if err != nil {
		return answer{}, err
	}
	s.small = made.GetVolume()
	return told(s.small, smallBytes, s.enforced())
}

// told expects the driver to promise what it was asked for, and to know who keeps it.
func told(volume *csi.Volume, bytes int64, enforced bool) (answer, error) {
	if got := volume.GetCapacityBytes(); got != bytes {
		return answer{}, fmt.Errorf("the volume has %d bytes, want %d", got, bytes)
	}
	if got, want := volume.GetVolumeContext()["sizeEnforced"], strconv.FormatBool(enforced); got != want {
		return answer{}, fmt.Errorf("the driver says of its size: enforced %s, want %s", got, want)
	}
	return fine("%s, %s", volume.GetVolumeId(), size(bytes))
}

// enforced tells whether the kernel keeps volumes within their sizes.
func (s *scene) enforced() bool { return s.keeper != "" }

func (s *scene) createSized(ctx context.Context, name string, bytes int64, access *csi.VolumeCapability) (*csi.CreateVolumeResponse, error) {
	return s.controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{access},
		Parameters:         parameters,
	})
}

func (s *scene) grow(ctx context.Context) (answer, error) {
	return s.growTo(ctx, s.small, filler, filesystem, grownBytes)
}

func (s *scene) growTo(ctx context.Context, volume *csi.Volume, pod string, access *csi.VolumeCapability, bytes int64) (answer, error) {
	grown, err := s.kubelet().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId:         volume.GetVolumeId(),
		VolumePath:       s.target(pod),
		CapacityRange:    &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapability: access,
	})
	if err != nil {
		return answer{}, err
	}
	if got := grown.GetCapacityBytes(); got != bytes {
		return answer{}, fmt.Errorf("the volume has %d bytes, want %d", got, bytes)
	}
	return fine("%s", size(bytes))
}

// publishAt makes the directory that kubelet would make, and publishes there.
func (s *scene) publishAt(ctx context.Context, id, pod string, access *csi.VolumeCapability, readOnly bool) error {
	target := s.target(pod)
	if err := os.MkdirAll(filepath.Dir(target), 0o750); err != nil {
		return fmt.Errorf("make the pod's directory: %w", err)
	}
	_, err := s.kubelet().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:         id,
		TargetPath:       target,
		VolumeCapability: access,
		VolumeContext:    s.volume.GetVolumeContext(),
		Readonly:         readOnly,
	})
	return err
}

func (s *scene) publish(ctx context.Context) (answer, error) {
	return s.publishOnce(ctx, s.volume, writer, "mounted")
}

func (s *scene) publishSmall(ctx context.Context) (answer, error) {
	return s.publishOnce(ctx, s.small, filler, "mounted")
}

func (s *scene) publishAgain(ctx context.Context) (answer, error) {
	return s.publishOnce(ctx, s.volume, writer, "still one mount")
}

func (s *scene) publishOnce(ctx context.Context, volume *csi.Volume, pod, text string) (answer, error) {
	if err := s.publishAt(ctx, volume.GetVolumeId(), pod, filesystem, false); err != nil {
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
	told, err := s.bytesOf(ctx, s.volume, writer)
	if err != nil {
		return answer{}, err
	}
	if told.GetUsed() < int64(len(data())) {
		return answer{}, fmt.Errorf("%s used, although %s are written", size(told.GetUsed()), size(int64(len(data()))))
	}
	return fine("%s of %s used", size(told.GetUsed()), size(told.GetTotal()))
}

// statsFull expects a volume to be told apart from its pool.
func (s *scene) statsFull(ctx context.Context) (answer, error) {
	return s.statsBetween(ctx, s.small, filler, smallBytes-slack, smallBytes)
}

func (s *scene) statsUntouched(ctx context.Context) (answer, error) {
	return s.statsBetween(ctx, s.volume, writer, int64(len(data())), volumeBytes)
}

func (s *scene) statsBetween(ctx context.Context, volume *csi.Volume, pod string, low, total int64) (answer, error) {
	if !s.enforced() {
		return notTried, nil
	}
	told, err := s.bytesOf(ctx, volume, pod)
	if err != nil {
		return answer{}, err
	}
	if used := told.GetUsed(); told.GetTotal() != total || used < low || used > low+2*slack {
		return answer{}, fmt.Errorf("%d of %d bytes used, want about %d of %d", used, told.GetTotal(), low, total)
	}
	return fine("%s of %s used", size(told.GetUsed()), size(told.GetTotal()))
}

func (s *scene) bytesOf(ctx context.Context, volume *csi.Volume, pod string) (*csi.VolumeUsage, error) {
	told, err := s.kubelet().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: volume.GetVolumeId(), VolumePath: s.target(pod),
	})
	if err != nil {
		return nil, err
	}
	for _, usage := range told.GetUsage() {
		if usage.GetUnit() == csi.VolumeUsage_BYTES {
			return usage, nil
		}
	}
	return nil, fmt.Errorf("no usage in bytes: %v", told.GetUsage())
}

func (s *scene) publishReadOnly(ctx context.Context) (answer, error) {
	if err := s.publishAt(ctx, s.volume.GetVolumeId(), reader, filesystem, true); err != nil {
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
	err := s.publishAt(ctx, "../../etc", intruder, filesystem, false)
	if e := s.wantMounts(intruder, 0); e != nil {
		return answer{}, e
	}
	return refusedAs(err, codes.InvalidArgument)
}

func (s *scene) createTooLarge(ctx context.Context) (answer, error) {
	_, err := s.createSized(ctx, volumeName+"-too-large", s.room+volumeBytes, filesystem)
	return refusedAs(err, codes.ResourceExhausted)
}

func (s *scene) deleteVolume(ctx context.Context, volume *csi.Volume) error {
	_, err := s.controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
	return err
}

func (s *scene) deleteInUse(ctx context.Context) (answer, error) {
	return refusedAs(s.deleteVolume(ctx, s.volume), codes.FailedPrecondition)
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

func (s *scene) unpublish(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, s.volume, writer)
}

func (s *scene) unpublishReadOnly(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, s.volume, reader)
}

func (s *scene) unpublishSmall(ctx context.Context) (answer, error) {
	return s.unpublishAt(ctx, s.small, filler)
}

func (s *scene) unpublishAt(ctx context.Context, volume *csi.Volume, pod string) (answer, error) {
	_, err := s.kubelet().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: volume.GetVolumeId(), TargetPath: s.target(pod),
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
	return s.removeVolume(ctx, s.volume)
}

func (s *scene) removeSmall(ctx context.Context) (answer, error) {
	return s.removeVolume(ctx, s.small)
}

func (s *scene) removeVolume(ctx context.Context, volume *csi.Volume) (answer, error) {
	if err := s.deleteVolume(ctx, volume); err != nil {
		return answer{}, err
	}
	if _, err := os.Lstat(filepath.Join(s.pool(), volume.GetVolumeId())); !errors.Is(err, os.ErrNotExist) {
		return answer{}, fmt.Errorf("its directory is still in the pool (%v)", orNil(err))
	}
	return fine("it is gone")
}
