package load

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// TestPodsThatShareVolumes has pods come and go on four volumes, 16 of their calls in flight, while the driver checks its pools (each ten
// seconds, and all volumes each minute) and the health monitor asks for the volumes. No call is ABORTED.
func TestPodsThatShareVolumes(t *testing.T) {
	during := 12 * time.Second
	if !testing.Short() && !testenv.Guest() {
		during = 130 * time.Second
	}
	h := newHarness(t, drivertest.Built(t), extent{})
	shared := []drivertest.Volume{
		{ID: "of-xfs", Pool: "xfs", Bytes: mib}, {ID: "of-shared", Pool: "shared", Bytes: mib},
		{ID: "of-limited", Pool: "limited", Bytes: mib}, {ID: "block", Pool: "ext4", Bytes: mib, Block: true},
	}
	for _, v := range shared {
		h.Must(must.Err(h.Create(h.Context(), v)))
	}
	ctx, cancel := context.WithTimeout(h.Context(), during)
	defer cancel()
	var made, aborted atomic.Int64
	try := func(what string, call func() error) bool {
		made.Add(1)
		err := call()
		if status.Code(err) == codes.Aborted {
			aborted.Add(1)
		} else if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		return err == nil
	}
	const inFlight, targets = 16, 32
	var working sync.WaitGroup
	for n := range inFlight {
		random := rand.New(rand.NewPCG(*seed, uint64(n)))
		working.Go(func() {
			for round := 0; ctx.Err() == nil && !t.Failed(); round++ {
				v, pod := shared[random.IntN(len(shared))], fmt.Sprintf("pod-%d-%d", n, round%targets)
				for !try("publish "+v.ID, func() error { return h.Publish(h.Context(), v, pod) }) && !t.Failed() {
				}
				try("stats of "+v.ID, func() error { return must.Err(h.Stats(h.Context(), v.ID, pod)) })
				for !try("unpublish "+v.ID, func() error { return h.Unpublish(h.Context(), v.ID, pod) }) && !t.Failed() {
				}
			}
		})
	}
	working.Go(func() {
		for ctx.Err() == nil && !t.Failed() {
			for _, v := range shared {
				try("get "+v.ID, func() error { return must.Err(h.Get(h.Context(), v.ID)) })
			}
		}
	})
	working.Wait()
	t.Logf("%d of %d calls were ABORTED, -load.seed=%d", aborted.Load(), made.Load(), *seed)
	if aborted.Load() > 0 || made.Load() < 500 {
		t.Errorf("%d of %d calls were ABORTED, want none of at least 500", aborted.Load(), made.Load())
	}
	for _, v := range shared {
		h.Must(h.Delete(h.Context(), v.ID))
	}
	h.Must(h.Process.Stop())
	h.wantNoRace()
}
