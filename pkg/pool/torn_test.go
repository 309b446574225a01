package pool_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const aPoolAndAnother = `[{"name":"legacy","path":"pool"},{"name":"other","path":"other"}]`

// A diary is what the driver says in its log.
type diary struct {
	mu    sync.Mutex
	lines []string
}

func (d *diary) write(prefix, args string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, prefix+args)
}

// count is how many lines have all the words.
func (d *diary) count(words ...string) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, line := range d.lines {
		all := true
		for _, word := range words {
			all = all && strings.Contains(line, word)
		}
		if all {
			n++
		}
	}
	return n
}

// withTwoPools runs a test on a node with a pool that is going to be spoilt, in which
// pvc-1 holds data and pvc-2 is, and with another one, which has pvc-3.
func withTwoPools(t *testing.T, test func(t *testing.T, b *harness, said *diary)) {
	t.Helper()
	root := testenv.Tmpfs(t, 256*mib) // each start writes durably, and there are many
	synctest.Test(t, func(t *testing.T) {
		b, said := newHarness(t, root), &diary{}
		b.log = funcr.New(said.write, funcr.Options{})
		b.start(aPoolAndAnother)
		b.create("pvc-1", mib)
		must.Succeed(t, os.WriteFile(b.Path("pool", "pvc-1", "data"), []byte("data"), 0o644))
		b.create("pvc-2", mib)
		_, err := b.Create(t.Context(), pool.Request{ID: id(t, "pvc-3"), Pool: poolName(t, "other"), Range: volume.Range{Required: mib}})
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(b.Path("canary"), []byte("canary"), 0o600))
		test(t, b, said)
		if data, err := os.ReadFile(b.Path("canary")); err != nil || string(data) != "canary" {
			t.Errorf("the canary outside is %q, %v", data, err)
		}
	})
}

func poolName(t *testing.T, s string) volume.PoolName {
	t.Helper()
	name := must.Value(volume.ParsePoolName(s))(t)
	return name
}

// wantServed says that volumes are as good as ever.
func (h *harness) wantServed(volumes ...string) {
	h.t.Helper()
	for _, name := range volumes {
		must.Succeed(h.t, h.publish(name, "served"))
		must.Succeed(h.t, h.unpublish(name, "served"))
		if v := h.volume(name); v.Condition.Abnormal {
			h.t.Errorf("the condition of %s is %+v, want it in order", name, v.Condition)
		}
	}
}

// spoilt are things that can be found where a file should be.
var spoilt = map[string]func(path string) error{
	"nothing in it": func(path string) error { return os.WriteFile(path, nil, 0o600) },
	"zeros":         func(path string) error { return os.WriteFile(path, make([]byte, 300), 0o600) },
	"garbage":       func(path string) error { return os.WriteFile(path, []byte("\xff\xfe{\"version\":1"), 0o600) },
	"null":          func(path string) error { return os.WriteFile(path, []byte("null"), 0o600) },
	"a list":        func(path string) error { return os.WriteFile(path, []byte(`[{"version":1}]`), 0o600) },
	"a file larger than any": func(path string) error {
		return os.WriteFile(path, []byte(`{"version":1,"x":"`+strings.Repeat("x", 100<<10)+`"}`), 0o600)
	},
	"a file of a terabyte": func(path string) error {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return err
		}
		return os.Truncate(path, 1<<40)
	},
	"a directory": func(path string) error { return os.MkdirAll(filepath.Join(path, "with", "more"), 0o755) },
	"a FIFO":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
	"a socket": func(path string) error {
		return syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0)
	},
	"a link to what was there": func(path string) error { return os.Symlink(filepath.Base(path)+".was", path) },
	"a link to a file outside": func(path string) error { return os.Symlink("../../../canary", path) },
	"a link to nowhere":        func(path string) error { return os.Symlink("nowhere", path) },
	"a link to itself":         func(path string) error { return os.Symlink(filepath.Base(path), path) },
}

// spoil puts a file aside and something else in its place.
func spoil(t *testing.T, path string, with func(string) error) {
	t.Helper()
	must.Succeed(t, os.Rename(path, path+".was"))
	must.Succeed(t, with(path))
}

// wantOneBad says that pvc-1 is out of order and reported, and nothing else is.
func (h *harness) wantOneBad(said *diary) {
	h.t.Helper()
	h.wantVolumes("pvc-1", "pvc-2", "pvc-3")
	h.wantToldOf(said)
	wantError(h.t, h.publish("pvc-1", "a"), volume.ErrDamagedRecord)
	_, err := h.Create(h.t.Context(), pool.Request{ID: id(h.t, "pvc-1"), Range: volume.Range{Required: mib}})
	wantError(h.t, err, volume.ErrDamagedRecord)
	_, err = h.Expand(h.t.Context(), id(h.t, "pvc-1"), h.Target("a"), "", volume.Range{Required: 2 * mib})
	wantError(h.t, err, volume.ErrDamagedRecord)
	must.Succeed(h.t, h.unpublish("pvc-1", "a"))
	if data, err := os.ReadFile(h.Path("pool", "pvc-1", "data")); err != nil || string(data) != "data" {
		h.t.Errorf("the volume holds %q, %v", data, err)
	}
	h.wantServed("pvc-2", "pvc-3")
	h.create("pvc-4", mib)
	h.delete("pvc-4")
	h.settled()
}

// withTwoSnapshots runs a test on the node of withTwoPools, where pvc-1 has the snapshots s-1 and s-2.
func withTwoSnapshots(t *testing.T, test func(t *testing.T, b *harness)) {
	t.Helper()
	withTwoPools(t, func(t *testing.T, h *harness, _ *diary) {
		must.Succeed(t, h.snapshot("s-1", "pvc-1"))
		must.Succeed(t, h.snapshot("s-2", "pvc-1"))
		test(t, h)
	})
}

func snapshotID(t *testing.T, name string) volume.ID {
	t.Helper()
	id := must.Value(volume.ParseSnapshot(name))(t)
	return id
}

// snapshot makes one that is not verified: what a test has just written counts as changed.
func (h *harness) snapshot(name, of string) error {
	_, err := h.Snapshots().Create(h.t.Context(), pool.SnapshotRequest{
		ID: snapshotID(h.t, name), Source: id(h.t, of), Way: pool.CopyWay{WhenWritten: volume.Accept},
	})
	return err
}

func (h *harness) restore(name, from string) (pool.Volume, error) {
	awaitTick(h.t, h.Root)
	return h.Create(h.t.Context(), pool.Request{
		ID: id(h.t, name), Pool: poolName(h.t, "legacy"), Source: &pool.Source{ID: snapshotID(h.t, from)},
	})
}

// wantOneBadSnapshot says that s-1 cannot be used, whole or not, and that all else can.
func (h *harness) wantOneBadSnapshot() {
	h.t.Helper()
	_, err := h.Snapshots().Find(h.t.Context(), snapshotID(h.t, "s-1"))
	wantError(h.t, err, volume.ErrDamagedRecord)
	wantError(h.t, h.snapshot("s-1", "pvc-1"), volume.ErrDamagedRecord)
	_, err = h.restore("pvc-4", "s-1")
	wantError(h.t, err, volume.ErrDamagedRecord)
	if page, _ := h.Snapshots().List(h.t.Context(), volume.ID{}, volume.ID{}, 10); len(page) != 1 || page[0].ID != snapshotID(h.t, "s-2") {
		h.t.Errorf("listed are the snapshots %+v, want s-2", page)
	}
	if s := h.Status()[0].Snapshots; s.Count != 2 || s.Lost != 1 {
		h.t.Errorf("the snapshots are %+v, want one of two lost", s)
	}
	if data, err := os.ReadFile(h.Own("snapshots", "~s-1", "data")); err != nil || string(data) != "data" {
		h.t.Errorf("the snapshot holds %q, %v", data, err)
	}
	h.wantServed("pvc-1", "pvc-2", "pvc-3")
	_, err = h.restore("pvc-4", "s-2")
	must.Succeed(h.t, err)
	h.delete("pvc-4")
	h.settled()
}

// badSnapshots are texts that are no records of s-1.
var badSnapshots = map[string]string{
	"of a volume":                `{"version":1,"id":"pvc-2","uid":"0123456789abcdef","mode":"mount","bytes":1}`,
	"of a snapshot of nothing":   `{"version":1,"id":"~s-1","uid":"0123456789abcdef","mode":"mount","bytes":1}`,
	"of a source that climbs":    `{"version":1,"id":"~s-1","uid":"0123456789abcdef","mode":"mount","bytes":1,"origin":{"id":"../pvc-1","uid":"x","bytes":1,"method":"copy","consistency":"unverified"}}`,
	"made in an unknown way":     `{"version":1,"id":"~s-1","uid":"0123456789abcdef","mode":"mount","bytes":1,"origin":{"id":"pvc-1","uid":"x","bytes":1,"method":"tape","consistency":"unverified"}}`,
	"of an unknown consistency":  `{"version":1,"id":"~s-1","uid":"0123456789abcdef","mode":"mount","bytes":1,"origin":{"id":"pvc-1","uid":"x","bytes":1,"method":"copy","consistency":"good"}}`,
	"of a source without a size": `{"version":1,"id":"~s-1","uid":"0123456789abcdef","mode":"mount","bytes":1,"origin":{"id":"pvc-1","uid":"x","bytes":-1,"method":"copy","consistency":"unverified"}}`,
}

func TestBadRecordAffectsOneSnapshot(t *testing.T) {
	all := make(map[string]func(string) error)
	for name, with := range spoilt {
		all[name] = with
	}
	for name, text := range badSnapshots {
		all[name] = func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	for name, with := range all {
		t.Run(name, func(t *testing.T) {
			withTwoSnapshots(t, func(t *testing.T, h *harness) {
				spoil(t, h.Own("volumes", "~s-1.json"), with)
				before := tree(t, h.Own("volumes", "~s-1.json"))
				h.restart(aPoolAndAnother)
				h.wantOneBadSnapshot()
				if diff := cmp.Diff(before, tree(t, h.Own("volumes", "~s-1.json"))); diff != "" {
					t.Errorf("the bad record was not kept as it was (-before +after):\n%s", diff)
				}
				must.Succeed(t, os.RemoveAll(h.Own("volumes", "~s-1.json.was")))
				for _, name := range []string{"s-1", "s-2"} {
					must.Succeed(t, h.Snapshots().Delete(t.Context(), snapshotID(t, name)))
				}
				h.wantVolumes("pvc-1", "pvc-2", "pvc-3")
				h.wantClean()
			})
		})
	}
}

// A disk that lost its power may have any part of a file.
func TestTruncatedRecordIsKept(t *testing.T) {
	withTwoPools(t, func(t *testing.T, h *harness, _ *diary) {
		record := h.Own("volumes", "pvc-1.json")
		whole := must.Value(os.ReadFile(record))(t)
		for length := range len(whole) - 1 { // the last byte is the end of the line
			must.Succeed(t, os.WriteFile(record, whole[:length], 0o600))
			said := &diary{}
			h.log = funcr.New(said.write, funcr.Options{})
			h.restart(aPoolAndAnother)
			h.wantOneBad(said)
			if t.Failed() {
				t.Fatalf("with %d bytes of the record", length)
			}
		}
		must.Succeed(t, os.WriteFile(record, whole[:len(whole)-1], 0o600))
		h.restart(aPoolAndAnother)
		h.wantServed("pvc-1", "pvc-2")
	})
}

func TestEditedRecordTakesEffect(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.create("pvc-1", 3*mib)
		written := must.Value(os.ReadFile(h.Own("volumes", "pvc-1.json")))(t)
		for range 2 {
			for bytesPromised, text := range map[int64]string{
				3 * mib: string(written),
				7 * mib: strings.Replace(string(written), strconv.Itoa(3*mib), strconv.Itoa(7*mib), 1),
				5 * mib: strings.Replace(string(written), `:`+strconv.Itoa(3*mib), `: `+strconv.Itoa(5*mib), 1),
			} {
				must.Succeed(t, os.WriteFile(h.Own("volumes", "pvc-1.json"), []byte(text), 0o600))
				v := must.Value(h.Volume(t.Context(), id(t, "pvc-1")))(t)
				if v.Bytes != bytesPromised {
					t.Errorf("with the record %s the volume has %d bytes, want %d", text, v.Bytes, bytesPromised)
				}
			}
		}
	})
}

// What is in the directories of the layout and was not put there by the driver is
// no driver's volume, and keeps no volume from being served.
func TestUnknownEntriesInLayoutAreKept(t *testing.T) {
	for _, place := range []string{"volumes/.new-pvc-5.json", "published/node-1/pvc-1", "published/node-9/pvc-6",
		"snapshots/pvc-5", "snapshots/~s-5", "creating/node-1/~s-5", "trash/node-1/~s-5.0123456789abcdef",
		"creating/node-1/pvc-5", "trash/node-1/pvc-5.0123456789abcdef", "creating/node-9", "trash/node-9", "more"} {
		for name, with := range spoilt {
			t.Run(place+", "+name, func(t *testing.T) {
				withTwoPools(t, func(t *testing.T, h *harness, _ *diary) {
					path := h.Own(place)
					must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o700))
					must.Succeed(t, with(path))
					shared := strings.Replace(aPoolAndAnother, `"path":"pool"`, `"path":"pool","shared":true`, 1)
					for _, datadir := range []string{aPoolAndAnother, shared} {
						must.Succeed(t, h.Close(t.Context()))
						h.reshare(datadir == shared)
						h.start(datadir)
						if err := h.Status()[0].Err; err != nil {
							t.Fatal(err)
						}
						h.wantServed("pvc-1", "pvc-2", "pvc-3")
						h.create("pvc-5", mib)
						h.delete("pvc-5")
						h.later(2 * time.Minute)
						h.wantVolumes("pvc-1", "pvc-2", "pvc-3")
					}
				})
			})
		}
	}
}

// formats are those that this driver must not touch, and what it says of them.
var formats = map[string]string{
	`{"version":2,"uuid":"x","foreignBytes":0}`:                    "version 2",
	`{"version":2,"uuid":{"high":1,"low":2},"created":1790000000}`: "version 2",
	`{"version":0,"uuid":"x"}`:                                     "version 0",
	`{"uuid":"x"}`:                                                 "version 0",
	`{"version":1}`:                                                "no uuid",
	`{"version":"one","uuid":"x"}`:                                 "unreadable",
	`{"version":1,"uuid":"x","foreignBytes":-1}`:                   "-1 foreign bytes",
}

func TestUnknownFormatIsRefused(t *testing.T) {
	all, says := make(map[string]func(string) error), make(map[string]string)
	for name, with := range spoilt {
		all[name] = with
	}
	for text, words := range formats {
		all[text], says[text] = func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }, words
	}
	for name, with := range all {
		t.Run(name, func(t *testing.T) {
			withTwoPools(t, func(t *testing.T, h *harness, said *diary) {
				must.Succeed(t, h.Close(t.Context()))
				h.litter(t)
				spoil(t, h.Own("format"), with)
				before := tree(t, h.Path("pool"))
				h.start(aPoolAndAnother)
				h.wantRefused(said, says[name])
				if diff := cmp.Diff(before, tree(t, h.Path("pool"))); diff != "" {
					t.Errorf("the refused pool was changed (-before +after):\n%s", diff)
				}
			})
		})
	}
}

func TestTruncatedFormatIsRefused(t *testing.T) {
	withTwoPools(t, func(t *testing.T, h *harness, said *diary) {
		must.Succeed(t, h.Close(t.Context()))
		whole := must.Value(os.ReadFile(h.Own("format")))(t)
		for length := range len(whole) - 1 {
			must.Succeed(t, os.WriteFile(h.Own("format"), whole[:length], 0o600))
			before := tree(t, h.Path("pool"))
			h.start(aPoolAndAnother)
			h.wantRefused(said, "unreadable")
			must.Succeed(t, h.Close(t.Context()))
			if diff := cmp.Diff(before, tree(t, h.Path("pool"))); diff != "" || t.Failed() {
				t.Fatalf("with %d bytes of the format (-before +after):\n%s", length, diff)
			}
		}
		must.Succeed(t, os.WriteFile(h.Own("format"), whole[:len(whole)-1], 0o600))
		h.start(aPoolAndAnother)
		h.wantServed("pvc-1", "pvc-2", "pvc-3")
	})
}

// litter leaves what recovery acts on.
func (h *harness) litter(t *testing.T) {
	t.Helper()
	must.Succeed(t, os.Chmod(h.Path("pool"), 0o755))
	must.Succeed(t, os.Mkdir(h.Own("creating", "node-1", "pvc-7"), 0o700))
	must.Succeed(t, os.Mkdir(h.Own("creating", "node-1", "pvc-2"), 0o700))
	must.Succeed(t, os.Mkdir(h.Own("trash", "node-1", "pvc-8.0123456789abcdef"), 0o700))
	must.Succeed(t, os.WriteFile(h.Own("volumes", ".new-pvc-7.json"), []byte("{"), 0o600))
}

// wantRefused says that the first pool is served by no call, with words, and that the
// other one is.
func (h *harness) wantRefused(said *diary, words string) {
	h.t.Helper()
	h.later(time.Minute)
	status := h.Status()[0]
	if wantError(h.t, status.Err, volume.ErrUnavailable); !strings.Contains(fmt.Sprint(status.Err), words) || !strings.Contains(fmt.Sprint(status.Err), "format") {
		h.t.Errorf("%v does not report the format and %q", status.Err, words)
	}
	if said.count("Pool does not serve", "legacy", words) == 0 {
		h.t.Errorf("the log does not report it: %q", said.lines)
	}
	for _, name := range []string{"pvc-1", "pvc-9"} {
		_, err := h.Create(h.t.Context(), pool.Request{ID: id(h.t, name), Pool: poolName(h.t, "legacy"), Range: volume.Range{Required: mib}})
		wantError(h.t, err, volume.ErrNoSpace)
		wantError(h.t, h.Delete(h.t.Context(), id(h.t, name)), volume.ErrUnavailable)
		wantError(h.t, h.publish(name, "a"), volume.ErrUnavailable)
		must.Succeed(h.t, h.unpublish(name, "a"))
	}
	if got := h.capacity(); got != 0 {
		h.t.Errorf("capacity %d, want 0", got)
	}
	h.wantVolumes("pvc-3")
	h.wantServed("pvc-3")
}

// files is tree without the directory itself.
func files(t *testing.T, root string) map[string]string {
	t.Helper()
	all := tree(t, root)
	delete(all, root)
	return all
}

// tree is all that can be seen of a directory and what is below it, but for when it
// was read.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	must.Succeed(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		content := ""
		switch {
		case d.Type() == fs.ModeSymlink:
			content, err = os.Readlink(path)
		case d.Type().IsRegular() && st.Size < mib:
			var data []byte
			data, err = os.ReadFile(path)
			content = string(data)
		}
		all[path] = fmt.Sprintf("inode %d, mode %o, %d links, owner %d:%d, %d bytes, modified %d, changed %d, %q",
			st.Ino, st.Mode, st.Nlink, st.Uid, st.Gid, st.Size, st.Mtim.Nano(), st.Ctim.Nano(), content)
		return err
	}))
	return all
}

// A link among the driver's own directories leads nowhere, when the driver starts and
// while it runs.
func TestLinksInLayoutAreNotFollowed(t *testing.T) {
	for _, place := range []string{"", "volumes", "snapshots", "snapshots/~s-1", "creating", "creating/node-1", "trash", "trash/node-1", "published", "published/node-1", "lock"} {
		for _, sharing := range []string{"", `,"shared":true`} {
			t.Run(place+sharing, func(t *testing.T) {
				withTwoPools(t, func(t *testing.T, h *harness, _ *diary) {
					datadir := strings.Replace(aPoolAndAnother, `"path":"pool"`, `"path":"pool"`+sharing, 1)
					must.Succeed(t, h.snapshot("s-1", "pvc-1"), h.Close(t.Context()))
					h.reshare(sharing != "")
					h.start(datadir)
					must.Succeed(t, h.publish("pvc-1", "a"))
					outside := h.Path("outside")
					for _, d := range []string{"pvc-1", "~s-1", "~s-1/~s-1", "pvc-5.0123456789abcdef", "creating/node-1/pvc-6", "trash/node-1/pvc-7.0123456789abcdef"} {
						must.Succeed(t, os.MkdirAll(filepath.Join(outside, d), 0o755))
					}
					must.Succeed(t, os.WriteFile(filepath.Join(outside, "pvc-1.json"), []byte("{"), 0o600))
					must.Succeed(t, os.WriteFile(filepath.Join(outside, ".new-pvc-1.json"), []byte("{"), 0o600))
					before := tree(t, outside)
					must.Succeed(t, os.RemoveAll(h.Own(place)))
					must.Succeed(t, os.MkdirAll(filepath.Dir(h.Own(place)), 0o700))
					must.Succeed(t, os.Symlink(outside, h.Own(place)))
					for range 2 {
						h.tryAll()
						h.later(5 * time.Minute)
						h.wantServed("pvc-3")
						if diff := cmp.Diff(before, tree(t, outside)); diff != "" {
							t.Errorf("what is outside was changed (-before +after):\n%s", diff)
						}
						h.restart(datadir)
					}
				})
			})
		}
	}
}

// tryAll makes all calls on the first pool, whatever they answer.
func (h *harness) tryAll() {
	h.t.Helper()
	for _, name := range []string{"pvc-1", "pvc-2", "pvc-5"} {
		_, _ = h.Create(h.t.Context(), pool.Request{ID: id(h.t, name), Pool: poolName(h.t, "legacy"), Range: volume.Range{Required: mib}})
		_ = h.publish(name, name)
		_, _ = h.Expand(h.t.Context(), id(h.t, name), h.Target(name), "", volume.Range{Required: 2 * mib})
		_, _ = h.Publications().Stats(h.t.Context(), id(h.t, name), h.Target(name))
		_ = h.unpublish(name, name)
		_ = h.snapshot("s-1", name)
		_ = h.snapshot("s-2", name)
		_, _ = h.restore("pvc-6", "s-1")
		_ = h.Delete(h.t.Context(), id(h.t, "pvc-6"))
		_ = h.Delete(h.t.Context(), id(h.t, name))
	}
	for _, name := range []string{"s-1", "s-2"} {
		_, _ = h.Snapshots().Find(h.t.Context(), snapshotID(h.t, name))
		_ = h.Snapshots().Delete(h.t.Context(), snapshotID(h.t, name))
	}
	h.Snapshots().List(h.t.Context(), volume.ID{}, volume.ID{}, 10)
	h.capacity()
	h.settled()
}
