package quotatest

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A Subject is an implementation under test.
type Subject struct {
	quota.Facility
	// Root is an empty directory of the filesystem.
	Root *dir.Dir
	// Create creates a file in a directory, as an unprivileged process.
	Create func(d *dir.Dir, name string) (File, error)
	// Removed reports the removal of an id's tree to a fake; nil if it is detected.
	Removed func(id quota.ID)
	// Settle makes the filesystem update its usage, as far as it can.
	Settle func(t *testing.T)
}

// A File is open for writing.
type File interface {
	// Write appends bytes, and returns how many were written.
	Write(bytes int64) (int64, error)
	Close() error
	// Remove removes the file, which has been closed.
	Remove() error
}

const (
	mib = 1 << 20
	// slack is how much of a limit the filesystem's metadata may use at most.
	slack = 256 << 10
)

// Contract tests what every facility must do.
func Contract(t *testing.T, fresh func(t *testing.T) Subject) {
	for name, check := range map[string]func(*testing.T, *harness){
		"new directory is empty, mode 0700, without a limit": made,
		"bad name is refused":                                madeElsewhere,
		"write over the limit is refused":                    limitBites,
		"other directories are unaffected":                   othersUntouched,
		"limit below the usage":                              limitBelowUse,
		"usage":                                              useIsTold,
		"use of no project":                                  beside,
		"removal lowers the usage":                           removedIsGivenBack,
		"raised limit lets an open file grow":                raise,
		"limit is set again and removed":                     setAgain,
		"limit is rounded up to blocks":                      wholeBlocks,
		"bad limit is refused":                               badLimit,
		"id of a directory":                                  idOf,
		"limit follows a renamed directory":                  followsRename,
		"release and reuse of the name":                      release,
		"new id is neither claimed nor in use":               newID,
		"unused limit is released":                           releaseUnused,
		"inode limit":                                        inodes,
		"earlier content is not counted":                     before,
		"concurrent calls":                                   atOnce,
	} {
		t.Run(name, func(t *testing.T) {
			subject := fresh(t)
			check(t, &harness{Subject: subject, taken: make(map[quota.ID]bool)})
		})
	}
}

type harness struct {
	Subject
	taken map[quota.ID]bool
}

// subvolumes reports whether the kernel chooses ids and inodes are not counted.
func (h *harness) subvolumes() bool { return h.Kind() == quota.Btrfs }

// make makes a directory.
func (h *harness) make(t *testing.T, name string) *dir.Dir {
	t.Helper()
	d, err := h.Make(h.Root, name)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// limited makes a directory with a limit.
func (h *harness) limited(t *testing.T, name string, l quota.Limit) (*dir.Dir, quota.ID) {
	t.Helper()
	d := h.make(t, name)
	id := h.newID(t)
	must.Succeed(t, h.Limit(d, id, l))
	id, err := h.IDOf(d)
	must.Succeed(t, err)
	return d, id
}

func (h *harness) newID(t *testing.T) quota.ID {
	t.Helper()
	id, err := h.NewID(h.Root, 0, func(id quota.ID) bool { return h.taken[id] })
	must.Succeed(t, err)
	h.taken[id] = true
	return id
}

// fill writes to a file until no further block fits. Btrfs refuses large writes slightly
// early, since it reserves space for metadata.
func fill(t *testing.T, file File) (total int64, err error) {
	t.Helper()
	for _, size := range []int64{slack, 4096} {
		for err = nil; err == nil; {
			var n int64
			n, err = file.Write(size)
			if total += n; total > 1<<30 {
				t.Fatalf("%d bytes were written without an error", total)
			}
		}
	}
	return total, err
}

func (h *harness) create(t *testing.T, d *dir.Dir, name string) File {
	t.Helper()
	file, err := h.Create(d, name)
	must.Succeed(t, err)
	return file
}

func (h *harness) write(t *testing.T, d *dir.Dir, name string, bytes int64) File {
	t.Helper()
	file := h.create(t, d, name)
	for left := bytes; left > 0; {
		n, err := file.Write(min(left, slack))
		must.Succeed(t, err)
		left -= n
	}
	must.Succeed(t, file.Close())
	return file
}

func (h *harness) usage(t *testing.T, d *dir.Dir, id quota.ID) quota.Usage {
	t.Helper()
	h.Settle(t)
	usage, err := h.Usage(d, id)
	must.Succeed(t, err)
	return usage
}

// eventually waits for work that the kernel does in the background.
func (h *harness) eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within a minute", what)
		}
		h.Settle(t)
	}
}

func wantFull(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		t.Errorf("error %v, want ENOSPC or EDQUOT", err)
	}
}

func wantBetween(t *testing.T, what string, got, low, high int64) {
	t.Helper()
	if got < low || got > high {
		t.Errorf("%s: %d, want %d to %d", what, got, low, high)
	}
}

func made(t *testing.T, h *harness) {
	d := h.make(t, "a")
	mode, err := d.Mode()
	must.Succeed(t, err)
	if mode != 0o700 {
		t.Errorf("mode %o, want 700", mode)
	}
	if _, err := h.Make(h.Root, "a"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("making it again: %v, want fs.ErrExist", err)
	}
	id, err := h.IDOf(d)
	must.Succeed(t, err)
	if h.subvolumes() != (id != 0) {
		t.Errorf("the new directory has id %d", id)
	}
	if id == 0 {
		id = h.newID(t)
	}
	usage := h.usage(t, d, id)
	if usage.Limit != (quota.Limit{}) {
		t.Errorf("limit %+v, want none", usage.Limit)
	}
	wantBetween(t, "bytes used", usage.Bytes, 0, slack)
}

func madeElsewhere(t *testing.T, h *harness) {
	for _, name := range []string{"", ".", "..", "../a", "a/b", "/a", "a\x00b"} {
		if _, err := h.Make(h.Root, name); !errors.Is(err, dir.ErrName) {
			t.Errorf("Make(%q): %v, want ErrName", name, err)
		}
	}
}

func limitBites(t *testing.T, h *harness) {
	d, _ := h.limited(t, "a", quota.Limit{Bytes: 8 * mib})
	file := h.create(t, d, "file")
	total, err := fill(t, file)
	wantFull(t, err)
	must.Succeed(t, file.Close())
	wantBetween(t, "bytes written", total, 8*mib-slack, 8*mib)
}

func othersUntouched(t *testing.T, h *harness) {
	full, _ := h.limited(t, "a", quota.Limit{Bytes: 2 * mib})
	limited, id := h.limited(t, "b", quota.Limit{Bytes: 4 * mib})
	free := h.make(t, "c")
	file := h.create(t, full, "file")
	_, err := fill(t, file)
	wantFull(t, err)
	must.Succeed(t, file.Close())
	if usage := h.usage(t, limited, id); usage.Limit.Bytes != 4*mib || usage.Bytes > slack {
		t.Errorf("the other directory: %+v, want nothing used of 4 MiB", usage)
	}
	h.write(t, limited, "file", 4*mib-slack)
	h.write(t, free, "file", 6*mib)
}

func limitBelowUse(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 8 * mib})
	h.write(t, d, "file", 4*mib)
	must.Succeed(t, h.Limit(d, id, quota.Limit{Bytes: 2 * mib}))
	if usage := h.usage(t, d, id); usage.Limit.Bytes != 2*mib || usage.Bytes < 4*mib {
		t.Errorf("usage %+v, want 4 MiB used of 2", usage)
	}
	more, err := h.Create(d, "more")
	if err == nil {
		_, err = more.Write(64 << 10)
	}
	wantFull(t, err)
	if more != nil {
		must.Succeed(t, more.Close())
	}
}

func useIsTold(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 8 * mib})
	h.write(t, d, "one", 3*mib)
	h.write(t, d, "two", mib)
	usage := h.usage(t, d, id)
	wantBetween(t, "bytes used", usage.Bytes, 4*mib, 4*mib+slack)
	inodes := int64(3)
	if h.subvolumes() {
		inodes = quota.Unknown
	}
	if usage.Inodes != inodes || usage.Limit.Bytes != 8*mib {
		t.Errorf("usage %+v, want %d inodes and a limit of 8 MiB", usage, inodes)
	}
	// Any directory of the filesystem will do.
	again, err := h.Usage(h.Root, id)
	must.Succeed(t, err)
	if again != usage {
		t.Errorf("through the root %+v, want %+v", again, usage)
	}
}

func beside(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 8 * mib})
	read := func() int64 {
		t.Helper()
		h.Settle(t)
		all, err := h.Beside(h.Root)
		must.Succeed(t, err)
		if h.subvolumes() {
			return all.Alone() - h.usage(t, d, id).Alone()
		}
		return all.Alone()
	}
	plain, err := h.Root.Make("plain")
	must.Succeed(t, err)
	t.Cleanup(func() { _ = plain.Close() })
	before := read()
	h.write(t, d, "file", 4*mib)
	wantBetween(t, "bytes of no project after a volume was written", read()-before, -slack, slack)
	file := h.write(t, plain, "file", 2*mib)
	wantBetween(t, "bytes of no project after others wrote", read()-before, 2*mib-slack, 2*mib+slack)
	must.Succeed(t, file.Remove())
	h.eventually(t, "use of no project falls", func() bool { return read()-before <= slack })
}

func removedIsGivenBack(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 4 * mib})
	file := h.write(t, d, "file", 3*mib)
	must.Succeed(t, file.Remove())
	h.eventually(t, "usage falls", func() bool { return h.usage(t, d, id).Bytes < slack })
	h.write(t, d, "other", 3*mib)
}

func raise(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 2 * mib})
	file := h.create(t, d, "file")
	first, err := fill(t, file)
	wantFull(t, err)
	must.Succeed(t, h.Limit(d, id, quota.Limit{Bytes: 6 * mib}))
	second, err := fill(t, file)
	wantFull(t, err)
	must.Succeed(t, file.Close())
	wantBetween(t, "bytes written after raising", first+second, 6*mib-slack, 6*mib)
}

func setAgain(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 2 * mib})
	for _, bytes := range []int64{2 * mib, 2 * mib, 0, 0, mib} {
		must.Succeed(t, h.Limit(d, id, quota.Limit{Bytes: bytes}))
		if usage := h.usage(t, d, id); usage.Limit.Bytes != bytes {
			t.Errorf("limit %d, want %d", usage.Limit.Bytes, bytes)
		}
	}
	must.Succeed(t, h.Limit(d, id, quota.Limit{}))
	h.write(t, d, "file", 3*mib)
}

func wholeBlocks(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: mib + 1})
	usage := h.usage(t, d, id)
	wantBetween(t, "a limit of a mebibyte and a byte", usage.Limit.Bytes, mib+512, mib+64<<10)
	must.Succeed(t, h.Limit(d, id, usage.Limit))
	if again := h.usage(t, d, id); again.Limit != usage.Limit {
		t.Errorf("limit %+v, want what was read before, %+v", again.Limit, usage.Limit)
	}
}

func badLimit(t *testing.T, h *harness) {
	d := h.make(t, "a")
	id := h.newID(t)
	for _, l := range []quota.Limit{{Bytes: -1}, {Bytes: mib, Inodes: -1}, {Bytes: 1<<63 - 1}} {
		if err := h.Limit(d, id, l); err == nil {
			t.Errorf("limit %+v was accepted", l)
		}
	}
	if h.subvolumes() {
		if err := h.Limit(d, id, quota.Limit{Inodes: 1}); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("a limit on inodes: %v, want errors.ErrUnsupported", err)
		}
		for _, id := range []quota.ID{0, 5} { // 5 is the top-level subvolume
			if err := h.Release(d, id); err == nil {
				t.Errorf("subvolume %d was released", id)
			}
		}
		return
	}
	for _, id := range []quota.ID{0, 1, quota.FirstID - 1, quota.LastID + 1, 1<<32 + quota.FirstID} {
		if err := h.Limit(d, id, quota.Limit{Bytes: mib}); err == nil {
			t.Errorf("a limit for project %d was accepted", id)
		}
		if err := h.Release(d, id); err == nil {
			t.Errorf("project %d was released", id)
		}
	}
}

func idOf(t *testing.T, h *harness) {
	plain, err := h.Root.Make("plain")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, plain.Close()) }()
	if id, err := h.IDOf(plain); id != 0 || err != nil {
		t.Errorf("a plain directory has id %d, %v; want none", id, err)
	}
	d, id := h.limited(t, "a", quota.Limit{Bytes: mib})
	other, otherID := h.limited(t, "b", quota.Limit{Bytes: mib})
	if id == 0 || otherID == 0 || id == otherID {
		t.Errorf("ids %d and %d, want two", id, otherID)
	}
	if err := h.Limit(d, otherID, quota.Limit{Bytes: 2 * mib}); !errors.Is(err, quota.ErrOtherID) {
		t.Errorf("setting another id: %v, want ErrOtherID", err)
	}
	if got, err := h.IDOf(d); got != id || err != nil {
		t.Errorf("the directory has id %d, %v; want %d", got, err, id)
	}
	if usage := h.usage(t, other, otherID); usage.Limit.Bytes != mib {
		t.Errorf("the other's limit is %d, want %d", usage.Limit.Bytes, mib)
	}
	if !h.subvolumes() {
		return
	}
	if err := h.Limit(plain, 0, quota.Limit{Bytes: mib}); !errors.Is(err, quota.ErrPlain) {
		t.Errorf("limiting a plain directory: %v, want ErrPlain", err)
	}
	if _, err := h.Usage(plain, 0); !errors.Is(err, quota.ErrPlain) {
		t.Errorf("usage of a plain directory: %v, want ErrPlain", err)
	}
}

func followsRename(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 2 * mib})
	pool, err := h.Root.Make("pool")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, pool.Close()) }()
	other := h.make(t, "b")
	must.Succeed(t, other.Close())
	if err := h.Root.Rename("a", h.Root, "b"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("renaming over another: %v, want fs.ErrExist", err)
	}
	must.Succeed(t, h.Root.Rename("a", pool, "volume"))
	moved, err := pool.Open("volume")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, moved.Close()) }()
	if got, err := h.IDOf(moved); got != id || err != nil {
		t.Errorf("the moved directory has id %d, %v; want %d", got, err, id)
	}
	file := h.create(t, d, "file")
	total, err := fill(t, file)
	wantFull(t, err)
	must.Succeed(t, file.Close())
	wantBetween(t, "bytes written", total, 2*mib-slack, 2*mib)
}

func releaseUnused(t *testing.T, h *harness) {
	gone, goneID := h.limited(t, "gone", quota.Limit{Bytes: mib})
	claimed, claimedID := h.limited(t, "claimed", quota.Limit{Bytes: mib})
	empty, emptyID := h.limited(t, "empty", quota.Limit{Bytes: mib})
	used, usedID := h.limited(t, "used", quota.Limit{Bytes: mib})
	must.Succeed(t, used.WriteFile("data", make([]byte, 8<<10)))
	must.Succeed(t, errors.Join(gone.Close(), claimed.Close()))
	for name, id := range map[string]quota.ID{"gone": goneID, "claimed": claimedID} {
		must.Succeed(t, dir.RemoveTree(t.Context(), h.Root, name, noPause))
		if h.Removed != nil {
			h.Removed(id)
		}
	}
	// Those that other tests have just removed are released too.
	taken := func(id quota.ID) bool { return id != goneID && id != emptyID }
	h.eventually(t, "the limit is released", func() bool {
		released, err := h.ReleaseUnused(h.Root, taken)
		must.Succeed(t, err)
		forgotten := h.usage(t, h.Root, goneID).Limit == quota.Limit{}
		if released > 0 && !forgotten {
			t.Errorf("%d were released, and the limit is still there", released)
		}
		return forgotten
	})
	// Linux 6.10 and newer release the limit of a deleted subvolume themselves.
	if usage := h.usage(t, h.Root, claimedID); usage.Limit.Bytes != mib && !h.subvolumes() {
		t.Errorf("the limit of an id that is taken is %d, want it to stay", usage.Limit.Bytes)
	}
	if usage := h.usage(t, empty, emptyID); usage.Limit.Bytes != mib {
		t.Errorf("the limit of an empty directory is %d, want it to stay", usage.Limit.Bytes)
	}
	// It is asked for each id with a limit, also those in use: so a caller sees that it goes on.
	asked := false
	noted := func(id quota.ID) bool { asked = asked || id == usedID; return taken(id) }
	if released, err := h.ReleaseUnused(h.Root, noted); err != nil || released != 0 {
		t.Errorf("%d more were released, %v; want none", released, err)
	}
	if !asked {
		t.Error("it is not asked for an id that is in use")
	}
}

func release(t *testing.T, h *harness) {
	d, id := h.limited(t, "a", quota.Limit{Bytes: 4 * mib})
	nested, err := h.Make(d, "nested") // on btrfs a subvolume, such as users can make
	must.Succeed(t, err)
	must.Succeed(t, nested.WriteFile("content", nil))
	must.Succeed(t, nested.Close())
	file := h.create(t, d, "file")
	_, err = fill(t, file)
	wantFull(t, err)
	must.Succeed(t, file.Close())
	must.Succeed(t, h.Limit(d, id, quota.Limit{}))
	must.Succeed(t, d.Close())
	must.Succeed(t, dir.RemoveTree(t.Context(), h.Root, "a", noPause))
	h.eventually(t, "limit and usage are gone", func() bool {
		must.Succeed(t, h.Release(h.Root, id))
		usage, err := h.Usage(h.Root, id)
		must.Succeed(t, err)
		return usage.Limit == quota.Limit{} && usage.Bytes == 0 && usage.Inodes <= 0
	})
	if !h.subvolumes() {
		got, err := h.NewID(h.Root, id, func(quota.ID) bool { return false })
		must.Succeed(t, err)
		if got != id {
			t.Errorf("new id %d, want %d again, from which was asked for", got, id)
		}
	}
	again, _ := h.limited(t, "a", quota.Limit{Bytes: 2 * mib})
	h.write(t, again, "file", mib)
}

func newID(t *testing.T, h *harness) {
	if h.subvolumes() {
		if id := h.newID(t); id != 0 {
			t.Errorf("new id %d, want 0: the kernel chooses", id)
		}
		return
	}
	first, second := h.newID(t), h.newID(t)
	wantBetween(t, "the first id", int64(first), int64(quota.FirstID), int64(quota.LastID))
	if second == first {
		t.Errorf("id %d is new twice, and was claimed in between", first)
	}
	// It is unclaimed now, but has a limit, so it is in use.
	must.Succeed(t, h.Limit(h.make(t, "a"), first, quota.Limit{Bytes: mib}))
	if got, err := h.NewID(h.Root, first, func(quota.ID) bool { return false }); err != nil || got == first {
		t.Errorf("new id %d, %v; want another than %d, which has a limit", got, err, first)
	}
	if id, err := h.NewID(h.Root, second+100, func(quota.ID) bool { return false }); err != nil || id != second+100 {
		t.Errorf("new id %d, %v; want %d, from which was asked for", id, err, second+100)
	}
	if id, err := h.NewID(h.Root, 0, func(quota.ID) bool { return true }); !errors.Is(err, quota.ErrNoID) {
		t.Errorf("new id %d, %v; want ErrNoID", id, err)
	}
}

func inodes(t *testing.T, h *harness) {
	if h.subvolumes() {
		return // not supported; covered by another case
	}
	d, id := h.limited(t, "a", quota.Limit{Bytes: mib, Inodes: 4})
	for i := range 3 { // the directory counts as the first
		h.write(t, d, fmt.Sprint(i), 0)
	}
	_, err := h.Create(d, "more")
	wantFull(t, err)
	want := quota.Limit{Bytes: mib, Inodes: 4}
	if usage := h.usage(t, d, id); usage.Inodes != 4 || usage.Limit != want {
		t.Errorf("usage %+v, want 4 inodes and a limit of %+v", usage, want)
	}
	must.Succeed(t, h.Limit(d, id, quota.Limit{Bytes: mib}))
	h.write(t, d, "more", 0)
}

func before(t *testing.T, h *harness) {
	if h.subvolumes() {
		return // subvolumes have their id from the start
	}
	d := h.make(t, "a")
	h.write(t, d, "old", 3*mib)
	id := h.newID(t)
	must.Succeed(t, h.Limit(d, id, quota.Limit{Bytes: 2 * mib}))
	h.write(t, d, "new", mib)
	usage := h.usage(t, d, id)
	wantBetween(t, "bytes used", usage.Bytes, mib, mib+slack)
	if usage.Inodes != 2 {
		t.Errorf("%d inodes used, want the directory and the new file", usage.Inodes)
	}
}

func atOnce(t *testing.T, h *harness) {
	var ids []quota.ID
	for range 8 {
		ids = append(ids, h.newID(t))
	}
	var group sync.WaitGroup
	for i, id := range ids {
		group.Go(func() {
			if err := h.lifeOf(fmt.Sprint(i), id, int64(i+1)*mib); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

// lifeOf creates a directory, limits it and removes it.
func (h *harness) lifeOf(name string, id quota.ID, bytes int64) error {
	d, err := h.Make(h.Root, name)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	if err := h.Limit(d, id, quota.Limit{Bytes: bytes}); err != nil {
		return err
	}
	id, err = h.IDOf(d)
	if err != nil {
		return err
	}
	usage, err := h.Usage(d, id)
	if err != nil {
		return err
	}
	if usage.Limit.Bytes != bytes {
		return fmt.Errorf("limit %d of directory %s, want %d", usage.Limit.Bytes, name, bytes)
	}
	return errors.Join(h.Root.RemoveDir(name), h.Release(h.Root, id))
}

func noPause(context.Context) error { return nil }
