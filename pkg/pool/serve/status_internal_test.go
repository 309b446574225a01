package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// surveyedNode is a node with one pool of directories that came without a record, after it has
// checked all of them.
func surveyedNode(tb testing.TB, volumes int) *Node {
	tb.Helper()
	root := tb.TempDir()
	for i := range volumes {
		if err := os.MkdirAll(filepath.Join(root, "pool", fmt.Sprintf("pvc-%d", i)), 0o755); err != nil {
			tb.Fatal(err)
		}
	}
	configs, err := poolconfig.Parse(`[{"name":"local","path":"pool"}]`, root)
	if err != nil {
		tb.Fatal(err)
	}
	dev, err := dir.Open(tb.TempDir())
	if err != nil {
		tb.Fatal(err)
	}
	mounts, loops := &bindtest.Fake{}, looptest.NewFake(dev)
	s := Start(configs, Options{Node: nodeOf("node-1"), Mounts: mounts, Devices: loops, Dev: dev, EachVolume: true, Log: logr.Discard()})
	tb.Cleanup(func() {
		if err := errors.Join(s.Close(context.WithoutCancel(tb.Context())), mounts.Close(), loops.Close(), dev.Close()); err != nil {
			tb.Error(err)
		}
	})
	if err := s.Wait(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for s.Pools[0].surveyed.Load() == nil {
		select {
		case <-again.C:
		case <-tb.Context().Done():
			tb.Fatal(tb.Context().Err())
		}
	}
	return s
}

func TestStatusDoesNotWaitForCalls(t *testing.T) {
	s := surveyedNode(t, 3)
	for _, v := range s.Surveyed() {
		unlock, err := s.Lock(v.ID)
		must.Succeed(t, err)
		defer unlock()
	}
	if status := s.Status()[0]; status.Volumes != 3 || status.Err != nil || status.Space == nil {
		t.Errorf("status %+v, want that of a pool with three volumes", status)
	}
	if seen := s.Surveyed(); len(seen) != 3 {
		t.Errorf("%+v was surveyed, want three volumes", seen)
	}
}

func TestStatusCostIsConstant(t *testing.T) {
	allocations := func(volumes int) float64 {
		s := surveyedNode(t, volumes)
		return testing.AllocsPerRun(100, func() { s.Status() })
	}
	if few, many := allocations(1), allocations(1000); many > few {
		t.Errorf("the status of 1,000 volumes takes %v allocations, that of one %v", many, few)
	}
}

func BenchmarkStatus(b *testing.B) {
	for _, volumes := range []int{0, 10_000} {
		b.Run(fmt.Sprint(volumes), func(b *testing.B) {
			s := surveyedNode(b, volumes)
			for b.Loop() {
				if got := s.Status()[0].Volumes; got != volumes {
					b.Fatalf("%d volumes, want %d", got, volumes)
				}
			}
		})
	}
}
