package crash

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

const (
	mib = 1 << 20
	// patience is far above what the driver needs for anything that it does in the
	// background, also on an emulated processor.
	patience = time.Minute

	nodeName = "node"
)

// A world is a driver with one pool, and what of it is in use.
type world struct {
	*testing.T
	place   place
	pool    string
	targets string
	trap    *trap
	node    *node.Node
	root    *dir.Dir       // of the pool
	quota   quota.Facility // nil if nobody keeps the sizes

	now        state  // of the victim
	answer     answer // of a call without a crash
	capacities map[state]int64
	steps      int  // of all calls so far
	filled     bool // something is written in the victim
	// reapedBefore is how much the reaper had done when the trap was armed.
	reapedBefore int
}

// An answer is what a call came to.
type answer struct {
	message proto.Message
	err     error
}

func (a answer) diff(b answer) string { return cmp.Diff(a.message, b.message, protocmp.Transform()) }

// newWorld starts a driver on a pool in which there are volumes of others.
func newWorld(t *testing.T, p place, driver string) *world {
	t.Helper()
	w := &world{T: t, place: p, targets: t.TempDir(), capacities: make(map[state]int64)}
	var err error
	w.pool, err = os.MkdirTemp(p.mounted, "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(w.pool)) })
	w.root, err = dir.Open(w.pool)
	must(t, err)
	t.Cleanup(func() { must(t, w.root.Close()) })
	if p.enforced {
		w.quota, err = quota.Detect(w.root)
		must(t, err)
	}
	// The race detector has a program linger for a second when it ends.
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	w.trap = newTrap(t, driver)
	t.Cleanup(w.releaseAll)
	self, err := os.Executable() // which launches the driver
	must(t, err)
	w.run(self)
	for _, v := range others {
		w.makeOther(v)
	}
	return w
}

// run runs a program as the driver for the first time.
func (w *world) run(program string) {
	w.Helper()
	pool := node.Pool{Name: "local", Path: w.pool}
	options := struct {
		node.Pool
		Enforcement string `json:"enforcement"`
		Allocation  string `json:"allocation"`
		Shared      bool   `json:"shared"`
	}{pool, "auto", "thick", w.place.shared}
	if w.place.enforced {
		options.Enforcement = "required"
	}
	if w.place.thin {
		options.Allocation = "thin"
	}
	datadir, err := json.Marshal([]any{options})
	must(w.T, err)
	w.node, err = node.Start(w.Context(), node.Config{
		Binary:  program,
		Name:    nodeName,
		Version: "test",
		Pools:   []node.Pool{pool},
		// Test/node knows of no options. Of two flags the last counts.
		Flags: []string{"--datadir=" + string(datadir), "--v=4"},
	})
	must(w.T, err)
	n := w.node
	w.Cleanup(func() {
		if err := n.Close(); err != nil && !w.Failed() {
			w.Error(err)
		}
		if w.Failed() {
			log := strings.Split(n.Log(), "\n")
			w.Logf("what the driver wrote last:\n%s", strings.Join(log[max(0, len(log)-60):], "\n"))
		}
	})
}

// start runs the driver again after it ended.
func (w *world) start() error { return w.node.Restart(w.Context()) }

// end stops the driver and expects it to leave nothing.
func (w *world) end() {
	w.Helper()
	w.reach(state{})
	for _, v := range others {
		w.unmakeOther(v)
	}
	w.awaitNoTrash()
	w.wantNothingLeft()
	must(w.T, w.node.Stop())
}

func (w *world) controller() csi.ControllerClient { return csi.NewControllerClient(w.node.Conn()) }
func (w *world) kubelet() csi.NodeClient          { return csi.NewNodeClient(w.node.Conn()) }

func (w *world) own(elements ...string) string {
	return filepath.Join(append([]string{w.pool, ".hostpath-provisioner"}, elements...)...)
}

func (w *world) names(path string) []string {
	w.Helper()
	entries, err := os.ReadDir(path)
	if !errors.Is(err, os.ErrNotExist) {
		must(w.T, err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (w *world) trash() []string {
	w.Helper()
	return w.names(w.own("trash", nodeName))
}

func (w *world) awaitNoTrash() {
	w.Helper()
	w.eventually("the trash is empty", func() bool { return len(w.trash()) == 0 })
}

// awaitReaped waits until the reaper has done its work for a call, or was killed at it.
func (w *world) awaitReaped() {
	w.Helper()
	w.eventually("what was removed is gone", func() bool {
		return w.trap.hasKilled() || w.reaped() > w.reapedBefore && len(w.trash()) == 0
	})
}

// reaped is how often the driver has told that the reaper is done with something.
func (w *world) reaped() int { return strings.Count(w.node.Log(), "removed trash") }

// arm counts the driver's steps from here on.
func (w *world) arm(killAt int) {
	w.reapedBefore = w.reaped()
	w.trap.arm(killAt)
}

// eventually waits for what goes on in the background.
func (w *world) eventually(what string, done func() bool) {
	w.Helper()
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	for deadline := time.Now().Add(patience); !done(); <-again.C {
		if time.Now().After(deadline) {
			w.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// releaseAll takes down what a test that failed has left mounted and attached.
func (w *world) releaseAll() {
	mounts, err := mountns.Below(w.targets)
	must(w.T, err)
	for _, mount := range slices.Backward(mounts) {
		must(w.T, loopfs.Unmount(mount))
	}
	for _, d := range w.devices() {
		must(w.T, detachDevice(d))
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
