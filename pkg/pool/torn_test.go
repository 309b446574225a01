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
func withTwoPools(t *testing.T, test func(t *testing.T, b *bench, said *diary)) {
	t.Helper()
	root := testenv.Tmpfs(t, 256*mib) // each start writes durably, and there are many
	synctest.Test(t, func(t *testing.T) {
		b, said := newBench(t, root), &diary{}
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
	name, err := volume.ParsePoolName(s)
	must.Succeed(t, err)
	return name
}

// wantServed says that volumes are as good as ever.
func (b *bench) wantServed(volumes ...string) {
	b.t.Helper()
	for _, name := range volumes {
		must.Succeed(b.t, b.publish(name, "served"))
		must.Succeed(b.t, b.unpublish(name, "served"))
		if v := b.volume(name); v.Condition.Abnormal {
			b.t.Errorf("the condition of %s is %+v, want it in order", name, v.Condition)
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

// badRecords are texts that are no records of pvc-1, with what is said of them.
var badRecords = map[string]struct{ text, says string }{
	"of another volume":              {`{"version":1,"id":"pvc-2","uid":"0123456789abcdef","mode":"mount","bytes":1}`, "pvc-2"},
	"of a newer version":             {`{"version":4,"id":{"name":"pvc-1"}}`, "version 4"},
	"without a version":              {`{"id":"pvc-1","uid":"0123456789abcdef","mode":"mount","bytes":1}`, "version 0"},
	"with a uid that has a dot":      {`{"version":1,"id":"pvc-1","uid":"by.hand","mode":"mount","bytes":1}`, "by.hand"},
	"with a uid for too long a name": {`{"version":1,"id":"pvc-1","uid":"0123456789abcdef0123456789ab","mode":"mount","bytes":1}`, "0123456789abcdef0123456789ab"},
	"of an unknown mode":             {`{"version":1,"id":"pvc-1","uid":"0123456789abcdef","mode":"tape","bytes":1}`, "tape"},
	"with a negative size":           {`{"version":1,"id":"pvc-1","uid":"0123456789abcdef","mode":"mount","bytes":-1}`, "-1"},
	"with a size beyond all disks":   {`{"version":1,"id":"pvc-1","uid":"0123456789abcdef","mode":"mount","bytes":9223372036854775807}`, "9223372036854775807"},
	"with a size beyond all numbers": {`{"version":1,"id":"pvc-1","uid":"0123456789abcdef","mode":"mount","bytes":1e30}`, "1e30"},
	"with a uid that climbs":         {`{"version":1,"id":"pvc-1","uid":"../../x","mode":"mount","bytes":1}`, "../../x"},
	"with another's project id":      {`{"version":1,"id":"pvc-1","uid":"0123456789abcdef","mode":"mount","bytes":1,"quota":"xfs","projectID":1}`, "project id"},
	"with a block that no disk has":  {`{"version":1,"id":"pvc-1","uid":"0123456789abcdef","mode":"block","bytes":4096,"blockBytes":7}`, "block"},
}

func TestBadRecordAffectsOneVolume(t *testing.T) {
	all := make(map[string]func(string) error)
	for name, with := range spoilt {
		all[name] = with
	}
	for name, bad := range badRecords {
		all[name] = func(path string) error { return os.WriteFile(path, []byte(bad.text), 0o600) }
	}
	for name, with := range all {
		t.Run(name, func(t *testing.T) {
			withTwoPools(t, func(t *testing.T, b *bench, said *diary) {
				spoil(t, b.Own("volumes", "pvc-1.json"), with)
				before := files(t, b.Own("volumes"))
				b.restart(aPoolAndAnother)
				b.wantOneBad(said)
				if says := badRecords[name].says; !strings.Contains(b.volume("pvc-1").Condition.Message, says) {
					t.Errorf("the condition %+v does not say %q", b.volume("pvc-1").Condition, says)
				}
				if diff := cmp.Diff(before, files(t, b.Own("volumes"))); diff != "" {
					t.Errorf("the bad record was not kept as it was (-before +after):\n%s", diff)
				}
				b.delete("pvc-1")
				must.Succeed(t, os.RemoveAll(b.Own("volumes", "pvc-1.json.was")))
				b.wantVolumes("pvc-2", "pvc-3")
				b.wantClean()
			})
		})
	}
}

// wantOneBad says that pvc-1 is out of order and reported, and nothing else is.
func (b *bench) wantOneBad(said *diary) {
	b.t.Helper()
	b.wantVolumes("pvc-1", "pvc-2", "pvc-3")
	b.wantToldOf(said)
	wantError(b.t, b.publish("pvc-1", "a"), volume.ErrDamagedRecord)
	_, err := b.Create(b.t.Context(), pool.Request{ID: id(b.t, "pvc-1"), Range: volume.Range{Required: mib}})
	wantError(b.t, err, volume.ErrDamagedRecord)
	_, err = b.Expand(b.t.Context(), id(b.t, "pvc-1"), b.Target("a"), "", volume.Range{Required: 2 * mib})
	wantError(b.t, err, volume.ErrDamagedRecord)
	must.Succeed(b.t, b.unpublish("pvc-1", "a"))
	if data, err := os.ReadFile(b.Path("pool", "pvc-1", "data")); err != nil || string(data) != "data" {
		b.t.Errorf("the volume holds %q, %v", data, err)
	}
	b.wantServed("pvc-2", "pvc-3")
	b.create("pvc-4", mib)
	b.delete("pvc-4")
	b.settled()
}

// withTwoSnapshots runs a test on the node of withTwoPools, where pvc-1 has the snapshots s-1 and s-2.
func withTwoSnapshots(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	withTwoPools(t, func(t *testing.T, b *bench, _ *diary) {
		must.Succeed(t, b.snapshot("s-1", "pvc-1"))
		must.Succeed(t, b.snapshot("s-2", "pvc-1"))
		test(t, b)
	})
}

func snapshotID(t *testing.T, name string) volume.ID {
	t.Helper()
	id, err := volume.ParseSnapshot(name)
	must.Succeed(t, err)
	return id
}

// snapshot makes one that is not verified: what a test has just written counts as changed.
func (b *bench) snapshot(name, of string) error {
	_, err := b.Snapshots().Create(b.t.Context(), pool.SnapshotRequest{
		ID: snapshotID(b.t, name), Source: id(b.t, of), Way: pool.CopyWay{WhenWritten: volume.Accept},
	})
	return err
}

func (b *bench) restore(name, from string) (pool.Volume, error) {
	awaitTick(b.t, b.Root)
	return b.Create(b.t.Context(), pool.Request{
		ID: id(b.t, name), Pool: poolName(b.t, "legacy"), Source: &pool.Source{ID: snapshotID(b.t, from)},
	})
}

// wantOneBadSnapshot says that s-1 cannot be used, whole or not, and that all else can.
func (b *bench) wantOneBadSnapshot() {
	b.t.Helper()
	_, err := b.Snapshots().Find(b.t.Context(), snapshotID(b.t, "s-1"))
	wantError(b.t, err, volume.ErrDamagedRecord)
	wantError(b.t, b.snapshot("s-1", "pvc-1"), volume.ErrDamagedRecord)
	_, err = b.restore("pvc-4", "s-1")
	wantError(b.t, err, volume.ErrDamagedRecord)
	if page, _ := b.Snapshots().List(b.t.Context(), volume.ID{}, volume.ID{}, 10); len(page) != 1 || page[0].ID != snapshotID(b.t, "s-2") {
		b.t.Errorf("listed are the snapshots %+v, want s-2", page)
	}
	if s := b.Status()[0].Snapshots; s.Count != 2 || s.Lost != 1 {
		b.t.Errorf("the snapshots are %+v, want one of two lost", s)
	}
	if data, err := os.ReadFile(b.Own("snapshots", "~s-1", "data")); err != nil || string(data) != "data" {
		b.t.Errorf("the snapshot holds %q, %v", data, err)
	}
	b.wantServed("pvc-1", "pvc-2", "pvc-3")
	_, err = b.restore("pvc-4", "s-2")
	must.Succeed(b.t, err)
	b.delete("pvc-4")
	b.settled()
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
			withTwoSnapshots(t, func(t *testing.T, b *bench) {
				spoil(t, b.Own("volumes", "~s-1.json"), with)
				before := tree(t, b.Own("volumes", "~s-1.json"))
				b.restart(aPoolAndAnother)
				b.wantOneBadSnapshot()
				if diff := cmp.Diff(before, tree(t, b.Own("volumes", "~s-1.json"))); diff != "" {
					t.Errorf("the bad record was not kept as it was (-before +after):\n%s", diff)
				}
				must.Succeed(t, os.RemoveAll(b.Own("volumes", "~s-1.json.was")))
				for _, name := range []string{"s-1", "s-2"} {
					must.Succeed(t, b.Snapshots().Delete(t.Context(), snapshotID(t, name)))
				}
				b.wantVolumes("pvc-1", "pvc-2", "pvc-3")
				b.wantClean()
			})
		})
	}
}

// A disk that lost its power may have any part of a file.
func TestTruncatedRecordIsKept(t *testing.T) {
	withTwoPools(t, func(t *testing.T, b *bench, _ *diary) {
		record := b.Own("volumes", "pvc-1.json")
		whole, err := os.ReadFile(record)
		must.Succeed(t, err)
		for length := range len(whole) - 1 { // the last byte is the end of the line
			must.Succeed(t, os.WriteFile(record, whole[:length], 0o600))
			said := &diary{}
			b.log = funcr.New(said.write, funcr.Options{})
			b.restart(aPoolAndAnother)
			b.wantOneBad(said)
			if t.Failed() {
				t.Fatalf("with %d bytes of the record", length)
			}
		}
		must.Succeed(t, os.WriteFile(record, whole[:len(whole)-1], 0o600))
		b.restart(aPoolAndAnother)
		b.wantServed("pvc-1", "pvc-2")
	})
}

func TestEditedRecordTakesEffect(t *testing.T) {
	inBubble(t, func(t *testing.T, b *bench) {
		b.create("pvc-1", 3*mib)
		written, err := os.ReadFile(b.Own("volumes", "pvc-1.json"))
		must.Succeed(t, err)
		for range 2 {
			for bytesPromised, text := range map[int64]string{
				3 * mib: string(written),
				7 * mib: strings.Replace(string(written), strconv.Itoa(3*mib), strconv.Itoa(7*mib), 1),
				5 * mib: strings.Replace(string(written), `:`+strconv.Itoa(3*mib), `: `+strconv.Itoa(5*mib), 1),
			} {
				must.Succeed(t, os.WriteFile(b.Own("volumes", "pvc-1.json"), []byte(text), 0o600))
				v, err := b.Volume(t.Context(), id(t, "pvc-1"))
				must.Succeed(t, err)
				if v.Bytes != bytesPromised {
					t.Errorf("with the record %s the volume has %d bytes, want %d", text, v.Bytes, bytesPromised)
				}
			}
		}
	})
}

func TestCopiedRecordIsNotCounted(t *testing.T) {
	withTwoPools(t, func(t *testing.T, b *bench, said *diary) {
		record, err := os.ReadFile(b.Own("volumes", "pvc-1.json"))
		must.Succeed(t, err)
		for _, name := range []string{"pvc-9.json", "pvc-1.json.bak", "pvc-1.JSON", ".pvc-1.json", "x y.json", "..json", ".json"} {
			must.Succeed(t, os.WriteFile(b.Own("volumes", name), record, 0o600))
		}
		before := files(t, b.Own("volumes"))
		b.restart(aPoolAndAnother)
		b.wantVolumes("pvc-1", "pvc-2", "pvc-3", "pvc-9")
		b.wantServed("pvc-1", "pvc-2", "pvc-3")
		if promised := b.Status()[0].Promised; promised != 2*mib {
			t.Errorf("%d bytes are promised, want 2 MiB", promised)
		}
		if v := b.volume("pvc-9"); !v.Lost || !strings.Contains(v.Condition.Message, `"pvc-1"`) || said.count("Record is unreadable", "pvc-9") != 1 {
			t.Errorf("volume %+v, want it lost, and reported", v)
		}
		_, err = b.Create(t.Context(), pool.Request{ID: id(t, "pvc-9"), Range: volume.Range{Required: mib}})
		wantError(t, err, volume.ErrDamagedRecord)
		b.later(2 * time.Minute)
		if diff := cmp.Diff(before, files(t, b.Own("volumes"))); diff != "" {
			t.Errorf("the records changed (-before +after):\n%s", diff)
		}
		b.delete("pvc-9")
		b.wantServed("pvc-1")
	})
}

// What is in the directories of the layout and was not put there by the driver is
// no driver's volume, and keeps no volume from being served.
func TestUnknownEntriesInLayoutAreKept(t *testing.T) {
	for _, place := range []string{"volumes/.new-pvc-5.json", "published/node-1/pvc-1", "published/node-9/pvc-1",
		"snapshots/pvc-5", "snapshots/~s-5", "creating/node-1/~s-5", "trash/node-1/~s-5.0123456789abcdef",
		"creating/node-1/pvc-5", "trash/node-1/pvc-5.0123456789abcdef", "creating/node-9", "trash/node-9", "more"} {
		for name, with := range spoilt {
			t.Run(place+", "+name, func(t *testing.T) {
				withTwoPools(t, func(t *testing.T, b *bench, _ *diary) {
					path := b.Own(place)
					must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o700))
					must.Succeed(t, with(path))
					for _, datadir := range []string{aPoolAndAnother, strings.Replace(aPoolAndAnother, `"path":"pool"`, `"path":"pool","shared":true`, 1)} {
						b.restart(datadir)
						if err := b.Status()[0].Err; err != nil {
							t.Fatal(err)
						}
						b.wantServed("pvc-1", "pvc-2", "pvc-3")
						b.create("pvc-5", mib)
						b.delete("pvc-5")
						b.later(2 * time.Minute)
						b.wantVolumes("pvc-1", "pvc-2", "pvc-3")
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
			withTwoPools(t, func(t *testing.T, b *bench, said *diary) {
				must.Succeed(t, b.Close(t.Context()))
				b.litter(t)
				spoil(t, b.Own("format"), with)
				before := tree(t, b.Path("pool"))
				b.start(aPoolAndAnother)
				b.wantRefused(said, says[name])
				if diff := cmp.Diff(before, tree(t, b.Path("pool"))); diff != "" {
					t.Errorf("the refused pool was changed (-before +after):\n%s", diff)
				}
			})
		})
	}
}

func TestTruncatedFormatIsRefused(t *testing.T) {
	withTwoPools(t, func(t *testing.T, b *bench, said *diary) {
		must.Succeed(t, b.Close(t.Context()))
		whole, err := os.ReadFile(b.Own("format"))
		must.Succeed(t, err)
		for length := range len(whole) - 1 {
			must.Succeed(t, os.WriteFile(b.Own("format"), whole[:length], 0o600))
			before := tree(t, b.Path("pool"))
			b.start(aPoolAndAnother)
			b.wantRefused(said, "unreadable")
			must.Succeed(t, b.Close(t.Context()))
			if diff := cmp.Diff(before, tree(t, b.Path("pool"))); diff != "" || t.Failed() {
				t.Fatalf("with %d bytes of the format (-before +after):\n%s", length, diff)
			}
		}
		must.Succeed(t, os.WriteFile(b.Own("format"), whole[:len(whole)-1], 0o600))
		b.start(aPoolAndAnother)
		b.wantServed("pvc-1", "pvc-2", "pvc-3")
	})
}

// litter leaves what recovery acts on.
func (b *bench) litter(t *testing.T) {
	t.Helper()
	must.Succeed(t, os.Chmod(b.Path("pool"), 0o755))
	must.Succeed(t, os.Mkdir(b.Own("creating", "node-1", "pvc-7"), 0o700))
	must.Succeed(t, os.Mkdir(b.Own("creating", "node-1", "pvc-2"), 0o700))
	must.Succeed(t, os.Mkdir(b.Own("trash", "node-1", "pvc-8.0123456789abcdef"), 0o700))
	must.Succeed(t, os.WriteFile(b.Own("volumes", ".new-pvc-7.json"), []byte("{"), 0o600))
}

// wantRefused says that the first pool is served by no call, with words, and that the
// other one is.
func (b *bench) wantRefused(said *diary, words string) {
	b.t.Helper()
	b.later(time.Minute)
	status := b.Status()[0]
	if wantError(b.t, status.Err, volume.ErrUnavailable); !strings.Contains(fmt.Sprint(status.Err), words) || !strings.Contains(fmt.Sprint(status.Err), "format") {
		b.t.Errorf("%v does not report the format and %q", status.Err, words)
	}
	if said.count("Pool does not serve", "legacy", words) == 0 {
		b.t.Errorf("the log does not report it: %q", said.lines)
	}
	for _, name := range []string{"pvc-1", "pvc-9"} {
		_, err := b.Create(b.t.Context(), pool.Request{ID: id(b.t, name), Pool: poolName(b.t, "legacy"), Range: volume.Range{Required: mib}})
		wantError(b.t, err, volume.ErrNoSpace)
		wantError(b.t, b.Delete(b.t.Context(), id(b.t, name)), volume.ErrUnavailable)
		wantError(b.t, b.publish(name, "a"), volume.ErrUnavailable)
		must.Succeed(b.t, b.unpublish(name, "a"))
	}
	if got := b.capacity(); got != 0 {
		b.t.Errorf("capacity %d, want 0", got)
	}
	b.wantVolumes("pvc-3")
	b.wantServed("pvc-3")
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
				withTwoPools(t, func(t *testing.T, b *bench, _ *diary) {
					datadir := strings.Replace(aPoolAndAnother, `"path":"pool"`, `"path":"pool"`+sharing, 1)
					must.Succeed(t, b.snapshot("s-1", "pvc-1"))
					b.restart(datadir)
					must.Succeed(t, b.publish("pvc-1", "a"))
					outside := b.Path("outside")
					for _, d := range []string{"pvc-1", "~s-1", "~s-1/~s-1", "pvc-5.0123456789abcdef", "creating/node-1/pvc-6", "trash/node-1/pvc-7.0123456789abcdef"} {
						must.Succeed(t, os.MkdirAll(filepath.Join(outside, d), 0o755))
					}
					must.Succeed(t, os.WriteFile(filepath.Join(outside, "pvc-1.json"), []byte("{"), 0o600))
					must.Succeed(t, os.WriteFile(filepath.Join(outside, ".new-pvc-1.json"), []byte("{"), 0o600))
					before := tree(t, outside)
					must.Succeed(t, os.RemoveAll(b.Own(place)))
					must.Succeed(t, os.MkdirAll(filepath.Dir(b.Own(place)), 0o700))
					must.Succeed(t, os.Symlink(outside, b.Own(place)))
					for range 2 {
						b.tryAll()
						b.later(5 * time.Minute)
						b.wantServed("pvc-3")
						if diff := cmp.Diff(before, tree(t, outside)); diff != "" {
							t.Errorf("what is outside was changed (-before +after):\n%s", diff)
						}
						b.restart(datadir)
					}
				})
			})
		}
	}
}

// tryAll makes all calls on the first pool, whatever they answer.
func (b *bench) tryAll() {
	b.t.Helper()
	for _, name := range []string{"pvc-1", "pvc-2", "pvc-5"} {
		_, _ = b.Create(b.t.Context(), pool.Request{ID: id(b.t, name), Pool: poolName(b.t, "legacy"), Range: volume.Range{Required: mib}})
		_ = b.publish(name, name)
		_, _ = b.Expand(b.t.Context(), id(b.t, name), b.Target(name), "", volume.Range{Required: 2 * mib})
		_, _ = b.Publications().Stats(b.t.Context(), id(b.t, name), b.Target(name))
		_ = b.unpublish(name, name)
		_ = b.snapshot("s-1", name)
		_ = b.snapshot("s-2", name)
		_, _ = b.restore("pvc-6", "s-1")
		_ = b.Delete(b.t.Context(), id(b.t, "pvc-6"))
		_ = b.Delete(b.t.Context(), id(b.t, name))
	}
	for _, name := range []string{"s-1", "s-2"} {
		_, _ = b.Snapshots().Find(b.t.Context(), snapshotID(b.t, name))
		_ = b.Snapshots().Delete(b.t.Context(), snapshotID(b.t, name))
	}
	b.Snapshots().List(b.t.Context(), volume.ID{}, volume.ID{}, 10)
	b.capacity()
	b.settled()
}
