package ledger

import (
	"maps"
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

func anInfo(t *rapid.T) Info {
	return Info{
		Promised: rapid.Int64Range(0, volume.MaxBytes).Draw(t, "promised"),
		uid:      rapid.Uint64().Draw(t, "uid"),
		flags:    HasDirectory | rapid.SampledFrom([]Flags{0, HasRecord, HasDamage, IsBlock}).Draw(t, "flags"),
	}
}

// An indexed is an index next to what it should be.
type indexed struct {
	index index
	want  map[volume.ID]Info
}

func (x *indexed) put(t *rapid.T, id volume.ID, c Info) {
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
		if v.Info != x.want[v.ID] {
			t.Fatalf("%s is %+v, want %+v", v.ID, v.Info, x.want[v.ID])
		}
		got = append(got, v.ID)
	}
	if diff := cmp.Diff(want[:min(len(want), chunk)], got, cmp.AllowUnexported(volume.ID{})); diff != "" {
		t.Fatalf("up to %d after %q:\n%s", most, after, diff)
	}
}

func TestIndexMatchesMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x := &indexed{want: make(map[volume.ID]Info)}
		t.Repeat(map[string]func(*rapid.T){
			"put":    func(t *rapid.T) { x.put(t, anID(t), anInfo(t)) },
			"remove": func(t *rapid.T) { x.put(t, anID(t), Info{}) },
			"many": func(t *rapid.T) {
				for range rapid.IntRange(1, 100).Draw(t, "volumes") {
					x.put(t, anID(t), anInfo(t))
				}
			},
			"remove many": func(t *rapid.T) {
				for _, id := range slices.SortedFunc(maps.Keys(x.want), volume.ID.Compare) {
					if rapid.IntRange(0, 9).Draw(t, "stays") > 0 {
						x.put(t, id, Info{})
					}
				}
			},
			"get": func(t *rapid.T) { id := anID(t); x.get(t, id) },
			"list": func(t *rapid.T) {
				x.list(t, anID(t), rapid.IntRange(0, 2*chunk).Draw(t, "most"))
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
