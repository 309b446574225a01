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

// slowdown is by how much the calls of others may take longer, in the middle of all, while a large
// directory is copied. On an idle machine it is about 1.2; a copy keeps one of its CPUs busy.
const slowdown = 3

// TestNobodyWaits publishes and measures a volume while the directory of another one, of many files,
// is copied, and while nothing is: in turns, so that a machine that is busy meets both.
func TestNobodyWaits(t *testing.T) {
	testenv.NeedRoot(t)
	files, rounds := 50_000, 4
	if testing.Short() {
		files, rounds = 2_000, 3
	}
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
	var alone, during []time.Duration
	for range rounds {
		made := make(chan error, 1)
		go func() {
			_, err := b.Snapshot(b.Context(), "s-1", many.ID, "")
			made <- err
		}()
		busy := b.callsUntil(made, other)
		during = append(during, busy...)
		for range busy {
			alone = append(alone, b.timedCalls(other))
		}
		b.Must(b.DeleteSnapshot(b.Context(), "s-1@"+drivertest.NodeName))
		b.AwaitNoTrash(b.pool.Path)
	}
	slices.Sort(alone)
	slices.Sort(during)
	if len(during) < 10 {
		t.Fatalf("only %d calls were made while the directory was copied", len(during))
	}
	middle := func(all []time.Duration) time.Duration { return all[len(all)/2] }
	ratio := float64(middle(during)) / float64(middle(alone))
	t.Logf("publish, measure, unpublish: %v alone, %v while %d files are copied: %.2f times; the slowest tenth %v and %v",
		middle(alone), middle(during), files, ratio, alone[len(alone)*9/10], during[len(during)*9/10])
	if ratio > slowdown {
		t.Errorf("calls take %.2f times as long, at most %d are allowed", ratio, slowdown)
	}
	b.delete(many.ID, other.ID)
}

// callsUntil makes calls on a volume until something is made.
func (b *bench) callsUntil(made <-chan error, v drivertest.Volume) (took []time.Duration) {
	b.Helper()
	for {
		select {
		case err := <-made:
			b.Must(err)
			return took
		default:
			took = append(took, b.timedCalls(v))
		}
	}
}

// timedCalls publishes, measures and unpublishes a volume.
func (b *bench) timedCalls(v drivertest.Volume) time.Duration {
	b.Helper()
	began := time.Now()
	b.Must(b.Publish(b.Context(), v, "pod"))
	_, err := b.Stats(b.Context(), v.ID, "pod")
	b.Must(err)
	b.Must(b.Unpublish(b.Context(), v.ID, "pod"))
	return time.Since(began)
}
