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
	call          func(w *world, block bool) error
	// removes the snapshot, the tree of which goes in the background.
	removes bool
	// made is what the call makes: "snapshot" or "volume"; empty if it removes.
	made string
}

var snapshotCalls = []snapshotCall{
	{name: "snapshot", made: "snapshot", call: func(w *world, _ bool) error {
		_, err := w.Snapshot(w.Context(), snapshotName, victim, "")
		return err
	}},
	{name: "restore", needsSnapshot: true, made: "volume", call: func(w *world, block bool) error {
		_, err := w.Restore(w.Context(), asked(copied, block, medium), snapshotID)
		return err
	}},
	{name: "clone", made: "volume", call: func(w *world, block bool) error {
		_, err := w.Clone(w.Context(), asked(copied, block, medium), victim)
		return err
	}},
	{name: "delete snapshot", needsSnapshot: true, removes: true, call: func(w *world, _ bool) error {
		return w.DeleteSnapshot(w.Context(), snapshotID)
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
			w := newWorld(t, p, driver)
			for _, block := range p.modes {
				for _, c := range snapshotCalls {
					c.name = map[bool]string{mountMode: "mount ", blockMode: "block "}[block] + c.name
					t.Run(c.name, func(t *testing.T) {
						w.TB = t
						w.enumerateCopy(c, block)
					})
					if w.TB = t; t.Failed() {
						return
					}
				}
			}
			w.now = state{}
			w.end()
		})
	}
}

func (w *world) enumerateCopy(c snapshotCall, block bool) {
	w.Helper()
	before := w.capacity()
	w.prepareCopy(c, block)
	w.arm(0)
	w.Must(c.call(w, block))
	if c.removes {
		w.awaitReaped()
	}
	w.learnt, _ = w.trap.Disarm()
	w.wantCopied("without a crash", c, block, true)
	w.clearCopies()
	for n := 1; n <= len(w.learnt); n++ {
		if w.steps++; testing.Short() && w.steps%w.place.every != 0 {
			continue
		}
		w.crashCopy(c, block, n)
	}
	w.Must(w.pool.Settle())
	if w.place.kind == quota.Btrfs {
		w.Must(errors.Join(w.Process.Stop(), w.Process.Restart(w.Context())))
		w.AwaitServing()
	}
	if after := w.capacity(); after < before-capacitySlack || after > before+capacitySlack {
		w.Errorf("the capacity was %d bytes before all crashes, and is %d", before, after)
	}
	w.Logf("%d steps:\n%s", len(w.learnt), w.words(w.learnt))
}

// mayBeMissing are the steps of a call that do not happen each time: the two of a check of the pool, and the destruction of the
// qgroup of a subvolume that was removed before, which succeeds when the kernel is done with it.
const mayBeMissing = 3

// crashCopy kills the driver at a step of a call, starts it, and calls it again.
func (w *world) crashCopy(c snapshotCall, block bool, step int) {
	w.Helper()
	w.prepareCopy(c, block)
	w.arm(step)
	err := c.call(w, block)
	if err == nil && c.removes {
		w.awaitReaped()
	}
	steps, killed := w.trap.Disarm()
	if !killed && err == nil && len(w.learnt)-len(steps) <= mayBeMissing {
		w.clearCopies()
		return
	}
	if !killed {
		w.Fatalf("%s: no process died at step %d: %v; the steps were\n%s\nwant\n%s", c.name, step, err, w.words(steps), w.words(w.learnt))
	}
	w.kill()
	where := fmt.Sprintf("%s, killed at step %d of %d, %s", c.name, step, len(w.learnt), w.words(steps[step-1:]))
	w.restart()
	w.wantCopied(where+", started again", c, block, err == nil)
	w.awaitNoTrash() // until then it is ABORTED
	if err := c.call(w, block); err != nil {
		w.Fatalf("%s: the repeated call: %v", where, err)
	}
	w.awaitNoTrash()
	w.wantCopied(where+", asked again", c, block, true)
	w.clearCopies()
	if w.Failed() {
		w.FailNow()
	}
}

// prepareCopy makes the victim anew, which has shared nothing before.
func (w *world) prepareCopy(c snapshotCall, block bool) {
	w.Helper()
	w.Must(w.create(victim, block, small).err)
	if block {
		w.fill(victim, block)
	} else {
		w.Must(os.Mkdir(filepath.Join(w.pool.Path, victim, "sub"), 0o755))
		w.Must(os.WriteFile(filepath.Join(w.pool.Path, victim, "sub", "file"), []byte(content), 0o600))
	}
	if c.needsSnapshot {
		_, err := w.Snapshot(w.Context(), snapshotName, victim, "")
		w.Must(err)
	}
	w.Must(w.pool.Settle())
	w.awaitTick()
}

// awaitTick waits until what changes gets another ctime than what has changed so far, which a
// copy would take for a change under its eyes, and copy again.
func (w *world) awaitTick() {
	w.Helper()
	name := filepath.Join(w.place.mounted, "tick")
	var first, now unix.Stat_t
	for first.Ctim == now.Ctim {
		w.Must(os.WriteFile(name, nil, 0o600))
		if w.Must(unix.Stat(name, &now)); first.Ino == 0 {
			first = now
		}
	}
	w.Must(os.Remove(name))
}

func (w *world) clearCopies() {
	w.Helper()
	w.Must(errors.Join(w.deleteOf(victim).err, w.deleteOf(copied).err, w.DeleteSnapshot(w.Context(), snapshotID)))
	w.awaitNoTrash()
	w.pool.Snapshots = nil
	// The next is the first snapshot of its pool, too.
	if err := os.Remove(w.pool.Own("snapshots")); !errors.Is(err, os.ErrNotExist) {
		w.Must(err)
	}
}

// wantCopied expects what is there to be whole, and if the call was answered that it has done
// what it says.
func (w *world) wantCopied(where string, c snapshotCall, block, answered bool) {
	w.Helper()
	kepts := []drivertest.Kept{kept(victim, state{bytes: small, block: block})}
	for _, o := range others {
		kepts = append(kepts, kept(o.id, state{bytes: o.bytes, block: o.block, published: true}))
	}
	hasSnapshot, hasCopy := w.recorded("~"+snapshotName), w.recorded(copied)
	w.pool.Snapshots = nil
	if hasSnapshot {
		w.pool.Snapshots = []string{snapshotName}
		w.wantContent(where, w.pool.Own("snapshots", "~"+snapshotName), block)
	}
	if hasCopy {
		kepts = append(kepts, kept(copied, state{bytes: medium, block: block}))
		w.wantContent(where, filepath.Join(w.pool.Path, copied), block)
	}
	w.wantContent(where, filepath.Join(w.pool.Path, victim), block)
	if err := w.pool.Problems(kepts); err != nil {
		w.Errorf("%s: %v", where, err)
	}
	list, err := w.Snapshots(w.Context(), victim)
	if err != nil || (len(list) == 1) != hasSnapshot || hasSnapshot && !list[0].GetReadyToUse() {
		w.Errorf("%s: listed are %v, %v; want the snapshot: %v", where, list, err, hasSnapshot)
	}
	if answered && (hasCopy != (c.made == "volume") || hasSnapshot != (c.made == "snapshot" || c.needsSnapshot && !c.removes)) {
		w.Errorf("%s: there is the snapshot: %v, the copy: %v", where, hasSnapshot, hasCopy)
	}
}

func (w *world) recorded(id string) bool {
	w.Helper()
	_, err := w.pool.Record(id)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.Must(err)
	}
	return err == nil
}

// wantContent expects what the victim was filled with.
func (w *world) wantContent(where, path string, block bool) {
	w.Helper()
	file := filepath.Join(path, "sub", "file")
	if block {
		file = filepath.Join(path, "disk.img")
	}
	f, err := os.Open(file)
	if err != nil {
		w.Errorf("%s: %v", where, err)
		return
	}
	defer f.Close()
	got := make([]byte, len(content))
	if _, err := f.Read(got); err != nil || string(got) != content {
		w.Errorf("%s: %s has %q, %v", where, file, got, err)
	}
}
