package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// pageEntries are so many that what the page itself costs does not count.
	pageEntries = 100
	// statsID is the volume of each pool that is published.
	statsID = "pvc-0-stats"
	// scrapes are so many that the driver's memory has seen what each of them takes.
	scrapes = 20
)

// scaleRows compare a driver whose pool has many volumes with one whose pool has a tenth of them or none. All of
// them run at the same time.
func scaleRows(ctx context.Context, s *scene) ([]comparison, error) {
	var at [3]*actor
	for i, volumes := range []int{0, s.order.volumes / 10, s.order.volumes} {
		var err error
		if at[i], err = s.enterWith(ctx, volumes); err != nil {
			return nil, err
		}
	}
	none, tenth, many := at[0], at[1], at[2]
	with := ", " + thousands(s.order.volumes) + " volumes"
	one := func(name string, fewer int, how func(a *actor) measureFunc, other *actor) comparison {
		return comparison{
			name: name + with, unit: micros, samples: s.order.fewer(fewer), budget: budget{atMost: 1.5}, ours: how(many), limit: how(other),
		}
	}
	// Compared with an empty call of the same driver.
	empty := func(name string, call action, atMost float64) comparison {
		return comparison{
			name: name + with, unit: micros, samples: s.order.fewer(3), budget: budget{atMost: atMost},
			ours: timed(nothing, call, nothing), limit: timed(nothing, many.ask, nothing),
		}
	}
	start := func(a *actor) measureFunc {
		return timed(func(context.Context) error { return a.Process.Stop() }, a.restart, nothing)
	}
	const fresh = "pvc-1-new"
	return []comparison{
		one("CreateVolume", 10, func(a *actor) measureFunc {
			return timed(nothing, a.create(fresh, volumeBytes), inOrder(a.remove(fresh), settled(a.pool())))
		}, none),
		one("NodeGetVolumeStats", 3, func(a *actor) measureFunc { return timed(nothing, a.stats(statsID), nothing) }, none),
		one("GetCapacity", 3, func(a *actor) measureFunc { return timed(nothing, a.capacity, nothing) }, none),
		one(fmt.Sprintf("ListVolumes, a page of %d", pageEntries), 3, func(a *actor) measureFunc { return timed(nothing, a.page, nothing) }, tenth),
		empty("NodeGetVolumeHealth", many.volumeHealth, 1.5),
		empty("ControllerListVolumeHealth, all healthy", many.listIll, 2),
		// Starts come last: the calls are of drivers that have been running for a while.
		{name: "start" + with, unit: micros, budget: budget{max: 0.5e6}, ours: start(many), limit: timed(nothing, many.readRecords, nothing)},
		{name: "start, no volumes", unit: micros, ours: start(none)},
		{name: "memory" + with, unit: mebibytes, budget: budget{max: 48}, ours: many.memory},
		{name: "memory, no volumes", unit: mebibytes, ours: none.memory},
	}, nil
}

// enterWith starts a driver on a pool with volumes, and one more.
func (s *scene) enterWith(ctx context.Context, volumes int) (*actor, error) {
	a, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	// Names are as long as external-provisioner makes them: the driver remembers all of them.
	err = inParallel(16, volumes, func(i int) error {
		return a.create(fmt.Sprintf("pvc-00000000-0000-4000-8000-%012d", i), volumeBytes)(ctx)
	})
	if err != nil {
		return nil, err
	}
	return a, inOrder(a.create(statsID, volumeBytes), a.publish(statsID))(ctx)
}

// restart starts a driver that was stopped, and waits until its pool serves: calls are taken before.
func (a *actor) restart(ctx context.Context) error {
	if err := a.Process.Restart(ctx); err != nil {
		return err
	}
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		err := a.stats(statsID)(ctx)
		if status.Code(err) != codes.Unavailable {
			return err
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// page asks for the first volumes.
func (a *actor) page(ctx context.Context) error {
	_, err := a.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: pageEntries})
	return err
}

// volumeHealth asks for the health of the published volume.
func (a *actor) volumeHealth(ctx context.Context) error {
	got, err := a.Kubelet().NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: statsID, VolumePublishPath: a.Target(statsID)})
	if err == nil && len(got.GetVolumeHealth().GetHealthStatuses()) > 0 {
		return fmt.Errorf("the volume is not healthy: %v", got)
	}
	return err
}

// listIll asks for the volumes that are not healthy. There are none.
func (a *actor) listIll(ctx context.Context) error {
	got, err := a.Controller().ControllerListVolumeHealth(ctx, &csi.ControllerListVolumeHealthRequest{})
	if err == nil && len(got.GetEntries()) > 0 {
		return fmt.Errorf("volumes are not healthy: %v", got)
	}
	return err
}

// readRecords does what cannot be left out to know the volumes of a pool.
func (a *actor) readRecords(context.Context) error {
	if _, err := os.ReadDir(a.pool()); err != nil {
		return err
	}
	records := filepath.Join(a.pool(), ".hostpath-provisioner", "volumes")
	entries, err := os.ReadDir(records)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if _, err := os.ReadFile(filepath.Join(records, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// memory is the most that the driver had since its start (proc_pid_status(5)), after what is done to it all day:
// external-health-monitor asks for all volumes, in pages as large as the driver likes, and Prometheus for the metrics.
func (a *actor) memory(ctx context.Context) (float64, error) {
	_, err := a.List(ctx, 0)
	for range scrapes {
		_, e := a.Metrics(ctx)
		err = errors.Join(err, e)
	}
	if err != nil {
		return 0, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Process.Pid()))
	if err != nil {
		return 0, err
	}
	_, most, _ := strings.Cut(string(text), "VmHWM:")
	var kib float64
	_, err = fmt.Sscanf(most, "%f kB", &kib)
	return kib / 1024, err
}
