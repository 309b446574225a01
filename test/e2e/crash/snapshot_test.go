package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const (
	snapshotName = "snapshot-1"
	snapshotID   = snapshotName + "@" + drivertest.NodeName
	copied       = "pvc-copied"
)

// A snapshotCall is one that makes or removes a snapshot, or a volume from another entry.
type snapshotCall struct {
	name string
	// needsSnapshot: there is one of the victim before.
	needsSnapshot bool
	call          func(w *harness, block bool) error
	// removes the snapshot, the tree of which goes in the background.
	removes bool
	// made is what the call makes: "snapshot" or "volume"; empty if it removes.
	made string
}

var snapshotCalls = []snapshotCall{
	{name: "snapshot", made: "snapshot", call: func(h *harness, _ bool) error {
		_, err := h.Snapshot(h.Context(), snapshotName, victim, "")
		return err
	}},
	{name: "restore", needsSnapshot: true, made: "volume", call: func(h *harness, block bool) error {
		_, err := h.Restore(h.Context(), asked(copied, block, medium), snapshotID)
		return err
	}},
	{name: "clone", made: "volume", call: func(h *harness, block bool) error {
		_, err := h.Clone(h.Context(), asked(copied, block, medium), victim)
		return err
	}},
	{name: "delete snapshot", needsSnapshot: true, removes: true, call: func(h *harness, _ bool) error {
		return h.DeleteSnapshot(h.Context(), snapshotID)
	}},
}

// TestSnapshotCrashAtEveryStep kills the driver before each step of the calls that copy: by
// subvolumes and references on btrfs, by references on XFS, by reading on ext4. What is there
// afterwards is whole or not there, and the repeated call succeeds.
func TestSnapshotCrashAtEveryStep(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	both := []bool{mountMode, blockMode}
	places := []place{
		{name: "btrfs with limits", kind: quota.Btrfs, enforced: true, mount: func(t *testing.T) string { return testenv.CountingBtrfs(t, 1<<30) }, modes: both, every: 9},
		{name: "xfs", mount: onLoop("xfs"), modes: both, every: 11},
		{name: "ext4", mount: onLoop("ext4"), modes: both, every: 13},
	}
	for _, p := range places {
		t.Run(p.name, func(t *testing.T) {
			p.mounted = p.mount(t)
			h := newHarness(t, p, driver)
			for _, block := range p.modes {
				for _, c := range snapshotCalls {
					c.name = map[bool]string{mountMode: "mount ", blockMode: "block "}[block] + c.name
					t.Run(c.name, func(t *testing.T) {
						h.TB = t
						h.enumerateCopy(c, block)
					})
					if h.TB = t; t.Failed() {
						return
					}
				}
			}
			h.now = state{}
			h.end()
		})
	}
}

func (h *harness) enumerateCopy(c snapshotCall, block bool) {
	h.Helper()
	before := h.MustCapacity("local")
	h.prepareCopy(c, block)
	h.arm(0)
	h.Must(c.call(h, block))
	if c.removes {
		h.awaitReaped()
	}
	h.learnt, _ = h.trap.Disarm()
	h.wantCopied("without a crash", c, block, true)
	h.clearCopies()
	for n := 1; n <= len(h.learnt); n++ {
		if h.steps++; testing.Short() && h.steps%h.place.every != 0 {
			continue
		}
		h.crashCopy(c, block, n)
	}
	h.Must(h.pool.Settle())
	if h.place.kind == quota.Btrfs {
		h.Must(errors.Join(h.Process.Stop(), h.Process.Restart(h.Context())))
		h.AwaitServing()
	}
	if after := h.MustCapacity("local"); after < before-capacitySlack || after > before+capacitySlack {
		h.Errorf("the capacity was %d bytes before all crashes, and is %d", before, after)
	}
	h.Logf("%d steps:\n%s", len(h.learnt), h.words(h.learnt))
}

// mayBeMissing are the steps of a call that do not happen each time: the two of a check of the pool, and the destruction of the
// qgroup of a subvolume that was removed before, which succeeds when the kernel is done with it.
const mayBeMissing = 3

// crashCopy kills the driver at a step of a call, starts it, and calls it again.
func (h *harness) crashCopy(c snapshotCall, block bool, step int) {
	h.Helper()
	h.prepareCopy(c, block)
	h.arm(step)
	err := c.call(h, block)
	if err == nil && c.removes {
		h.awaitReaped()
	}
	steps, killed := h.trap.Disarm()
	if !killed && err == nil && len(h.learnt)-len(steps) <= mayBeMissing {
		h.clearCopies()
		return
	}
	if !killed {
		h.Fatalf("%s: no process died at step %d: %v; the steps were\n%s\nwant\n%s", c.name, step, err, h.words(steps), h.words(h.learnt))
	}
	h.kill()
	where := fmt.Sprintf("%s, killed at step %d of %d, %s", c.name, step, len(h.learnt), h.words(steps[step-1:]))
	h.restart()
	h.wantCopied(where+", started again", c, block, err == nil)
	h.awaitNoTrash() // until then it is ABORTED
	if err := c.call(h, block); err != nil {
		h.Fatalf("%s: the repeated call: %v", where, err)
	}
	h.awaitNoTrash()
	h.wantCopied(where+", asked again", c, block, true)
	h.clearCopies()
	if h.Failed() {
		h.FailNow()
	}
}

// prepareCopy makes the victim anew, which has shared nothing before.
func (h *harness) prepareCopy(c snapshotCall, block bool) {
	h.Helper()
	h.Must(h.create(victim, block, small).err)
	if block {
		h.fill(victim, block)
	} else {
		h.Must(os.Mkdir(filepath.Join(h.pool.Path, victim, "sub"), 0o755))
		h.Must(os.WriteFile(filepath.Join(h.pool.Path, victim, "sub", "file"), []byte(content), 0o600))
	}
	if c.needsSnapshot {
		_, err := h.Snapshot(h.Context(), snapshotName, victim, "")
		h.Must(err)
	}
	h.Must(h.pool.Settle())
	h.awaitTick()
}

// awaitTick waits until what changes gets another ctime than what has changed so far, which a
// copy would take for a change under its eyes, and copy again.
func (h *harness) awaitTick() {
	h.Helper()
	name := filepath.Join(h.place.mounted, "tick")
	var first, now unix.Stat_t
	for first.Ctim == now.Ctim {
		h.Must(os.WriteFile(name, nil, 0o600))
		if h.Must(unix.Stat(name, &now)); first.Ino == 0 {
			first = now
		}
	}
	h.Must(os.Remove(name))
}

func (h *harness) clearCopies() {
	h.Helper()
	h.Must(errors.Join(h.deleteOf(victim).err, h.deleteOf(copied).err, h.DeleteSnapshot(h.Context(), snapshotID)))
	h.awaitNoTrash()
	h.pool.Snapshots = nil
	// The next is the first snapshot of its pool, too.
	if err := os.Remove(h.pool.Own("snapshots")); !errors.Is(err, os.ErrNotExist) {
		h.Must(err)
	}
}

// wantCopied expects what is there to be whole, and if the call was answered that it has done
// what it says.
func (h *harness) wantCopied(where string, c snapshotCall, block, answered bool) {
	h.Helper()
	kepts := []drivertest.Kept{kept(victim, state{bytes: small, block: block})}
	for _, o := range others {
		kepts = append(kepts, kept(o.id, state{bytes: o.bytes, block: o.block, published: true}))
	}
	hasSnapshot, hasCopy := h.recorded("~"+snapshotName), h.recorded(copied)
	h.pool.Snapshots = nil
	if hasSnapshot {
		h.pool.Snapshots = []string{snapshotName}
		h.wantContent(where, h.pool.Own("snapshots", "~"+snapshotName), block)
	}
	if hasCopy {
		kepts = append(kepts, kept(copied, state{bytes: medium, block: block}))
		h.wantContent(where, filepath.Join(h.pool.Path, copied), block)
	}
	h.wantContent(where, filepath.Join(h.pool.Path, victim), block)
	if err := h.pool.Problems(kepts); err != nil {
		h.Errorf("%s: %v", where, err)
	}
	list, err := h.Snapshots(h.Context(), victim)
	if err != nil || (len(list) == 1) != hasSnapshot || hasSnapshot && !list[0].GetReadyToUse() {
		h.Errorf("%s: listed are %v, %v; want the snapshot: %v", where, list, err, hasSnapshot)
	}
	if answered && (hasCopy != (c.made == "volume") || hasSnapshot != (c.made == "snapshot" || c.needsSnapshot && !c.removes)) {
		h.Errorf("%s: there is the snapshot: %v, the copy: %v", where, hasSnapshot, hasCopy)
	}
}

func (h *harness) recorded(id string) bool {
	h.Helper()
	_, err := h.pool.Record(id)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		h.Must(err)
	}
	return err == nil
}

// wantContent expects what the victim was filled with.
func (h *harness) wantContent(where, path string, block bool) {
	h.Helper()
	file := filepath.Join(path, "sub", "file")
	if block {
		file = filepath.Join(path, "disk.img")
	}
	f, err := os.Open(file)
	if err != nil {
		h.Errorf("%s: %v", where, err)
		return
	}
	defer f.Close()
	got := make([]byte, len(content))
	if _, err := f.Read(got); err != nil || string(got) != content {
		h.Errorf("%s: %s has %q, %v", where, file, got, err)
	}
}
