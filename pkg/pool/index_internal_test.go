package pool

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// anID has few beginnings, so that ids meet, and all lengths.
func anID(t *rapid.T) VolumeID {
	name := rapid.SampledFrom([]string{"a", "pvc-", "pvc-0", "Z.z"}).Draw(t, "begin") +
		rapid.StringMatching(`[0-9a-c]{0,3}`).Draw(t, "end")
	if rapid.IntRange(0, 9).Draw(t, "long") == 0 {
		name += strings.Repeat("x", maxID-len(name))
	}
	id, err := ParseVolumeID(name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func aCard(t *rapid.T) card {
	return card{
		promised: rapid.Int64Range(0, MaxBytes).Draw(t, "promised"),
		uid:      rapid.Uint64().Draw(t, "uid"),
		flags:    hasDirectory | rapid.SampledFrom([]flags{0, hasRecord, hasDamage, isBlock}).Draw(t, "flags"),
	}
}

// An indexed is an index beside what it should be.
type indexed struct {
	index index
	want  map[VolumeID]card
}

func (x *indexed) put(t *rapid.T, id VolumeID, c card) {
	if changed, want := x.index.put(id, c), c.promised-x.want[id].promised; changed != want {
		t.Fatalf("promises change by %d, want %d", changed, want)
	}
	if x.want[id] = c; !c.exists() {
		delete(x.want, id)
	}
}

// check compares all that can be asked.
func (x *indexed) check(t *rapid.T) {
	var promised int64
	for id, c := range x.want {
		promised += c.promised
		if got := x.index.get(id); got != c {
			t.Fatalf("%s is %+v, want %+v", id, got, c)
		}
	}
	if x.index.promised != promised || x.index.len() != len(x.want) {
		t.Fatalf("%d volumes with %d bytes promised, want %d with %d", x.index.len(), x.index.promised, len(x.want), promised)
	}
	x.list(t, VolumeID{}, len(x.want)+1, card.exists)
	for _, p := range x.index.pages {
		if len(p.cards) == 0 || len(p.cards) > pageSize {
			t.Fatalf("a page has %d volumes", len(p.cards))
		}
		if p.first != string(p.id(0)) {
			t.Fatalf("a page begins with %s, and says %s", p.id(0), p.first)
		}
	}
	if pages := len(x.index.pages); pages > 1+4*len(x.want)/pageSize {
		t.Fatalf("%d pages for %d volumes", pages, len(x.want))
	}
}

func (x *indexed) list(t *rapid.T, after VolumeID, most int, which func(card) bool) {
	var want []VolumeID
	for _, id := range slices.SortedFunc(maps.Keys(x.want), compareIDs) {
		if compareIDs(id, after) > 0 && len(want) < most && which(x.want[id]) {
			want = append(want, id)
		}
	}
	if diff := cmp.Diff(want, x.index.after(after, most, which), cmp.AllowUnexported(VolumeID{})); diff != "" {
		t.Fatalf("up to %d after %q:\n%s", most, after, diff)
	}
}

func TestIndexIsLikeAMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := &indexed{want: make(map[VolumeID]card)}
		t.Repeat(map[string]func(*rapid.T){
			"put":    func(t *rapid.T) { x.put(t, anID(t), aCard(t)) },
			"remove": func(t *rapid.T) { x.put(t, anID(t), card{}) },
			"many": func(t *rapid.T) {
				for range rapid.IntRange(1, 3*pageSize).Draw(t, "volumes") {
					x.put(t, anID(t), aCard(t))
				}
			},
			"remove many": func(t *rapid.T) {
				for _, id := range slices.SortedFunc(maps.Keys(x.want), compareIDs) {
					if rapid.IntRange(0, 9).Draw(t, "stays") > 0 {
						x.put(t, id, card{})
					}
				}
			},
			"get": func(t *rapid.T) { id := anID(t); x.get(t, id) },
			"list": func(t *rapid.T) {
				x.list(t, anID(t), rapid.IntRange(0, 2*pageSize).Draw(t, "most"), card.mayHaveDevices)
			},
			"": x.check,
		})
	})
}

func (x *indexed) get(t *rapid.T, id VolumeID) {
	if got := x.index.get(id); got != x.want[id] {
		t.Fatalf("%s is %+v, want %+v", id, got, x.want[id])
	}
}

func TestMarksAreOnCardsUntilTheyArePut(t *testing.T) {
	var x index
	one, two := VolumeID{name: "pvc-1"}, VolumeID{name: "pvc-2"}
	x.put(one, card{flags: hasDirectory})
	if !x.mark(one, sawDirectory) || x.mark(two, sawRecord) {
		t.Error("a volume is marked if it is there")
	}
	if !x.mark(one, sawRecord) || x.get(one).flags != hasDirectory|sawDirectory|sawRecord {
		t.Errorf("marks %b", x.get(one).flags)
	}
	x.unmark()
	if c := x.get(one); c.flags != hasDirectory {
		t.Errorf("flags %b without marks", c.flags)
	}
	x.mark(one, sawRecord)
	x.put(one, card{flags: hasDirectory})
	if c := x.get(one); c.is(sawRecord) {
		t.Error("what was put has the mark of what was there before")
	}
}

// A shared pool is read by calls while a look compares it with the disk: what they read must
// not look different to that.
func TestWhatWasJustReadWasSeen(t *testing.T) {
	s := onDisk(t, "whole")
	p := s.pool
	must(t, os.Mkdir(filepath.Join(s.root.String(), "plain"), 0o755))
	s.writeRecord(t, "lost")
	p.unmark()
	must(t, s.load())
	if p.index.len() != 3 || p.any(card.unlikeSeen) {
		t.Errorf("of %d volumes, some look different: %+v", p.index.len(), p.index.after(VolumeID{}, 3, card.unlikeSeen))
	}
}

// onDisk is a session of a pool with some volumes that were written by others.
func onDisk(t *testing.T, names ...string) *session {
	t.Helper()
	s := &session{
		pool: &Pool{wake: make(chan struct{}, 1), locks: &Locks[VolumeID]{}, log: logr.Discard()},
		root: openDir(t), volumes: openDir(t), claims: &claims{},
	}
	for _, name := range names {
		s.write(t, name)
	}
	return s
}

// write writes a volume of 4 KiB, with all that it has.
func (s *session) write(t *testing.T, name string) {
	t.Helper()
	must(t, os.Mkdir(filepath.Join(s.root.String(), name), 0o755))
	s.writeRecord(t, name)
}

func (s *session) writeRecord(t *testing.T, name string) {
	t.Helper()
	data, err := newRecord(Request{ID: VolumeID{name: name}, Mode: ModeMount}, 4096, 0).encode()
	must(t, err)
	must(t, os.WriteFile(filepath.Join(s.volumes.String(), name+".json"), data, 0o600))
}

// promises are what the index has.
func (p *Pool) promises() map[string]int64 {
	all := map[string]int64{}
	for id, c := range p.each(card.exists) {
		all[id.name] = c.promised
	}
	return all
}

// Calls of this node keep nobody from seeing what other nodes have promised from a shared
// pool, and are not undone by what was read before them.
func TestALoadBesideCallsBringsInWhatOthersWrote(t *testing.T) {
	s := onDisk(t, "grown", "gone", "undone", "others")
	p, grown, gone, made := s.pool, VolumeID{name: "grown"}, VolumeID{name: "gone"}, VolumeID{name: "made"}
	l := p.beginLoad()
	must(t, s.read(l))
	whole := func(id VolumeID, bytes int64) entry {
		return entry{present: true, record: newRecord(Request{ID: id, Mode: ModeMount}, bytes, 0)}
	}
	p.note(grown, whole(grown, 8192))
	p.note(gone, whole(gone, 4096))
	p.note(gone, entry{})
	(&reservation{pool: p}).commit(made, whole(made, 16384))
	p.note(VolumeID{name: "undone"}, entry{}) // it was never known
	p.endLoad(l, nil)
	if got, want := p.promises(), map[string]int64{"grown": 8192, "others": 4096, "made": 16384}; !maps.Equal(got, want) {
		t.Errorf("promised are %v, want %v", got, want)
	}
	if p.ledger.promised != 28672 || p.index.promised != 28672 {
		t.Errorf("the ledger has %d bytes and the index %d, want 28672", p.ledger.promised, p.index.promised)
	}
	if len(p.loads) > 0 {
		t.Error("a load that is over is told of changes")
	}
}

// A list may take long to read a shared pool. When it is done, what a creation has read since
// then of others' promises stays.
func TestALoadThatIsPassedByALaterOneUndoesNothing(t *testing.T) {
	s := onDisk(t, "before")
	slow := s.pool.beginLoad()
	must(t, s.read(slow))
	s.write(t, "others")
	must(t, s.load())
	s.pool.endLoad(slow, nil)
	if got, want := s.pool.promises(), map[string]int64{"before": 4096, "others": 4096}; !maps.Equal(got, want) {
		t.Errorf("promised are %v, want %v", got, want)
	}
	if s.pool.ledger.promised != 8192 || len(s.pool.loads) > 0 {
		t.Errorf("the ledger has %d bytes, want 8192, and %d loads go on, want none", s.pool.ledger.promised, len(s.pool.loads))
	}
}

// A removal drops the record before its trash is counted. In a shared pool others may read
// the records just then, and something may be sold.
func TestALoadInTheMidstOfARemovalCountsIt(t *testing.T) {
	s := onDisk(t, "removed", "stays")
	must(t, s.load())
	until := s.pool.keep(VolumeID{name: "removed"})
	must(t, os.Remove(filepath.Join(s.volumes.String(), "removed.json")))
	must(t, os.Remove(filepath.Join(s.root.String(), "removed")))
	must(t, s.load())
	if got, want := s.pool.promises(), map[string]int64{"removed": 4096, "stays": 4096}; !maps.Equal(got, want) {
		t.Errorf("promised are %v, want %v", got, want)
	}
	until()
	must(t, s.load())
	if got, want := s.pool.promises(), map[string]int64{"stays": 4096}; !maps.Equal(got, want) {
		t.Errorf("promised are %v, want %v", got, want)
	}
}

// What could not be read to its end is not taken over, and hides nothing that others read.
func TestALoadThatFailsChangesNothing(t *testing.T) {
	s := onDisk(t, "before")
	slow := s.pool.beginLoad()
	must(t, s.read(slow))
	failed := s.pool.beginLoad()
	s.pool.endLoad(failed, errors.New("a disk"))
	s.pool.endLoad(slow, nil)
	if got, want := s.pool.promises(), map[string]int64{"before": 4096}; !maps.Equal(got, want) || len(s.pool.loads) > 0 {
		t.Errorf("promised are %v, want %v, and %d loads go on, want none", got, want, len(s.pool.loads))
	}
}

// Pools are opened side by side, and two may have volumes of one name.
func TestWhatAnotherPoolWorksOnIsNotSkippedAtTheStart(t *testing.T) {
	p := &Pool{locks: &Locks[VolumeID]{}}
	id := VolumeID{name: "pvc-1"}
	unlock, err := p.locks.TryLock(id)
	must(t, err)
	defer unlock()
	done := 0
	do := func() error { done++; return nil }
	must(t, p.unlessBusy(id, do))
	if done != 1 || p.skipped {
		t.Errorf("before the pool was opened: done %d times, skipped %v", done, p.skipped)
	}
	p.identity.Store(&opened{})
	must(t, p.unlessBusy(id, do))
	if done != 1 || !p.skipped {
		t.Errorf("while the pool serves: done %d times, skipped %v", done, p.skipped)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func openDir(t *testing.T) *dir.Dir {
	t.Helper()
	d, err := dir.Open(t.TempDir())
	must(t, err)
	t.Cleanup(func() { must(t, d.Close()) })
	return d
}

// claimNames are as external-provisioner makes them.
func claimNames(volumes int) []VolumeID {
	random := rand.New(rand.NewPCG(1, 2))
	ids := make([]VolumeID, volumes)
	for i := range ids {
		ids[i].name = fmt.Sprintf("pvc-%08x-%04x-4%03x-8%03x-%012x",
			random.Uint32(), random.IntN(1<<16), random.IntN(1<<12), random.IntN(1<<12), random.Int64N(1<<48))
	}
	return ids
}

func TestAVolumeCostsLittleMemory(t *testing.T) {
	const volumes, most = 100_000, 100 // bytes for each
	heap := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	ids := claimNames(volumes)
	var x index
	before := heap()
	for _, id := range ids {
		x.put(id, card{flags: hasDirectory})
	}
	each := (heap() - before) / volumes
	runtime.KeepAlive(ids)
	t.Logf("%d bytes for each of %d volumes", each, x.len())
	if x.len() != volumes || each > most {
		t.Errorf("%d bytes for each of %d volumes, want at most %d", each, x.len(), most)
	}
}

func BenchmarkIndex(b *testing.B) {
	const volumes = 100_000
	ids := claimNames(volumes)
	var x index
	for _, id := range ids {
		x.put(id, card{flags: hasDirectory})
	}
	b.Run("get", func(b *testing.B) {
		for i := range b.N {
			x.get(ids[i%volumes])
		}
	})
	b.Run("put and remove", func(b *testing.B) {
		for i := range b.N {
			x.put(ids[i%volumes], card{})
			x.put(ids[i%volumes], card{flags: hasDirectory})
		}
	})
	b.Run("a page of 100", func(b *testing.B) {
		for i := range b.N {
			x.after(ids[i%volumes], 100, card.exists)
		}
	})
}
