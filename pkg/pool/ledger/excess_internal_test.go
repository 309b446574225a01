package ledger

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// sharing is a block volume of one GiB that shares blocks.
var sharing = NewInfo(g, "uid", 0, HasDirectory|HasRecord|IsBlock|Shares)

// measure measures that each volume which may exceed what it owes has so many bytes, or returns false.
func measure(l *Ledger, allocated int64, all bool) bool {
	excess := l.BeginExcess()
	if excess == nil {
		return false
	}
	for _, c := range excess.Volumes() {
		excess.Add(c, allocated)
	}
	excess.End(all)
	return true
}

func TestExcessIsForeign(t *testing.T) {
	for name, c := range map[string]struct {
		base, taken, trash, allocated int64
		want                          int64 // available
	}{
		"nothing above the promise":           {base: 10 * g, taken: 10 * g, allocated: g / 2, want: 89 * g},
		"above it":                            {base: 10 * g, taken: 12 * g, allocated: 3 * g, want: 87 * g},
		"beside trash":                        {base: 10 * g, taken: 17 * g, trash: 5 * g, allocated: 3 * g, want: 82 * g},
		"no more than is taken":               {base: 10 * g, taken: 11 * g, allocated: 3 * g, want: 88 * g},
		"no more than exceeds all promises":   {base: 10 * g, taken: 20 * g, allocated: 3 * g, want: 80 * g},
		"taken by others since, and above it": {base: 10 * g, taken: 14 * g, allocated: 2 * g, want: 86 * g},
	} {
		t.Run(name, func(t *testing.T) {
			l := New(Policy{Overprovision: 1})
			l.Join(&Filesystem{}, Origin{Foreign: c.base})
			l.BeginLoad().End(nil)
			l.Note(idOf("pvc-1"), sharing)
			if c.trash > 0 {
				l.Trash().Throw("pvc-2.u", c.trash)
			}
			measure(l, c.allocated, true)
			space := disk100(0)
			space.FreeBytes -= c.taken
			if got := l.Available(space); got != c.want {
				t.Errorf("%d bytes are available, want %d", got, c.want)
			}
		})
	}
}

func TestExcessIsMeasuredOfVolumesThatMayHaveOne(t *testing.T) {
	for name, c := range map[string]struct {
		id    string
		flags Flags
		want  bool
	}{
		"a block volume that shares": {"pvc-1", IsBlock | Shares | HasDirectory, true},
		"one that is lost":           {"pvc-1", IsBlock | Shares, false},
		"one that shares nothing":    {"pvc-1", IsBlock | HasDirectory, false},
		"a directory":                {"pvc-1", Shares | HasDirectory, false},
		"a snapshot":                 {"pvc-1", IsBlock | Shares | IsSnapshot | HasDirectory, false},
	} {
		l := joined(1)[0]
		info := NewInfo(g, "uid", 0, HasRecord|c.flags)
		l.Note(idOf(c.id), info)
		if got := measure(l, 2*g, true); got != c.want {
			t.Errorf("%s: measured %v, want %v", name, got, c.want)
		}
		l.Note(idOf(c.id), Info{})
		if measure(l, 2*g, true) {
			t.Errorf("%s: measured after it was removed", name)
		}
	}
}

// What was measured counts until all is measured anew, and nothing may be missing there.
func TestExcessFallsOnceAllIsMeasured(t *testing.T) {
	l := joined(1)[0]
	l.LearnForeign(disk100(20))
	l.Note(idOf("pvc-0"), promised(38*g))
	l.Note(idOf("pvc-1"), sharing)
	l.Note(idOf("pvc-2"), sharing)
	want := func(when string, gib int64) {
		t.Helper()
		if got := l.Available(disk100(50)) / g; got != gib {
			t.Errorf("%s: %d GiB are available, want %d", when, got, gib)
		}
	}
	want("before", 40)
	measure(l, 3*g, true)
	want("two GiB of each of two volumes", 36)
	measure(l, 2*g, false)
	want("not all could be measured", 36)
	measure(l, 4*g, false)
	want("not all could be measured, and it is more", 34)
	l.Trash().Throw("pvc-3.u", 0)
	measure(l, 2*g, true)
	want("one may be in the trash", 34)
	l.Trash().Tried("pvc-3.u", nil)
	early := l.BeginExcess()
	measure(l, 3*g, true)
	want("it is less", 36)
	early.End(true)
	want("another that began earlier ends", 36)
	l.Note(idOf("pvc-1"), Info{})
	want("one is removed", 37)
	l.Note(idOf("pvc-2"), Info{})
	want("no volume shares blocks", 42)
}

// What others occupy includes it where that is counted.
func TestExcessOfCountedVolumesIsInTheBase(t *testing.T) {
	pools := joined(2)
	a, b := pools[0], pools[1]
	b.Note(idOf("pvc-0"), promised(39*g))
	a.Note(idOf("pvc-1"), sharing)
	want := func(when string, gib int64) {
		t.Helper()
		if got := b.Available(disk100(20)) / g; got != gib {
			t.Errorf("%s: %d GiB are available, want %d", when, got, gib)
		}
	}
	measure(a, 3*g, true)
	want("not counted, and measured in the other pool", 58)
	a.BeginCount().End(19*g, quota.Trees{})
	want("counted", 41)
	if measure(a, 3*g, true) {
		t.Error("it was measured though others are counted")
	}
	a.CannotCount(quota.Trees{})
	if !measure(a, 3*g, true) {
		t.Error("it was not measured though others are not counted")
	}
	want("not counted any more", 40)
}
