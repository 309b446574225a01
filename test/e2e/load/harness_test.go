package load

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A harness is a driver, and those who call it.
type harness struct {
	*drivertest.Driver
	extent
	pools   []*drivertest.Pool
	clients []*client
	common  []drivertest.Volume // that all clients use
	// scraper keeps its connection, which would come and go in what is measured else.
	scraper *http.Transport
}

// newHarness starts a driver with a pool on each kind of filesystem, one that limits
// directories and one for several nodes among them.
func newHarness(t *testing.T, program string, e extent) *harness {
	t.Helper()
	h := &harness{extent: e, scraper: drivertest.Scraper()}
	t.Cleanup(h.scraper.CloseIdleConnections)
	const size = 16 << 30
	enforcement := ""
	if testenv.Guest() {
		enforcement = "required"
	}
	pools := []drivertest.PoolConfig{
		{Name: "xfs", Path: onXFS(t, size), Enforcement: enforcement},
		{Name: "ext4", Path: onExt4(t, size), Enforcement: enforcement, Allocation: "thin"},
		{Name: "btrfs", Path: testenv.LoopFS(t, "btrfs", size)},
		{Name: "limited", Path: testenv.CountingBtrfs(t, size), Enforcement: "required"},
		{Name: "shared", Path: testenv.Tmpfs(t, 1<<30), Shared: true},
	}
	for i := range pools {
		pools[i].Path = filepath.Join(pools[i].Path, "pool")
		must.Succeed(t, os.Mkdir(pools[i].Path, 0o750))
	}
	h.Driver = drivertest.Start(t, drivertest.Config{
		Binary: program,
		Pools:  pools,
		Flags:  []string{drivertest.ServeMetrics},
	})
	for _, p := range pools {
		h.pools = append(h.pools, &drivertest.Pool{Driver: h.Driver, PoolConfig: p})
	}
	for i := range 16 {
		h.common = append(h.common, drivertest.Volume{ID: id("common", i), Pool: pools[i%len(pools)].Name, Bytes: mib})
	}
	for i := range e.callers {
		h.clients = append(h.clients, newClient(h, i))
	}
	return h
}

// onXFS and onExt4 answer filesystems of that many bytes. Those of the guest limit
// directories, and are smaller.
func onXFS(t *testing.T, bytes int64) string {
	t.Helper()
	if testenv.Guest() {
		return testenv.GuestDir(t, "HOSTPATH_KERNEL_XFS")
	}
	return testenv.LoopFS(t, "xfs", bytes)
}

func onExt4(t *testing.T, bytes int64) string {
	t.Helper()
	if testenv.Guest() {
		return testenv.GuestDir(t, "HOSTPATH_KERNEL_EXT4")
	}
	// What ext4 puts off at mkfs would be done during the test.
	return testenv.LoopFS(t, "ext4", bytes, "noinit_itable")
}

// all has the clients do something, all of them at once. One that meets an answer that
// must not be ends the test, with the seed.
func (h *harness) all(do func(c *client, ctx context.Context) error) func() {
	return func() {
		h.Helper()
		ctx, stop := context.WithCancel(h.Context())
		defer stop()
		var working sync.WaitGroup
		for _, c := range h.clients {
			working.Go(func() {
				// The first failure is reported, and not what follows when the others are stopped.
				if err := do(c, ctx); err != nil && ctx.Err() == nil {
					stop()
					h.Errorf("client %d, -load.seed=%d: %v", c.number, *seed, err)
				}
			})
		}
		working.Wait()
		if h.Failed() {
			h.FailNow()
		}
	}
}

// load has the clients make all calls for some time, and expects the volumes that all of them use to be in order, or not to be there.
func (h *harness) load(duration time.Duration) {
	h.Helper()
	end := time.Now().Add(duration)
	h.lap("all calls", h.all(func(c *client, ctx context.Context) error {
		for ctx.Err() == nil && time.Now().Before(end) {
			if err := c.act(ctx); err != nil {
				return err
			}
		}
		return ctx.Err()
	}))
	h.all((*client).release)()
	for _, v := range h.common {
		if _, err := h.Get(h.Context(), v.ID); status.Code(err) == codes.NotFound {
			continue
		}
		h.Must(h.pool(v.Pool).InOrder(drivertest.Kept{Volume: v}))
		h.Must(h.Delete(h.Context(), v.ID))
	}
}

// quiet brings the node to a state that the load can begin with: all volumes of the
// clients are there, none is published, and the reaper has nothing to do.
func (h *harness) quiet() {
	h.Helper()
	h.lap("all quiet", h.all((*client).rest))
	h.erased()
}

func (h *harness) erased() {
	h.Helper()
	for _, p := range h.pools {
		p.AwaitErased()
	}
}

// lap does something and reports how long it took.
func (h *harness) lap(what string, do func()) {
	h.Helper()
	begin := time.Now()
	do()
	h.Logf("%s in %v", what, time.Since(begin).Round(time.Millisecond))
}

// wantNoRace searches for what the race detector writes. It also ends the driver with status
// 66, which Stop returns, but not if the driver was killed.
func (h *harness) wantNoRace() {
	h.Helper()
	if at := strings.Index(h.Process.Log(), "WARNING: DATA RACE"); at >= 0 {
		h.Errorf("the driver has a data race:\n%.4000s", h.Process.Log()[at:])
	}
}

// id is a name whose place in the order of all names says nothing of who has it.
func id(of string, number int) string {
	h := uint32(2166136261) // FNV-1a
	for _, b := range []byte(fmt.Sprint(of, number)) {
		h = (h ^ uint32(b)) * 16777619
	}
	return fmt.Sprintf("pvc-%08x-%s-%d", h, of, number)
}

// pool is that of a name.
func (h *harness) pool(name string) *drivertest.Pool {
	return h.pools[slices.IndexFunc(h.pools, func(p *drivertest.Pool) bool { return p.Name == name })]
}
