package faults

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// away is what calls are answered while the pool is not there. What is remembered of
// volumes is reported, and their abnormal condition.
var away = answers{
	"create":             codes.ResourceExhausted, // and so on another node
	"create disk":        codes.ResourceExhausted,
	"create again":       codes.Unavailable,
	"create disk again":  codes.Unavailable,
	"publish":            codes.Unavailable,
	"publish again":      codes.Unavailable,
	"publish disk":       codes.Unavailable,
	"publish disk again": codes.Unavailable,
	"expand":             codes.Unavailable,
	"expand disk":        codes.Unavailable,
	"delete published":   codes.Unavailable,
	"delete":             codes.Unavailable,
	"delete disk":        codes.Unavailable,
	"delete nothing":     codes.Unavailable, // it may be there
}

// Nothing is ever written into the directory below a mount that went away, nor on
// another filesystem that is mounted in its place.
func TestUnmountedPool(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range someFilesystems(1, 1) {
		t.Run(fs.kind, func(t *testing.T) {
			m := newMount(t, fs)
			h := newHarness(t, driver, m)
			m.unmount()
			bare := snapshot(t, m.at)
			// At once, and once the driver has noticed.
			for _, during := range []string{"unmounted", "unmounted and noticed"} {
				h.wantAnswers(during, away)
				h.wantListed(during, all)
				if got := h.MustCapacity("local"); got != 0 {
					t.Errorf("%s: the capacity is %d bytes", during, got)
				}
				wantSame(t, during, m.at, bare)
				h.awaitServing(false)
			}
			h.wantAlive("unmounted")
			// Pods can end meanwhile, and their content is there until then.
			if content, err := os.ReadFile(filepath.Join(h.Target(tree.ID), "file")); err != nil || len(content) == 0 {
				t.Errorf("a pod reads %q, %v", content, err)
			}
			h.Must(h.unpublish(tree))
			h.Must(h.unpublish(raw))
			if h.attached() {
				t.Errorf("%s is still attached", h.device.Name)
			}
			wantSame(t, "after pods have ended", m.at, bare)

			h.anotherFilesystem(bare)
			m.mount()
			h.awaitServing(true)
			h.end()
		})
	}
}

// anotherFilesystem is mounted in the pool's place for a while.
func (h *harness) anotherFilesystem(bare map[string]entry) {
	h.Helper()
	h.Must(unix.Mount("tmpfs", h.mount.at, "tmpfs", 0, "size=64m"))
	for path, content := range map[string]string{"file": "of others\n", "pvc-tree/file": "another volume of that name\n"} {
		path = filepath.Join(h.mount.at, path)
		h.Must(os.MkdirAll(filepath.Dir(path), 0o755))
		h.Must(os.WriteFile(path, []byte(content), 0o600))
	}
	theirs := snapshot(h, h.mount.at)
	h.wantAnswers("another filesystem mounted", away)
	wantSame(h, "another filesystem mounted", h.mount.at, theirs)
	h.Must(loopfs.Unmount(h.mount.at))
	wantSame(h, "unmounted again", h.mount.at, bare)
}

// A mount that comes and goes while calls are at work never has them write below it.
func TestPoolUnmountedRepeatedly(t *testing.T) {
	driver := drivertest.Built(t)
	fs := filesystems()[1]
	m := newMount(t, fs)
	h := newHarness(t, driver, m)
	h.Must(h.unpublish(raw)) // the kernel names files by a path that changes
	m.unmount()
	bare := snapshot(t, m.at)
	m.mount()

	const callers = 4
	stop, keeping, deleting := make(chan struct{}), make(chan struct{}), make(chan struct{})
	results := make([][]history, callers)
	var work sync.WaitGroup
	for caller := range callers {
		work.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				v := volume(fmt.Sprintf("pvc-%d-%d", caller, i), i%4 >= 2)
				v.Bytes = 64 * kib
				past := h.live(v, i%2 == 0)
				results[caller] = append(results[caller], past)
				switch {
				case past.deleted:
					notify(deleting)
				case past.kept():
					notify(keeping)
				}
			}
		})
	}
	stopAll := sync.OnceFunc(func() { close(stop); work.Wait() })
	t.Cleanup(stopAll)
	allowed := 5 * time.Second
	if testing.Short() {
		allowed = 2 * time.Second
	}
	rounds := 0
	for deadline := time.Now().Add(allowed); time.Now().Before(deadline); rounds++ {
		m.unmount()
		wantSame(t, fmt.Sprintf("round %d", rounds), m.at, bare)
		m.mount()
		if rounds%8 == 0 { // else the mount may always be away before a call is through
			await(t, keeping)
			await(t, deleting)
		}
	}
	stopAll()
	h.AwaitServing()
	kept, deleted := 0, 0
	for _, past := range slices.Concat(results...) {
		if past.kept() {
			kept++
		}
		if past.deleted {
			deleted++
		}
		h.resolve(past)
	}
	t.Logf("%d times unmounted while %d volumes were filled and kept, and %d deleted", rounds, kept, deleted)
	if kept == 0 || deleted == 0 || rounds == 0 {
		t.Error("nothing met")
	}
	h.end()
}

// A history is what was asked of a volume, and what the answers promise.
type history struct {
	drivertest.Volume
	created bool
	filled  bool // by a user
	asked   bool // to be deleted
	deleted bool
}

// kept reports whether a user's data has to be there.
func (h history) kept() bool { return h.filled && !h.asked }

// notify wakes those who wait for it, if there are any.
func notify(waiting chan<- struct{}) {
	select {
	case waiting <- struct{}{}:
	default:
	}
}

func await(t *testing.T, reported <-chan struct{}) {
	t.Helper()
	select {
	case <-reported:
	case <-time.After(5 * time.Minute):
		t.Fatal("no call succeeds while the filesystem comes and goes")
	}
}

// live makes a volume and fills it, and may have it deleted.
func (h *harness) live(v drivertest.Volume, remove bool) history {
	past := history{Volume: v}
	_, err := h.Create(h.Context(), v)
	past.created = err == nil
	if past.created {
		past.filled = h.fill(v) == nil
	}
	if past.created && remove {
		past.asked = true
		past.deleted = h.Delete(h.Context(), v.ID) == nil
	}
	return past
}

// resolve expects what was promised, and repeats what was not answered well, as
// external-provisioner does.
func (h *harness) resolve(past history) {
	h.Helper()
	got := h.get(past.Volume)
	switch {
	case past.deleted:
		h.WantCode(past.ID+" was deleted, get", got, codes.NotFound)
	case past.created && !past.asked:
		h.WantCode(past.ID+" was made, get", got, codes.OK)
		if past.filled {
			h.Must(h.holds(past.Volume))
		}
		h.acknowledged = append(h.acknowledged, drivertest.Kept{Volume: past.Volume})
		h.Must(h.create(past.Volume)) // is there
	default: // what an attempt has left may be in its way
		h.Must(drivertest.Repeat(h.Context(), func() error { return h.delete(past.Volume) }))
	}
}

// An entry is what is seen of one in a directory tree.
type entry struct {
	Mode     fs.FileMode
	Size     int64
	Modified time.Time
	Changed  unix.Timespec
	Inode    uint64
	Content  string
}

// snapshot records all that is in a directory, and the directory itself.
func snapshot(t testing.TB, root string) map[string]entry {
	t.Helper()
	tree := make(map[string]entry)
	must.Succeed(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		e := entry{Mode: info.Mode(), Size: info.Size(), Modified: info.ModTime(), Changed: st.Ctim, Inode: st.Ino}
		if info.Mode().IsRegular() {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			e.Content = string(content)
		}
		tree[path] = e
		return nil
	}))
	return tree
}

// wantSame expects a directory tree to be as it was, to the last byte and the times.
func wantSame(t testing.TB, when, root string, want map[string]entry) {
	t.Helper()
	if diff := cmp.Diff(want, snapshot(t, root)); diff != "" {
		t.Fatalf("%s: %s has changed (-want +got):\n%s", when, root, diff)
	}
}
