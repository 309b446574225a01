package ledger

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func idOf(name string) volume.ID {
	id, err := volume.ParseID(name)
	if err != nil {
		panic(err)
	}
	return id
}

// anID has few beginnings, so that ids meet, and all lengths.
func anID(t *rapid.T) volume.ID {
	name := rapid.SampledFrom([]string{"a", "pvc-", "pvc-0", "Z.z"}).Draw(t, "begin") +
		rapid.StringMatching(`[0-9a-c]{0,3}`).Draw(t, "end")
	if rapid.IntRange(0, 9).Draw(t, "long") == 0 {
		name += strings.Repeat("x", 200-len(name))
	}
	id, err := volume.ParseID(name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func aCard(t *rapid.T) Card {
	return Card{
		Promised: rapid.Int64Range(0, volume.MaxBytes).Draw(t, "promised"),
		uid:      rapid.Uint64().Draw(t, "uid"),
		flags:    HasDirectory | rapid.SampledFrom([]Flags{0, HasRecord, HasDamage, IsBlock}).Draw(t, "flags"),
	}
}

// An indexed is an index next to what it should be.
type indexed struct {
	index index
	want  map[volume.ID]Card
}

func (x *indexed) put(t *rapid.T, id volume.ID, c Card) {
	if changed, want := x.index.put(id, c), c.Promised-x.want[id].Promised; changed != want {
		t.Fatalf("promises change by %d, want %d", changed, want)
	}
	if x.want[id] = c; !c.Exists() {
		delete(x.want, id)
	}
}

// check compares all that can be asked.
func (x *indexed) check(t *rapid.T) {
	var promised int64
	for id, c := range x.want {
		promised += c.Promised
		if got := x.index.get(id); got != c {
			t.Fatalf("%s is %+v, want %+v", id, got, c)
		}
	}
	if x.index.promised != promised || x.index.len() != len(x.want) {
		t.Fatalf("%d volumes with %d bytes promised, want %d with %d", x.index.len(), x.index.promised, len(x.want), promised)
	}
	x.list(t, volume.ID{}, len(x.want)+1)
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

func (x *indexed) list(t *rapid.T, after volume.ID, most int) {
	want := []volume.ID{}
	for _, id := range slices.SortedFunc(maps.Keys(x.want), volume.ID.Compare) {
		if id.Compare(after) > 0 && len(want) < most {
			want = append(want, id)
		}
	}
	got := []volume.ID{}
	for _, v := range x.index.after(after, most) {
		if v.Card != x.want[v.ID] {
			t.Fatalf("%s is %+v, want %+v", v.ID, v.Card, x.want[v.ID])
		}
		got = append(got, v.ID)
	}
	if diff := cmp.Diff(want[:min(len(want), chunk)], got, cmp.AllowUnexported(volume.ID{})); diff != "" {
		t.Fatalf("up to %d after %q:\n%s", most, after, diff)
	}
}

func TestIndexMatchesMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := &indexed{want: make(map[volume.ID]Card)}
		t.Repeat(map[string]func(*rapid.T){
			"put":    func(t *rapid.T) { x.put(t, anID(t), aCard(t)) },
			"remove": func(t *rapid.T) { x.put(t, anID(t), Card{}) },
			"many": func(t *rapid.T) {
				for range rapid.IntRange(1, 3*pageSize).Draw(t, "volumes") {
					x.put(t, anID(t), aCard(t))
				}
			},
			"remove many": func(t *rapid.T) {
				for _, id := range slices.SortedFunc(maps.Keys(x.want), volume.ID.Compare) {
					if rapid.IntRange(0, 9).Draw(t, "stays") > 0 {
						x.put(t, id, Card{})
					}
				}
			},
			"get": func(t *rapid.T) { id := anID(t); x.get(t, id) },
			"list": func(t *rapid.T) {
				x.list(t, anID(t), rapid.IntRange(0, 2*pageSize).Draw(t, "most"))
			},
			"": x.check,
		})
	})
}

func (x *indexed) get(t *rapid.T, id volume.ID) {
	if got := x.index.get(id); got != x.want[id] {
		t.Fatalf("%s is %+v, want %+v", id, got, x.want[id])
	}
}

func TestMarksUntilPut(t *testing.T) {
	var x index
	one, two := idOf("pvc-1"), idOf("pvc-2")
	x.put(one, Card{flags: HasDirectory})
	if !x.mark(one, sawDirectory) || x.mark(two, sawRecord) {
		t.Error("a volume is marked if it is there")
	}
	if !x.mark(one, sawRecord) || x.get(one).flags != HasDirectory|sawDirectory|sawRecord {
		t.Errorf("marks %b", x.get(one).flags)
	}
	if _, more := x.unmark(volume.ID{}); more {
		t.Error("a page is left")
	}
	if c := x.get(one); c.flags != HasDirectory {
		t.Errorf("flags %b without marks", c.flags)
	}
	x.mark(one, sawRecord)
	x.put(one, Card{flags: HasDirectory})
	if c := x.get(one); c.Is(sawRecord) {
		t.Error("what was put has the mark of what was there before")
	}
}

// claimNames are as external-provisioner makes them.
func claimNames(volumes int) []volume.ID {
	random := rand.New(rand.NewPCG(1, 2))
	ids := make([]volume.ID, volumes)
	for i := range ids {
		ids[i] = idOf(fmt.Sprintf("pvc-%08x-%04x-4%03x-8%03x-%012x",
			random.Uint32(), random.IntN(1<<16), random.IntN(1<<12), random.IntN(1<<12), random.Int64N(1<<48)))
	}
	return ids
}

func TestMemoryPerVolume(t *testing.T) {
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
		x.put(id, Card{flags: HasDirectory})
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
		x.put(id, Card{flags: HasDirectory})
	}
	b.Run("get", func(b *testing.B) {
		for i := range b.N {
			x.get(ids[i%volumes])
		}
	})
	b.Run("put and remove", func(b *testing.B) {
		for i := range b.N {
			x.put(ids[i%volumes], Card{})
			x.put(ids[i%volumes], Card{flags: HasDirectory})
		}
	})
	b.Run("a page of 100", func(b *testing.B) {
		for i := range b.N {
			x.after(ids[i%volumes], 100)
		}
	})
}

func TestUnmarkClearsEveryPage(t *testing.T) {
	l := New(Policy{})
	ids := claimNames(10 * chunk)
	for _, id := range ids {
		l.Note(id, Card{flags: HasDirectory})
		l.MarkDirectory(id)
	}
	if l.Any(Card.Unseen) {
		t.Error("a volume that was seen counts as unseen")
	}
	l.Unmark()
	unseen := 0
	for range l.Each(Card.Unseen) {
		unseen++
	}
	if unseen != len(ids) {
		t.Errorf("%d of %d volumes are unseen", unseen, len(ids))
	}
}
