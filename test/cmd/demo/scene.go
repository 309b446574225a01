package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	nodeName  = "demo-node"
	poolName  = "local"
	poolBytes = 8 << 30
)

// A scene is what the demo has set up, and what one step leaves for the next.
type scene struct {
	drivertest.Client
	dir string

	meter meter // of the step that is being taken
	calls int   // over all steps
	spent time.Duration

	keeper quota.Kind // what enforces the sizes of volumes; empty if nothing does
	room   int64      // the capacity last reported, in bytes
	device string     // that of the disk, such as loop7

	snapshot string // the handle of the snapshot
}

func setUp(ctx context.Context, table *table) (*scene, error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return nil, fmt.Errorf("make a temporary directory: %w", err)
	}
	s := &scene{dir: dir, Client: drivertest.Client{Targets: filepath.Join(dir, "pods")}}
	if err := s.startDriver(ctx, table); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *scene) startDriver(ctx context.Context, table *table) error {
	if os.Getenv(drivertest.BinaryVariable) == "" {
		table.note("Building hostpath-csi-driver ...")
	}
	binary, err := drivertest.Binary(ctx, s.dir)
	if err != nil {
		return err
	}
	if s.keeper, err = makePool(ctx, s.pool(), table); err != nil {
		return err
	}
	s.Process, err = drivertest.StartProcess(ctx, drivertest.Config{
		Binary:  binary,
		Name:    nodeName,
		Version: "demo",
		Pools:   []drivertest.PoolConfig{{Name: poolName, Path: s.pool()}},
		Dial:    []grpc.DialOption{grpc.WithUnaryInterceptor(s.meter.intercept)},
	})
	return err
}

func (s *scene) pool() string { return filepath.Join(s.dir, "pool") }

// close takes the scene down, whatever state it is in, and checks whether
// anything is left.
func (s *scene) close() error {
	var problems []error
	if s.Process != nil {
		problems = append(problems, s.Process.Close())
	}
	// Last mounted, first unmounted. A volume is still published if a step failed.
	mounts, err := mountns.Below(s.dir)
	problems = append(problems, err)
	for _, mount := range slices.Backward(mounts) {
		if mount == s.pool() {
			// The devices of its files would keep it busy.
			problems = append(problems, loopfs.Detach(mount))
		}
		problems = append(problems, loopfs.Unmount(mount))
	}
	problems = append(problems, os.RemoveAll(s.dir), leftovers(s.dir))
	return errors.Join(problems...)
}

// leftovers searches for mounts and loop devices of a directory that is gone.
func leftovers(dir string) error {
	var problems []error
	mounts, err := mountns.Below(dir)
	problems = append(problems, err)
	if len(mounts) > 0 {
		problems = append(problems, fmt.Errorf("still mounted: %s", strings.Join(mounts, ", ")))
	}
	devices, err := loopfs.Left(dir)
	problems = append(problems, err)
	if len(devices) > 0 {
		problems = append(problems, fmt.Errorf("still attached: %s", strings.Join(devices, ", ")))
	}
	return errors.Join(problems...)
}

// A meter counts the calls to the driver and the time until their answers.
type meter struct {
	calls int
	spent time.Duration
}

func (m *meter) intercept(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	begin := time.Now()
	err := invoke(ctx, method, request, answer, conn, options...)
	m.calls++
	m.spent += time.Since(begin)
	return err
}
