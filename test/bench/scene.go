package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	poolName  = "local"
	poolBytes = 4 << 30
	diskName  = "pvc-bench"
)

// A scene is a driver with one pool and a block volume that is published and has been
// written once, so that all of it is allocated and initialised.
type scene struct {
	dir  string
	node *node.Node
}

func setUp(ctx context.Context, o order) (*scene, error) {
	dir, err := os.MkdirTemp(o.dir, "bench-")
	if err != nil {
		return nil, fmt.Errorf("make a directory to work in: %w", err)
	}
	s := &scene{dir: dir}
	for _, step := range []func() error{
		func() error { return s.makePool(ctx, o.kind) },
		func() error { return s.startDriver(ctx) },
		func() error { return s.publishDisk(ctx, o.disk) },
		func() error { return s.writeDisk(o.disk) },
	} {
		if err := errors.Join(ctx.Err(), step()); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
}

func (s *scene) pool() string { return filepath.Join(s.dir, "pool") }

// device and file are the two ways to the content of the volume.
func (s *scene) device() string { return filepath.Join(s.dir, "pod", "device") }
func (s *scene) file() string   { return filepath.Join(s.pool(), diskName, "disk.img") }

func (s *scene) makePool(ctx context.Context, kind string) error {
	if err := os.Mkdir(s.pool(), 0o750); err != nil || kind == "" {
		return err
	}
	return loopfs.Mount(ctx, s.pool(), kind, poolBytes)
}

func (s *scene) startDriver(ctx context.Context) error {
	binary, err := node.Binary(ctx, s.dir)
	if err != nil {
		return err
	}
	s.node, err = node.Start(ctx, node.Config{
		Binary:  binary,
		Name:    "bench-node",
		Version: "bench",
		Pools:   []node.Pool{{Name: poolName, Path: s.pool()}},
	})
	return err
}

func (s *scene) publishDisk(ctx context.Context, bytes int64) error {
	access := &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER},
	}
	parameters := map[string]string{"storagePool": poolName}
	if _, err := csi.NewControllerClient(s.node.Conn()).CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               diskName,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{access},
		Parameters:         parameters,
	}); err != nil {
		return err
	}
	if err := os.Mkdir(filepath.Dir(s.device()), 0o750); err != nil {
		return err
	}
	_, err := csi.NewNodeClient(s.node.Conn()).NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId:         diskName,
		TargetPath:       s.device(),
		VolumeCapability: access,
		VolumeContext:    parameters,
	})
	return err
}

func (s *scene) writeDisk(bytes int64) error {
	disk, err := os.OpenFile(s.device(), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(i * 7)
	}
	for at := int64(0); at < bytes && err == nil; at += int64(len(content)) {
		_, err = disk.WriteAt(content, at)
	}
	return errors.Join(err, disk.Sync(), disk.Close())
}

// close takes the scene down, whatever state it is in.
func (s *scene) close() error {
	var problems []error
	if s.node != nil {
		problems = append(problems, s.node.Close())
	}
	mounts, err := mountns.Below(s.dir)
	problems = append(problems, err)
	detached := false
	for _, mount := range slices.Backward(mounts) {
		if mount == s.pool() {
			// The devices of its files would keep it busy.
			problems = append(problems, loopfs.Detach(s.pool()))
			detached = true
		}
		problems = append(problems, loopfs.Unmount(mount))
	}
	if !detached {
		problems = append(problems, loopfs.Detach(s.pool()))
	}
	return errors.Join(append(problems, os.RemoveAll(s.dir))...)
}
