package ledger

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// joined are the ledgers of so many pools on one filesystem.
func joined(pools int) []*Ledger {
	fs := &Filesystem{}
	var all []*Ledger
	for range pools {
		l := New(Policy{Overprovision: 1})
		l.Join(fs, Origin{})
		l.BeginLoad().End(nil)
		all = append(all, l)
	}
	return all
}

func TestConcurrentReservationsInSeveralPools(t *testing.T) {
	pools := joined(3)
	var made atomic.Int64
	var work sync.WaitGroup
	for _, l := range pools {
		for range 4 {
			work.Go(func() {
				for range 100 {
					if _, err := l.Reserve(disk100(0), g); err == nil {
						made.Add(1)
					}
				}
			})
		}
	}
	work.Wait()
	if got := made.Load(); got != 100 {
		t.Errorf("%d GiB of 100 are promised", got)
	}
}

func TestPromisesOfOnePoolCountInTheOther(t *testing.T) {
	pools := joined(2)
	a, b := pools[0], pools[1]
	want := func(gib int64) {
		t.Helper()
		if got := b.Summary().Available(disk100(0)) / g; got != gib {
			t.Errorf("%d GiB are available, want %d", got, gib)
		}
	}
	held, err := a.Reserve(disk100(0), 30*g)
	if err != nil {
		t.Fatal(err)
	}
	want(70)
	held.Commit(idOf("pvc-1"), promised(30*g))
	want(70)
	a.Note(idOf("pvc-1"), Info{})
	want(100)
	read(a.BeginLoad(), "pvc-2").End(nil)
	if got := b.on.load().owed().promised; got != 4096 {
		t.Errorf("%d bytes are promised after the other pool was read, want 4096", got)
	}
	b.Join(&Filesystem{}, Origin{})
	a.Note(idOf("pvc-1"), promised(30*g))
	want(100)
}

func TestForeignUse(t *testing.T) {
	made := time.Unix(1000, 0)
	for name, c := range map[string]struct {
		pools accounts
		want  int64
	}{
		"one pool":                          {accounts{of: []account{{origin: Origin{Foreign: 10}}}, base: volume.Unknown}, 10},
		"counted":                           {accounts{of: []account{{origin: Origin{Foreign: 10}}}, base: 7}, 7},
		"the largest":                       {accounts{of: []account{{origin: Origin{Made: made, Foreign: 10}}, {origin: Origin{Made: made, Foreign: 20}}}, base: volume.Unknown}, 20},
		"less what an older pool may hold":  {accounts{of: []account{{origin: Origin{Made: made.Add(time.Hour), Foreign: 60}}, {origin: Origin{Made: made, Foreign: 10}, sums: sums{promised: 45, trashed: 2}}}, base: volume.Unknown}, 13},
		"not less what a younger one holds": {accounts{of: []account{{origin: Origin{Made: made.Add(time.Hour), Foreign: 10}, sums: sums{promised: 45}}, {origin: Origin{Made: made, Foreign: 10}}}, base: volume.Unknown}, 10},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.pools.foreign(); got != c.want {
				t.Errorf("%d bytes, want %d", got, c.want)
			}
		})
	}
}

// What others occupy is learned while no pool of the filesystem has anything, and no more true
// when another pool joins, for it held a part of that.
func TestForeignUseIsLearnedForAllPools(t *testing.T) {
	pools := joined(2)
	a, b := pools[0], pools[1]
	want := func(what string, bytes int64) {
		t.Helper()
		if got := a.on.load().foreign(); got != bytes {
			t.Errorf("%s: %d bytes are foreign, want %d", what, got, bytes)
		}
	}
	a.LearnForeign(hundred(50))
	want("no promises", 50)
	b.Trash().Throw("pvc-1.u", 0)
	a.LearnForeign(hundred(60))
	want("trash in the other pool", 50)
	a.LearnForeign(hundred(40))
	want("less is taken", 40)
	b.Trash().Tried("pvc-1.u", nil)
	b.Note(idOf("pvc-2"), promised(10))
	b.LearnForeign(hundred(60))
	want("a promise in the other pool", 40)
	New(Policy{}).Join(a.on, Origin{Foreign: 12})
	want("a third pool", 12)
	b.Note(idOf("pvc-2"), Info{})
	b.LearnForeign(hundred(3))
	want("the third pool was not read yet", 12)
	b.BeginCount().End(5, quota.Trees{})
	want("counted", 5)
}

// A pool in a directory with a limit of its own, of another project, sees no more than that, whether it comes first or last.
func TestForeignUseIsNotLearnedFromPartOfFilesystem(t *testing.T) {
	for _, partFirst := range []bool{true, false} {
		fs := &Filesystem{}
		whole, part := New(Policy{Overprovision: 1}), New(Policy{Overprovision: 1})
		join := func(l *Ledger, sees dir.Space) {
			l.Join(fs, Origin{Foreign: sees.TakenBytes(), Size: sees.SizeBytes})
			l.BeginLoad().End(nil)
		}
		all, some := disk100(60), dir.Space{SizeBytes: 20 * g, FreeBytes: 20 * g}
		if partFirst {
			join(part, some)
			part.LearnForeign(some)
			join(whole, all)
		} else {
			join(whole, all)
			join(part, some)
		}
		part.LearnForeign(some)
		if _, err := whole.Reserve(all, 40*g); err != nil {
			t.Fatal(err)
		}
		whole.LearnForeign(all)
		part.LearnForeign(some)
		if got := whole.Available(all); got != 0 {
			t.Errorf("the part first %v: %d GiB of 40 are available beside a promise of 40", partFirst, got/g)
		}
		// A filesystem grows under the pools.
		all.SizeBytes += 100 * g
		all.FreeBytes += 100 * g
		whole.LearnForeign(all)
		part.LearnForeign(some)
		if got := whole.Available(all) / g; got != 100 {
			t.Errorf("the part first %v: %d GiB are available after it has grown, want 100", partFirst, got)
		}
	}
}

// hundred is a space of that many bytes of which so many are taken.
func hundred(taken int64) dir.Space { return dir.Space{SizeBytes: 100, FreeBytes: 100 - taken} }

// A pool that comes to a filesystem may owe what was not read yet.
func TestReserveFailsBesideUnreadPool(t *testing.T) {
	a := joined(1)[0]
	b := New(Policy{Overprovision: 1})
	b.Join(a.on, Origin{})
	load := b.BeginLoad()
	if _, err := a.Reserve(disk100(0), g); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("reserve: %v, want ErrUnavailable", err)
	}
	load.Put(idOf("pvc-1"), promised(60*g))
	load.End(nil)
	if _, err := a.Reserve(disk100(0), 50*g); !errors.Is(err, volume.ErrNoSpace) {
		t.Errorf("reserve: %v, want ErrNoSpace", err)
	}
	b.Leave()
	if _, err := a.Reserve(disk100(0), 50*g); err != nil {
		t.Errorf("reserve after the other pool has left: %v", err)
	}
}

// What a btrfs may need for its trees is not promised, and what it has for them counts once.
func TestTreesAreSetAside(t *testing.T) {
	l := joined(1)[0]
	for _, test := range []struct {
		trees     quota.Trees
		available int64
	}{
		{quota.Trees{}, 90},
		{quota.Trees{Copies: 1, Reserve: 2 * g}, 81},               // 88 × 12/13
		{quota.Trees{Copies: 2, Reserve: 4 * g}, 41},               // 86 × 12/25
		{quota.Trees{Copies: 2, Reserve: 4 * g, Spare: 4 * g}, 43}, // 90 × 12/25
	} {
		l.BeginCount().End(10*g, test.trees)
		if got := l.Available(disk100(10)) / g; got != test.available {
			t.Errorf("with %+v %d GiB are available, want %d", test.trees, got, test.available)
		}
		held, err := l.Reserve(disk100(10), 20*g)
		if err != nil {
			t.Fatal(err)
		}
		if got := l.Available(disk100(10)) / g; got != test.available-20 {
			t.Errorf("with %+v, and 20 GiB promised, %d GiB are available, want %d", test.trees, got, test.available-20)
		}
		held.Release()
	}
}

// No more is promised than the trees can take of the disks, which is less if what others hold may be on the disk that they need; nor can one
// volume take more, however much may be promised in all.
func TestTreesFitOnDisks(t *testing.T) {
	for _, test := range []struct {
		factor    float64
		foreign   int64
		room      quota.Room
		available int64
	}{
		{1, 0, quota.Room{}, 46},
		{1, 0, quota.Room{Bounded: true, Left: 50 * g, All: 50 * g, Loss: 1}, 46},
		{1, 0, quota.Room{Bounded: true, Left: 27 * g, All: 27 * g, Loss: 1}, 24},      // 25 × 24/25
		{1, 10 * g, quota.Room{Bounded: true, Left: 22 * g, All: 27 * g, Loss: 1}, 19}, // 20 × 24/25
		{1, 10 * g, quota.Room{Bounded: true, Left: 17 * g, All: 32 * g, Loss: 2}, 14}, // 15 × 24/25
		{3, 0, quota.Room{Bounded: true, Left: 27 * g, All: 27 * g, Loss: 1}, 24},      // not 79
		{3, 0, quota.Room{Bounded: true, Left: 77 * g, All: 27 * g, Loss: 1}, 72},      // of 75
		{1, 0, quota.Room{Bounded: true, Left: 1 * g, All: 1 * g, Loss: 1}, 0},         // less than their reserve
		{1, 50 * g, quota.Room{Bounded: true, Left: 12 * g, All: 0, Loss: 1}, 9},       // 10 × 24/25
	} {
		l := New(Policy{Overprovision: test.factor})
		l.Join(&Filesystem{}, Origin{})
		l.BeginLoad().End(nil)
		l.BeginCount().End(test.foreign, quota.Trees{Copies: 2, Reserve: 4 * g, Room: test.room})
		if got := l.Available(disk100(test.foreign/g)) / g; got != test.available {
			t.Errorf("with %+v and %d GiB of others %d GiB are available, want %d", test.room, test.foreign/g, got, test.available)
		}
	}
}

// However much may be promised beyond the size of the disk, one volume cannot take the room of the trees.
func TestTreesAreSetAsideWithOverprovision(t *testing.T) {
	l := New(Policy{Overprovision: 3})
	l.Join(&Filesystem{}, Origin{})
	l.BeginLoad().End(nil)
	l.SetTrees(quota.Trees{Copies: 2, Reserve: 4 * g})
	if got := l.Available(disk100(0)) / g; got != 88 { // 96 × 12/13
		t.Errorf("%d GiB are available, want 88", got)
	}
}

// Of two pools one may have quotas, and small files count twice for it.
func TestTreesOfTwoPools(t *testing.T) {
	once, twice := quota.Trees{Copies: 1, Reserve: 4 * g}, quota.Trees{Copies: 2, Reserve: 4 * g}
	for _, order := range [][]quota.Trees{{once, twice}, {twice, once}} {
		pools := joined(2)
		for i, l := range pools {
			l.SetTrees(order[i])
		}
		if got := pools[0].Available(disk100(0)) / g; got != 46 { // 96 × 12/25
			t.Errorf("with %+v %d GiB are available, want 46", order, got)
		}
	}
}

// What was counted is not forgotten when a pool comes or goes: until it is counted again, no more is promised than was before.
func TestCountedUseStaysWhenPoolsComeAndGo(t *testing.T) {
	a := joined(1)[0]
	b := New(Policy{Overprovision: 1})
	fs := a.on
	want := func(what string, bytes int64) {
		t.Helper()
		if got := fs.load().foreign(); got != bytes {
			t.Errorf("%s: %d bytes are foreign, want %d", what, got, bytes)
		}
	}
	a.BeginCount().End(50, quota.Trees{})
	b.Join(fs, Origin{Foreign: 12})
	b.BeginLoad().End(nil)
	want("a pool came, which may hold a part of it", 50)
	a.BeginCount().End(40, quota.Trees{})
	b.Note(idOf("pvc-1"), promised(10))
	b.Leave()
	want("it went, and what it promised may be there", 50)
	b.Join(fs, Origin{Foreign: 12})
	want("it came back", 50)
	a.CannotCount(quota.Trees{})
	want("it has volumes that cannot be counted", 12)
	a.BeginCount().End(40, quota.Trees{})
	a.CannotCount(quota.Trees{})
	want("a volume that cannot be counted is made", 40)
	a.Leave()
	b.Leave()
	b.Join(fs, Origin{Foreign: 12})
	want("all have gone, and one comes back", 12)
}

// On btrfs what erased trash has left in others counts as foreign, also if it was erased while it was counted what the trash holds.
func TestWhatIsErasedWhileCountingIsForeign(t *testing.T) {
	trees := quota.Trees{Copies: 1, Reserve: 2 * g}
	for _, erased := range []string{"before", "during", "after"} {
		l := joined(1)[0]
		l.BeginCount().End(0, trees)
		l.Trash().Throw("pvc-1.u", 40*g)
		erase := func(when string) {
			if when == erased {
				l.Trash().Tried("pvc-1.u", nil)
			}
		}
		erase("before")
		count := l.BeginCount()
		erase("during")
		count.End(0, trees)
		erase("after")
		want := int64(40 * g)
		if erased == "before" {
			want = 0
		}
		if got := l.on.load().foreign(); got != want {
			t.Errorf("erased %s the count: %d GiB are foreign, want %d", erased, got/g, want/g)
		}
	}
}

// Of trash without a known promise the most counts that was seen of it.
func TestTrashOfUnknownPromiseIsForeignOnceErased(t *testing.T) {
	l := joined(1)[0]
	l.BeginCount().End(0, quota.Trees{Copies: 1, Reserve: 2 * g})
	l.Trash().Throw("pvc-1.u", volume.Unknown)
	l.Trash().Measured("pvc-1.u", 30*g)
	l.Trash().Measured("pvc-1.u", 10*g)
	l.Trash().Tried("pvc-1.u", nil)
	if got := l.on.load().foreign(); got != 30*g {
		t.Errorf("%d GiB are foreign, want 30", got/g)
	}
}

// What erased trash may have left counts until the next count. While nothing can be counted there is none.
func TestErasedTrashIsNotForeignWhileNothingCanBeCounted(t *testing.T) {
	l, trees := joined(1)[0], quota.Trees{Copies: 1}
	l.BeginCount().End(40, trees)
	l.CannotCount(trees)
	l.Trash().Throw("pvc-1.u", 10)
	l.Trash().Tried("pvc-1.u", nil)
	if got := l.on.load().foreign(); got != 40 {
		t.Errorf("%d bytes are foreign, want 40", got)
	}
}
