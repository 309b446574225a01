package load

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// An erasure is a driver with one pool, from which large volumes are removed while others
// are made and used.
type erasure struct {
	*drivertest.Pool
	extent
	calls      *recorder
	idle, busy *phase
	made       int // large volumes
}

// slowdown is how many times as long the slowest hundredth of the calls may take while a
// large volume is erased.
const slowdown = 5

// comparison is how many calls of each method there are at least, of each kind, and which
// part of them is left out: what is compared has to be more than the bad luck of a few.
func comparison() (samples int, part float64) {
	if testing.Short() {
		return 200, 0.95
	}
	return 1500, 0.99
}

// measuredMethods are those of the others.
var measuredMethods = []string{"CreateVolume", "NodePublishVolume", "NodeGetVolumeStats", "NodeUnpublishVolume", "DeleteVolume"}

// largeVolumes tries it on each kind of filesystem, which does its own work for each file
// that goes.
func largeVolumes(t *testing.T, program string) {
	const size = 8 << 30
	filesystems := []struct {
		name  string
		mount func(t *testing.T) string
	}{
		{"ext4", func(t *testing.T) string { return testenv.LoopFS(t, "ext4", size, "noinit_itable") }},
		{"xfs", func(t *testing.T) string { return testenv.LoopFS(t, "xfs", size) }},
		{"btrfs", func(t *testing.T) string { return testenv.LoopFS(t, "btrfs", size) }},
		{"btrfs that limits", func(t *testing.T) string { return testenv.CountingBtrfs(t, size) }},
	}
	if testing.Short() {
		filesystems = filesystems[:1]
	}
	for _, fs := range filesystems {
		t.Run(fs.name, func(t *testing.T) {
			e := newErasure(t, program, fs.mount(t))
			e.compare()
		})
	}
}

func newErasure(t *testing.T, program, mounted string) *erasure {
	t.Helper()
	e := &erasure{extent: extentOfRun(), calls: newRecorder(), idle: newPhase(), busy: newPhase()}
	e.busy.wide = true
	pool := drivertest.PoolConfig{Name: "local", Path: mounted}
	d := drivertest.Start(t, drivertest.Config{
		Binary: program,
		Pools:  []drivertest.PoolConfig{pool},
		Dial:   []grpc.DialOption{grpc.WithChainUnaryInterceptor(e.calls.intercept)},
	})
	e.Pool = &drivertest.Pool{Driver: d, PoolConfig: pool}
	return e
}

// compare takes turns, so that what else the machine does meets both: some time with
// nothing to erase, and then a large volume. The others go on all the time.
func (e *erasure) compare() {
	e.Helper()
	samples, part := comparison()
	// Where calls hardly get on there will never be enough.
	const most = 40
	e.calls.enter(nil)
	ctx, stop := context.WithCancel(e.Context())
	var working sync.WaitGroup
	defer working.Wait()
	defer stop()
	for i := range 4 {
		working.Go(func() {
			for round := 0; ctx.Err() == nil; round++ {
				if err := e.use(e.Context(), fmt.Sprintf("small-%d-%d", i, round)); err != nil {
					e.Error(err)
					stop()
				}
			}
		})
	}
	for ctx.Err() == nil && e.made < most && (e.made < 2 || e.calls.least(e.busy, measuredMethods) < samples) {
		large := e.large()
		enough := e.calls.least(e.busy, measuredMethods) + samples/4
		e.during(e.idle, func() bool { return ctx.Err() != nil || e.calls.least(e.idle, measuredMethods) >= enough })
		e.Must(drivertest.Repeat(e.Context(), func() error { return e.Delete(e.Context(), large) }))
		e.during(e.busy, func() bool { return ctx.Err() != nil || !e.erasing(large) })
		// Small ones have piled up behind it.
		e.Eventually("the reaper keeps up", func() bool { return ctx.Err() != nil || e.trash() < 10 })
	}
	stop()
	working.Wait()
	if made := e.calls.least(e.busy, measuredMethods); made < samples {
		e.Errorf("%d calls of a method while %d large volumes were erased, want %d", made, e.made, samples)
	}
	e.report(part)
	e.AwaitNoTrash(e.Path)
	e.Must(e.Problems(nil))
}

// during notes the calls in a phase until something is so.
func (e *erasure) during(p *phase, end func() bool) {
	e.Helper()
	e.calls.enter(p)
	e.Eventually("there are enough calls", end)
	e.calls.enter(nil)
}

// use has a small volume for as long as a short pod.
func (e *erasure) use(ctx context.Context, name string) error {
	v := drivertest.Volume{ID: name, Bytes: mib}
	for _, call := range []func() error{
		func() error { _, err := e.Create(ctx, v); return err },
		func() error { return e.Publish(ctx, v, name) },
		func() error { _, err := e.Stats(ctx, name, name); return err },
		func() error { return e.Unpublish(ctx, name, name) },
		func() error { return e.Delete(ctx, name) },
	} {
		if err := drivertest.Repeat(ctx, call); err != nil {
			return err
		}
	}
	return nil
}

// large makes a volume with many files, a thousand to a directory.
func (e *erasure) large() string {
	e.Helper()
	ctx := e.Context()
	v := drivertest.Volume{ID: fmt.Sprintf("large-%d", e.made), Bytes: 1 << 30}
	e.made++
	_, err := e.Create(ctx, v)
	e.Must(err)
	e.Must(e.Publish(ctx, v, v.ID))
	content := make([]byte, 4096)
	var in string
	for i := range e.files {
		if i%1000 == 0 {
			in = filepath.Join(e.Target(v.ID), strconv.Itoa(i))
			e.Must(os.Mkdir(in, 0o755))
		}
		e.Must(os.WriteFile(filepath.Join(in, strconv.Itoa(i)), content, 0o600))
	}
	// Else the disk would be busy with it while there is nothing to erase.
	e.Must(e.Settle())
	e.Must(e.Unpublish(ctx, v.ID, v.ID))
	return v.ID
}

// erasing reports whether something of a volume is left.
func (e *erasure) erasing(name string) bool {
	e.Helper()
	left, err := drivertest.Names(e.Own("trash", drivertest.NodeName))
	e.Must(err)
	return slices.ContainsFunc(left, func(entry string) bool { return strings.HasPrefix(entry, name+".") })
}

func (e *erasure) trash() int {
	e.Helper()
	left, err := drivertest.Names(e.Own("trash", drivertest.NodeName))
	e.Must(err)
	return len(left)
}

// report compares both phases.
func (e *erasure) report(part float64) {
	e.Helper()
	e.Logf("%d volumes of %d files erased; calls while there is nothing to erase:\n%s\nwhile one is erased:\n%s", e.made, e.files, e.idle.table(), e.busy.table())
	if e.calls.least(e.idle, measuredMethods) == 0 || e.calls.least(e.busy, measuredMethods) == 0 {
		e.Fatal("nothing to compare")
	}
	for _, method := range measuredMethods {
		idle, busy := quantile(e.idle.methods[method].took, part), quantile(e.busy.methods[method].took, part)
		ratio := float64(busy) / float64(idle)
		e.Logf("%s: p%.0f %v, and %v while a large volume is erased: %.2f times as long", method, 100*part, round(idle), round(busy), ratio)
		if ratio > slowdown {
			e.Errorf("%s takes %.2f times as long while a large volume is erased, want at most %d times", method, ratio, slowdown)
		}
	}
}
