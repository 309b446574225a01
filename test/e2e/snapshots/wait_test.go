package snapshots

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// TestCallsOnOtherVolumesDuringCopy makes calls on other volumes while a directory of many files is copied, and while
// nothing is: in turns, so that a machine that is busy meets both.
func TestCallsOnOtherVolumesDuringCopy(t *testing.T) {
	testenv.NeedRoot(t)
	// A copy keeps one CPU busy, and shares the log of the filesystem with who waits for a write to be
	// durable. Who waits for the copy itself takes hundreds of times as long. Few calls say less.
	files, slowdown, slowdownOfWrites := 50_000, 3.0, 10.0
	if testing.Short() {
		files, slowdown, slowdownOfWrites = 2_000, 10, 20
	}
	const enough = 20
	config := drivertest.PoolConfig{Name: "local", Path: testenv.LoopFS(t, "xfs", 2<<30)}
	d := drivertest.Start(t, drivertest.Config{Binary: drivertest.Built(t), Pools: []drivertest.PoolConfig{config}})
	b := &bench{Driver: d, pool: &drivertest.Pool{Driver: d, PoolConfig: config}}
	many, other := directory("pvc-many", size), directory("pvc-other", size)
	b.create(many)
	b.create(other)
	for i := range files {
		at := filepath.Join(b.path(many.ID), fmt.Sprint(i/1000))
		b.Must(os.MkdirAll(at, 0o755))
		b.Must(os.WriteFile(filepath.Join(at, fmt.Sprint(i)), []byte("content"), 0o600))
	}
	for _, c := range []struct {
		name     string
		slowdown float64
		call     func()
	}{
		{"publish, measure, unpublish", slowdown, func() {
			b.Must(b.Publish(b.Context(), other, "pod"))
			_, err := b.Stats(b.Context(), other.ID, "pod")
			b.Must(err)
			b.Must(b.Unpublish(b.Context(), other.ID, "pod"))
		}},
		{"create, delete", slowdownOfWrites, func() {
			v := directory("pvc-new", size)
			b.create(v)
			b.delete(v.ID)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.TB = t
			var alone, during []time.Duration
			middle := func(all []time.Duration) time.Duration {
				slices.Sort(all)
				return all[len(all)/2]
			}
			ratio := 0.0
			// What else the machine does may meet most of a few calls of one kind, and not most of many.
			for len(during) < enough || ratio > c.slowdown && len(during) < 10*enough {
				busy := b.whileCopying(many, c.call)
				during = append(during, busy...)
				for range busy {
					alone = append(alone, timed(c.call))
				}
				ratio = float64(middle(during)) / float64(middle(alone))
			}
			t.Logf("%v alone, %v while %d files are copied: %.2f times; the slowest tenth %v and %v",
				middle(alone), middle(during), files, ratio, alone[len(alone)*9/10], during[len(during)*9/10])
			if ratio > c.slowdown {
				t.Errorf("calls take %.2f times as long, at most %g are allowed", ratio, c.slowdown)
			}
		})
		b.TB = t
	}
	b.delete(many.ID, other.ID)
}

// whileCopying makes calls until a snapshot is made, which is then removed.
func (b *bench) whileCopying(v drivertest.Volume, call func()) (took []time.Duration) {
	b.Helper()
	made := make(chan error, 1)
	go func() {
		_, err := b.Snapshot(b.Context(), "s-1", v.ID, "")
		made <- err
	}()
	for {
		select {
		case err := <-made:
			b.Must(err)
			b.Must(b.DeleteSnapshot(b.Context(), "s-1@"+drivertest.NodeName))
			b.AwaitNoTrash(b.pool.Path)
			return took
		default:
			took = append(took, timed(call))
		}
	}
}

func timed(call func()) time.Duration {
	began := time.Now()
	call()
	return time.Since(began)
}
