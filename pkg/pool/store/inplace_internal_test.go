package store

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A clone, rsync and tar copy attributes, and no copy of a directory is trash, or published, for what
// is set on the original.
func TestMarksInPlace_copied(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s := openAs(t, path, "node-1")
	other := openAs(t, path, "node-2")
	original, copied := idOf("pvc-1"), idOf("pvc-2")
	for _, id := range []volume.ID{original, copied} {
		must.Succeed(t, os.Mkdir(filepath.Join(path, id.String()), 0o700))
	}
	must.Succeed(t, other.inEntry(original, func(d *dir.Dir) error {
		seal, err := sealOf(d, original, "node-2")
		must.Succeed(t, err)
		return markPublished(d, "node-2", seal)
	}))
	must.Succeed(t, s.markRemoved(t.Context(), s.root, original, "pvc-1.uid+5"))
	copyAttributes(t, filepath.Join(path, "pvc-1"), filepath.Join(path, "pvc-2"))
	wantPieces(t, s, "./pvc-1.uid+5")
	wantVolumes(t, s, "pvc-2")
	wantPublishedBy(t, s, original, 1)
	wantPublishedBy(t, s, copied, 0)

	// Another directory in its place: restored from a backup, or by hand.
	away := filepath.Join(path, OwnName, "away")
	must.Succeed(t, os.Rename(filepath.Join(path, "pvc-1"), away))
	must.Succeed(t, os.Mkdir(filepath.Join(path, "pvc-1"), 0o700))
	copyAttributes(t, away, filepath.Join(path, "pvc-1"))
	wantPieces(t, s)
	wantVolumes(t, s, "pvc-1", "pvc-2")
	wantPublishedBy(t, s, original, 0)
	must.Succeed(t, s.InPiece("./pvc-1.uid+5", func(*dir.Dir, string) error {
		t.Error("the directory in its place is taken for it")
		return nil
	}))
}

// A mark does not count against a record of another volume.
func TestMarksInPlace_otherRecord(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s := openAs(t, path, "node-1")
	must.Succeed(t, os.Mkdir(filepath.Join(path, "pvc-1"), 0o700))
	must.Succeed(t, s.markRemoved(t.Context(), s.root, idOf("pvc-1"), "pvc-1.zzhioir5avpfwbox+5"))
	record := filepath.Join(path, OwnName, volumesName, "pvc-1"+recordSuffix)
	must.Succeed(t, os.WriteFile(record, []byte(wholeRecord), 0o600))
	wantPieces(t, s, "./pvc-1.zzhioir5avpfwbox+5")
	wantVolumes(t, s)
	if e, _, err := s.LookupUnlocked(idOf("pvc-1")); err != nil || e.Exists() {
		t.Errorf("what is being removed is %+v, %v; want it not to exist", e, err)
	}
	must.Succeed(t, s.markRemoved(t.Context(), s.root, idOf("pvc-1"), "pvc-1.another+5"))
	wantPieces(t, s)
	wantVolumes(t, s, "pvc-1")
}

// Nothing but all of a mark is one, and no word of it can be changed.
func TestMarksInPlace_torn(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s := openAs(t, path, "node-1")
	at := filepath.Join(path, "pvc-1")
	must.Succeed(t, os.Mkdir(at, 0o700))
	must.Succeed(t, s.markRemoved(t.Context(), s.root, idOf("pvc-1"), "pvc-1.uid+1234"))
	whole := make([]byte, 4096)
	n, err := unix.Getxattr(at, removedMark, whole)
	must.Succeed(t, err)
	whole = whole[:n]
	torn := [][]byte{append(slices.Clone(whole), '0'), bytes.Replace(whole, []byte("uid"), []byte("Uid"), 1), make([]byte, 1000)}
	for end := range whole {
		torn = append(torn, whole[:end])
	}
	for _, value := range torn {
		must.Succeed(t, unix.Setxattr(at, removedMark, value, 0))
		wantPieces(t, s)
		wantVolumes(t, s, "pvc-1")
	}
	must.Succeed(t, unix.Setxattr(at, removedMark, whole, 0))
	wantPieces(t, openAs(t, path, "node-1"), "./pvc-1.uid+1234")
}

// A link is never followed to a directory that is marked, nor to one that was renamed.
func TestRemovedInPlace_link(t *testing.T) {
	testenv.NeedRoot(t)
	path, outside := t.TempDir(), t.TempDir()
	s := openAs(t, path, "node-1")
	for _, name := range []string{"pvc-1", "pvc-2"} {
		must.Succeed(t, os.Mkdir(filepath.Join(path, name), 0o700))
	}
	must.Succeed(t, s.markRemoved(t.Context(), s.root, idOf("pvc-1"), "pvc-1.uid+5"))
	must.Succeed(t, s.removeInPlace(t.Context(), s.root, idOf("pvc-2"), "pvc-2.uid+5"))
	pieces := []string{"./pvc-2.uid+5", "./pvc-1.uid+5"}
	wantPieces(t, s, pieces...)
	for _, name := range []string{"pvc-1", aside + "pvc-2.uid+5"} {
		must.Succeed(t, os.Rename(filepath.Join(path, name), filepath.Join(outside, name)))
		must.Succeed(t, os.Symlink(filepath.Join(outside, name), filepath.Join(path, name)))
	}
	wantPieces(t, s)
	wantVolumes(t, s)
	for _, piece := range pieces {
		must.Succeed(t, s.InPiece(piece, func(_ *dir.Dir, entry string) error {
			t.Errorf("%s is taken for %s", entry, piece)
			return nil
		}))
	}
}

// Only names that the driver makes are trash, and no client can have a volume called so.
func TestRenamedInPlace_names(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s := openAs(t, path, "node-1")
	for _, name := range []string{
		".trash-", ".trash-pvc-1", ".trash-pvc-1.uid", ".trash-pvc-1+5", ".trash-pvc-1.+5", ".trash-.uid+5", ".trash-pvc-1.uid+", ".trash-pvc-1.uid+05",
		".trash-pvc-1.uid+-5", ".trash-pvc-1.uid+9223372036854775808", ".trash-.pvc-1.uid+5", ".trash-..uid+5", ".trash-pvc 1.uid+5", ".trash-~snapshot.uid+5",
		".trash", ".Trash-pvc-1.uid+5", ".new-.trash-pvc-1.uid+5", "trash-pvc-1.uid",
	} {
		must.Succeed(t, os.Mkdir(filepath.Join(path, name), 0o700))
		if id, err := volume.ParseEntry(name); err == nil && strings.HasPrefix(id.String(), ".") {
			t.Errorf("%s is a volume", id)
		}
	}
	must.Succeed(t, os.WriteFile(filepath.Join(path, ".trash-file.uid+5"), nil, 0o600))
	wantPieces(t, s)

	longest := strings.Repeat("x", 200)
	as := Thrown{Of: longest, UID: RandomSuffix(), Promised: volume.MaxBytes}.String()
	must.Succeed(t, os.Mkdir(filepath.Join(path, longest), 0o700))
	must.Succeed(t, s.removeInPlace(t.Context(), s.root, idOf(longest), as))
	wantPieces(t, s, "./"+as)
}

// A volume that was renamed is gone at once and after a restart, another of its name is none of its business, and
// its record goes as that of a volume in the trash.
func TestRenamedInPlace_record(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s := openAs(t, path, "node-1")
	at, record := filepath.Join(path, "pvc-1"), filepath.Join(path, OwnName, volumesName, "pvc-1"+recordSuffix)
	must.Succeed(t, os.Mkdir(at, 0o700))
	must.Succeed(t, os.WriteFile(record, []byte(wholeRecord), 0o600))
	const piece = "./pvc-1.zzhioir5avpfwbox+5"
	must.Succeed(t, s.removeInPlace(t.Context(), s.root, idOf("pvc-1"), strings.TrimPrefix(piece, "./")))
	s = openAs(t, path, "node-1")
	wantPieces(t, s, piece)
	wantVolumes(t, s)
	if vacant, err := s.Vacant(); vacant || err != nil {
		t.Errorf("the pool is vacant: %v, %v", vacant, err)
	}
	if e, _, err := s.LookupUnlocked(idOf("pvc-1")); err != nil || e.Exists() {
		t.Errorf("what is being removed is %+v, %v; want it not to exist", e, err)
	}
	if _, dropped, err := s.FinishRemoval("./pvc-1.another+5"); dropped || err != nil {
		t.Errorf("the record of another volume is dropped: %v, %v", dropped, err)
	}
	if _, dropped, err := s.FinishRemoval(piece); !dropped || err != nil {
		t.Errorf("the record is dropped: %v, %v", dropped, err)
	}

	must.Succeed(t, os.Mkdir(at, 0o700))
	wantVolumes(t, s, "pvc-1")
	erased := 0
	must.Succeed(t, s.InPiece(piece, func(in *dir.Dir, entry string) error {
		erased++
		return in.RemoveDir(entry)
	}))
	if _, err := os.Stat(at); err != nil || erased != 1 {
		t.Errorf("erased %d times, and the other volume: %v", erased, err)
	}
	wantPieces(t, s)
}

// A node that has no room for a file says by a name that it has a volume published, and another volume of that
// name is none of its business.
func TestPublishInPlace(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s, other := openAs(t, path, "node-1"), openAs(t, path, "node-2")
	at, id := filepath.Join(path, "pvc-1"), idOf("pvc-1")
	must.Succeed(t, os.Mkdir(at, 0o700), os.Mkdir(filepath.Join(path, "pvc-2"), 0o700))
	for range 2 { // the call is repeated
		must.Succeed(t, other.publishInPlace(id))
	}
	wantPublishedBy(t, s, id, 1)
	wantPublishedBy(t, openAs(t, path, "node-1"), id, 1)
	wantPublishedBy(t, s, idOf("pvc-2"), 0)
	wantPublishedBy(t, other, id, 0)
	must.Succeed(t, s.unpublishInPlace(id)) // only its own
	wantPublishedBy(t, s, id, 1)

	must.Succeed(t, os.Rename(at, at+"-away"), os.Mkdir(at, 0o700))
	wantPublishedBy(t, s, id, 0)
	must.Succeed(t, os.Remove(at), os.Rename(at+"-away", at))
	wantPublishedBy(t, s, id, 1)
	must.Succeed(t, other.unpublishInPlace(id), other.unpublishInPlace(id))
	wantPublishedBy(t, s, id, 0)
	if left, err := filepath.Glob(filepath.Join(path, OwnName, publishedLink+"*")); err != nil || len(left) > 0 {
		t.Errorf("left are %q, %v", left, err)
	}
	must.Succeed(t, other.publishInPlace(id), other.Mark(id)) // there is room for a file again
	if left, err := filepath.Glob(filepath.Join(path, OwnName, publishedLink+"*")); err != nil || len(left) > 0 {
		t.Errorf("beside the file there are %q, %v", left, err)
	}
}

// One node erases what was removed in place, also while the call that has removed it is not through.
func TestLockPiece(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s, other := openAs(t, path, "node-1"), openAs(t, path, "node-2")
	called, err := s.TryLockByte(VolumeByte(idOf("pvc-1")))
	must.Succeed(t, err)
	defer called()
	erased, err := s.LockPiece("./pvc-1.uid+5")
	must.Succeed(t, err)
	_, err = other.LockPiece("./pvc-1.uid+5")
	must.ErrorIs(t, err, volume.ErrBusy)
	erased()
	erased, err = other.LockPiece("./pvc-1.uid+5")
	must.Succeed(t, err)
	erased()
}

// Without a layout a volume is removed, and stays so, and another directory at the pool's path is not the pool.
func TestPoolWithoutLayout(t *testing.T) {
	testenv.NeedRoot(t)
	path := filepath.Join(t.TempDir(), "pool")
	ignore := func(*dir.Dir) error { return nil }
	at := &Location{Path: path, Verify: ignore, Nested: ignore}
	for _, name := range []string{"pvc-1", "pvc-2", "pvc-3"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(path, name), 0o700))
	}
	open := func() (*Store, *Identity) {
		t.Helper()
		s, f, err := CreateBare(at)
		must.Succeed(t, err)
		t.Cleanup(s.Close)
		id, err := s.Identify(f)
		must.Succeed(t, err)
		return s, id
	}
	s, id := open()
	if err := s.OpenWork(); !errors.Is(err, ErrNoRoom) || !s.Bare() || !id.Bare() {
		t.Errorf("the directories of this node: %v", err)
	}
	piece, err := s.Remove(t.Context(), idOf("pvc-1"), "pvc-1.uid+0")
	must.Succeed(t, err, s.DropRecord(idOf("pvc-1")))
	must.Succeed(t, s.markRemoved(t.Context(), s.root, idOf("pvc-2"), "pvc-2.uid+0"))
	again, other := open()
	wantPieces(t, again, piece, "./pvc-2.uid+0")
	wantVolumes(t, again, "pvc-3")
	if other.Format.UUID != id.Format.UUID {
		t.Errorf("it is %s for one driver and %s for the next", id.Format.UUID, other.Format.UUID)
	}
	opened, err := Open(at, id)
	must.Succeed(t, err)
	opened.Close()

	must.Succeed(t, os.Rename(path, path+"-away"), os.Mkdir(path, 0o700))
	if _, err := Open(at, id); !errors.Is(err, ErrOther) {
		t.Errorf("another directory at its path: %v, want %v", err, ErrOther)
	}
	if left, err := os.ReadDir(path); err != nil || len(left) > 0 {
		t.Errorf("in it are %v, %v", left, err)
	}
}

// A removal that marks its volume does not wait while volumes are searched for marks, and ends the search only
// where nothing was marked meanwhile.
func TestForgetMarks(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	ignore := func(*dir.Dir) error { return nil }
	node, err := volume.ParseNodeID("node-1")
	must.Succeed(t, err)
	s, _, err := Create(t.Context(), &Location{Path: path, Node: node, Verify: ignore, Nested: ignore})
	must.Succeed(t, err)
	t.Cleanup(s.Close)
	must.Succeed(t, os.Mkdir(filepath.Join(path, "pvc-1"), 0o700))
	must.Succeed(t, s.markRemoved(t.Context(), s.root, idOf("pvc-1"), "pvc-1.uid+5"))

	s.at.marking.Lock() // as a removal does
	must.Succeed(t, s.ForgetMarks(t.Context()))
	s.at.marking.Unlock()
	wantPieces(t, s, "./pvc-1.uid+5")

	must.Succeed(t, os.Remove(filepath.Join(path, "pvc-1")))
	must.Succeed(t, s.ForgetMarks(t.Context()))
	if any, err := anyMarked(s.root); err != nil || any {
		t.Errorf("with nothing marked the search goes on (%v)", err)
	}
}

func openAs(t *testing.T, path, name string) *Store {
	t.Helper()
	s, _, err := Create(t.Context(), locationOf(t, path, name))
	must.Succeed(t, err)
	t.Cleanup(s.Close)
	return s
}

// locationOf is that of a shared pool for a node.
func locationOf(t *testing.T, path, name string) *Location {
	t.Helper()
	node, err := volume.ParseNodeID(name)
	must.Succeed(t, err)
	ignore := func(*dir.Dir) error { return nil }
	return &Location{Path: path, Node: node, Shared: true, Verify: ignore, Nested: ignore}
}

func copyAttributes(t *testing.T, from, to string) {
	t.Helper()
	names := make([]byte, 4096)
	n, err := unix.Listxattr(from, names)
	must.Succeed(t, err)
	copied := 0
	for name := range strings.FieldsFuncSeq(string(names[:n]), func(c rune) bool { return c == 0 }) {
		value := make([]byte, 4096)
		n, err := unix.Getxattr(from, name, value)
		must.Succeed(t, err)
		must.Succeed(t, unix.Setxattr(to, name, value[:n], 0))
		copied++
	}
	if copied < 2 {
		t.Fatalf("%d attributes are copied", copied)
	}
}

func wantPieces(t *testing.T, s *Store, want ...string) {
	t.Helper()
	got, err := s.RemovedInPlace()
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("removed in place are %q, %v; want %q", got, err, want)
	}
}

func wantVolumes(t *testing.T, s *Store, want ...string) {
	t.Helper()
	var got []string
	for id, err := range s.Directories() {
		must.Succeed(t, err)
		e, d, err := s.Lookup(id)
		must.Succeed(t, err)
		if !e.Present {
			t.Errorf("%s is listed, and not found", id)
			continue
		}
		must.Succeed(t, d.Close())
		got = append(got, id.String())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the volumes are %q, want %q", got, want)
	}
}

func wantPublishedBy(t *testing.T, s *Store, id volume.ID, want int) {
	t.Helper()
	if got, err := s.publishedInPlace(id); err != nil || len(got) != want {
		t.Errorf("%s is published by %v, %v; want %d nodes", id, got, err, want)
	}
}

// The nodes of a shared pool without a layout keep each other from a volume, and from what they have published, until one
// of them has made the layout; then that counts alone.
func TestBareShared(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	must.Succeed(t, loopfs.Mount(t.Context(), path, "ext4", 16<<20))
	t.Cleanup(func() { must.Succeed(t, loopfs.Unmount(path)) })
	id := idOf("pvc-1")
	must.Succeed(t, os.Mkdir(filepath.Join(path, id.String()), 0o700))
	s, other := openBareAs(t, path, "node-1"), openBareAs(t, path, "node-2")

	unlock, err := s.TryLockByte(VolumeByte(id))
	must.Succeed(t, err)
	_, err = other.TryLockByte(VolumeByte(id))
	must.ErrorIs(t, err, volume.ErrBusy)
	hurried, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, _, err = Create(hurried, locationOf(t, path, "node-2"))
	must.ErrorIs(t, err, context.DeadlineExceeded)
	must.Succeed(t, s.Mark(id))
	wantPublishedBy(t, other, id, 1)
	// There may be no room for the attribute.
	must.Succeed(t, s.inEntry(id, func(d *dir.Dir) error { return d.RemoveAttribute(publishedHere + "node-1") }))
	wantPublishedBy(t, other, id, 0)
	must.Succeed(t, s.inEntry(id, func(d *dir.Dir) error {
		seal, err := sealOf(d, id, "node-1")
		must.Succeed(t, err)
		return s.namePublished(seal + "node-1")
	}))
	wantPublishedBy(t, other, id, 1)
	unlock()

	equipped := openAs(t, path, "node-2")
	wantPublishedBy(t, equipped, id, 1)
	for _, late := range []*Store{s, other} {
		_, err = late.TryLockByte(VolumeByte(id))
		must.ErrorIs(t, err, volume.ErrUnavailable)
	}
	must.ErrorIs(t, s.Unmark(id), volume.ErrUnavailable)
	must.Succeed(t, openAs(t, path, "node-1").Unmark(id))
	wantPublishedBy(t, equipped, id, 0)
}

func openBareAs(t *testing.T, path, name string) *Store {
	t.Helper()
	s, _, err := CreateBare(locationOf(t, path, name))
	must.Succeed(t, err)
	t.Cleanup(s.Close)
	return s
}
