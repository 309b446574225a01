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
			w := newWorld(t, driver, m)
			m.unmount()
			bare := snapshot(t, m.at)
			// At once, and once the driver has noticed.
			for _, during := range []string{"unmounted", "unmounted and noticed"} {
				w.wantAnswers(during, away)
				w.wantListed(during, all)
				if got := w.capacity(); got != 0 {
					t.Errorf("%s: the capacity is %d bytes", during, got)
				}
				wantSame(t, during, m.at, bare)
				w.awaitServing(false)
			}
			w.wantAlive("unmounted")
			// Pods can end meanwhile, and their content is there until then.
			if content, err := os.ReadFile(filepath.Join(w.Target(tree.ID), "file")); err != nil || len(content) == 0 {
				t.Errorf("a pod reads %q, %v", content, err)
			}
			w.Must(w.unpublish(tree))
			w.Must(w.unpublish(raw))
			if w.attached() {
				t.Errorf("%s is still attached", w.device.Name)
			}
			wantSame(t, "after pods have ended", m.at, bare)

			w.anotherFilesystem(bare)
			m.mount()
			w.awaitServing(true)
			w.end()
		})
	}
}

// anotherFilesystem is mounted in the pool's place for a while.
func (w *world) anotherFilesystem(bare map[string]entry) {
	w.Helper()
	w.Must(unix.Mount("tmpfs", w.mount.at, "tmpfs", 0, "size=64m"))
	for path, content := range map[string]string{"file": "of others\n", "pvc-tree/file": "another volume of that name\n"} {
		path = filepath.Join(w.mount.at, path)
		w.Must(os.MkdirAll(filepath.Dir(path), 0o755))
		w.Must(os.WriteFile(path, []byte(content), 0o600))
	}
	theirs := snapshot(w, w.mount.at)
	w.wantAnswers("another filesystem mounted", away)
	wantSame(w, "another filesystem mounted", w.mount.at, theirs)
	w.Must(loopfs.Unmount(w.mount.at))
	wantSame(w, "unmounted again", w.mount.at, bare)
}

// A mount that comes and goes while calls are at work never has them write below it.
func TestPoolUnmountedRepeatedly(t *testing.T) {
	driver := drivertest.Built(t)
	fs := filesystems()[1]
	m := newMount(t, fs)
	w := newWorld(t, driver, m)
	w.Must(w.unpublish(raw)) // the kernel names files by a path that changes
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
				h := w.live(v, i%2 == 0)
				results[caller] = append(results[caller], h)
				switch {
				case h.deleted:
					notify(deleting)
				case h.kept():
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
	w.AwaitServing()
	kept, deleted := 0, 0
	for _, h := range slices.Concat(results...) {
		if h.kept() {
			kept++
		}
		if h.deleted {
			deleted++
		}
		w.resolve(h)
	}
	t.Logf("%d times unmounted while %d volumes were filled and kept, and %d deleted", rounds, kept, deleted)
	if kept == 0 || deleted == 0 || rounds == 0 {
		t.Error("nothing met")
	}
	w.end()
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
func (w *world) live(v drivertest.Volume, remove bool) history {
	h := history{Volume: v}
	_, err := w.Create(w.Context(), v)
	h.created = err == nil
	if h.created {
		h.filled = w.fill(v) == nil
	}
	if h.created && remove {
		h.asked = true
		h.deleted = w.Delete(w.Context(), v.ID) == nil
	}
	return h
}

// resolve expects what was promised, and repeats what was not answered well, as
// external-provisioner does.
func (w *world) resolve(h history) {
	w.Helper()
	got := w.get(h.Volume)
	switch {
	case h.deleted:
		w.WantCode(h.ID+" was deleted, get", got, codes.NotFound)
	case h.created && !h.asked:
		w.WantCode(h.ID+" was made, get", got, codes.OK)
		if h.filled {
			w.Must(w.holds(h.Volume))
		}
		w.acknowledged = append(w.acknowledged, drivertest.Kept{Volume: h.Volume})
		w.Must(w.create(h.Volume)) // is there
	default: // what an attempt has left may be in its way
		w.Must(drivertest.Repeat(w.Context(), func() error { return w.delete(h.Volume) }))
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
