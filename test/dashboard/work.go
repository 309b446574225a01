package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A volume is one that a worker has.
type volume struct {
	id, pool  string
	bytes     int64
	context   map[string]string
	published bool
}

var filesystem = &csi.VolumeCapability{
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
}

func (w *worker) controller() csi.ControllerClient { return csi.NewControllerClient(w.node.Conn()) }
func (w *worker) kubelet() csi.NodeClient          { return csi.NewNodeClient(w.node.Conn()) }

// work has all nodes work for that long, and two of them meet with something.
func (s *scene) work(ctx context.Context, duration time.Duration) error {
	errs := make([]error, len(s.workers))
	var all sync.WaitGroup
	for i, w := range s.workers {
		all.Go(func() {
			errs[i] = w.work(ctx, duration, w.incidents())
			if errs[i] != nil {
				errs[i] = fmt.Errorf("%s: %w\n%s", w.name, errs[i], w.node.Log())
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// An incident is something that happens at a part of the whole time.
type incident struct {
	at    float64
	cause func(context.Context) error
}

// incidents are for the picture: a dashboard shows little while all is well.
func (w *worker) incidents() []incident {
	switch w.name {
	case "node-a":
		return []incident{{0.5, w.lose}}
	case "node-b":
		return []incident{{0.35, w.keepTrash}, {0.4, func(context.Context) error { return w.node.Kill() }}, {0.48, w.node.Restart}}
	case "node-c":
		return []incident{{0.2, w.readOnly}}
	}
	return nil
}

// work makes, uses and deletes volumes, more of them as time goes on.
func (w *worker) work(ctx context.Context, duration time.Duration, incidents []incident) error {
	// The same work in each run.
	random := rand.New(rand.NewPCG(7, uint64(w.name[len(w.name)-1])))
	tick := time.NewTicker(300 * time.Millisecond)
	defer tick.Stop()
	for begin := time.Now(); time.Since(begin) < duration; {
		part := float64(time.Since(begin)) / float64(duration)
		if len(incidents) > 0 && part > incidents[0].at {
			if err := incidents[0].cause(ctx); err != nil {
				return err
			}
			incidents = incidents[1:]
		}
		if w.node.Running() {
			if err := w.step(ctx, random, part); err != nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// step is what a node may be asked within a moment.
func (w *worker) step(ctx context.Context, random *rand.Rand, part float64) error {
	for _, v := range w.volumes {
		if v.published && random.IntN(4) == 0 {
			_, err := w.kubelet().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: w.target(v.id)})
			if err != nil {
				return err
			}
		}
	}
	for _, pool := range w.pools {
		if _, err := w.controller().GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: map[string]string{"storagePool": pool}}); err != nil {
			return err
		}
	}
	wanted := 4 + int(24*part)
	switch dice := random.IntN(20); {
	case dice == 0:
		// More than there is: the scheduler learns of it this way.
		return w.create(ctx, w.pools[0], 64<<30)
	case len(w.volumes) < wanted || dice < 5:
		return w.begin(ctx, w.pools[random.IntN(len(w.pools))], int64(32+random.IntN(128))<<20, random.IntN(1500))
	case dice < 9:
		return w.end(ctx, random.IntN(len(w.volumes)))
	}
	return nil
}

// expected are the answers that a healthy driver gives in trouble: no room, and a pool
// that takes no writes.
func expected(err error) bool {
	return slices.Contains([]codes.Code{codes.OK, codes.ResourceExhausted, codes.Unavailable, codes.FailedPrecondition}, status.Code(err))
}

func unlessExpected(err error) error {
	if expected(err) {
		return nil
	}
	return err
}

func (w *worker) create(ctx context.Context, pool string, bytes int64) error {
	w.made++
	v := &volume{id: "pvc-" + w.name + "-" + strconv.Itoa(w.made), pool: pool, bytes: bytes}
	made, err := w.controller().CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name:               v.id,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{filesystem},
		Parameters:         map[string]string{"storagePool": pool},
	})
	if err != nil {
		return unlessExpected(err)
	}
	v.context = made.GetVolume().GetVolumeContext()
	w.volumes = append(w.volumes, v)
	return nil
}

// begin is the begin of a pod with a volume, into which it writes files of 4 KiB.
func (w *worker) begin(ctx context.Context, pool string, bytes int64, files int) error {
	had := len(w.volumes)
	if err := w.create(ctx, pool, bytes); err != nil || len(w.volumes) == had {
		return err
	}
	v := w.volumes[had]
	if err := os.MkdirAll(filepath.Dir(w.target(v.id)), 0o750); err != nil {
		return err
	}
	_, err := w.kubelet().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, TargetPath: w.target(v.id), VolumeCapability: filesystem, VolumeContext: v.context,
	})
	if err != nil {
		return unlessExpected(err)
	}
	v.published = true
	content := make([]byte, 4<<10)
	for i := range files {
		if err := os.WriteFile(filepath.Join(w.target(v.id), strconv.Itoa(i)), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// end is the end of that pod and of its claim.
func (w *worker) end(ctx context.Context, i int) error {
	v := w.volumes[i]
	if v.published {
		_, err := w.kubelet().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: w.target(v.id)})
		if err != nil {
			return err
		}
		v.published = false
	}
	if _, err := w.controller().DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id}); err != nil {
		return unlessExpected(err)
	}
	w.volumes = slices.Delete(w.volumes, i, i+1)
	return nil
}

// lose takes the directory of a volume out of the pool, as hands may do by mistake.
func (w *worker) lose(ctx context.Context) error {
	had := len(w.volumes)
	if err := w.create(ctx, w.pools[0], 64<<20); err != nil || len(w.volumes) == had {
		return err
	}
	lost := w.volumes[had]
	w.volumes = w.volumes[:had]
	return os.Rename(filepath.Join(w.pool(lost.pool), lost.id), filepath.Join(w.pool(lost.pool), ".away"))
}

// keepTrash leaves a volume whose content nobody may erase.
func (w *worker) keepTrash(ctx context.Context) error {
	had := len(w.volumes)
	if err := w.begin(ctx, w.pools[0], 32<<20, 100); err != nil || len(w.volumes) == had {
		return err
	}
	v := w.volumes[had]
	if err := setImmutable(filepath.Join(w.target(v.id), "0")); err != nil {
		return err
	}
	return w.end(ctx, had)
}

// readOnly has the filesystem of a pool take no writes any more, as it does itself when
// the disk fails.
func (w *worker) readOnly(context.Context) error {
	return syscall.Mount("", w.pool(w.pools[0]), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
}
