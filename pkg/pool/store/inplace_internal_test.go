package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// A link is never followed to a directory that was removed in place.
func TestRemovedInPlace_link(t *testing.T) {
	testenv.NeedRoot(t)
	path, outside := t.TempDir(), t.TempDir()
	s := openAs(t, path, "node-1")
	must.Succeed(t, os.Mkdir(filepath.Join(path, "pvc-1"), 0o700), removeInPlace(s.root, idOf("pvc-1"), "pvc-1.uid+5"))
	wantPieces(t, s, "./pvc-1.uid+5")
	name := inPlacePrefix + "pvc-1.uid+5"
	must.Succeed(t, os.Rename(filepath.Join(path, name), filepath.Join(outside, name)), os.Symlink(filepath.Join(outside, name), filepath.Join(path, name)))
	wantPieces(t, s)
	wantVolumes(t, s)
	must.Succeed(t, s.Trash().In("./pvc-1.uid+5", func(_ *dir.Dir, entry string) error {
		t.Errorf("%s is opened", entry)
		return nil
	}))
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
	as := TrashName{Of: longest, UID: longestUID(t, longest), Promised: volume.MaxBytes}.String()
	must.Succeed(t, os.Mkdir(filepath.Join(path, longest), 0o700))
	must.Succeed(t, removeInPlace(s.root, idOf(longest), as))
	wantPieces(t, s, "./"+as)
}

// longestUID is the longest that a record by hand can have.
func longestUID(t *testing.T, id string) (uid string) {
	t.Helper()
	for length := 1; ; length++ {
		longer := strings.Repeat("u", length)
		_, err := decodeRecord(idOf(id), fmt.Appendf(nil, `{"version":1,"id":%q,"uid":%q,"mode":"mount","bytes":1}`, id, longer))
		if err != nil {
			must.ErrorIs(t, err, volume.ErrDamagedRecord)
			break
		}
		uid = longer
	}
	if len(uid) < len(RandomSuffix()) {
		t.Errorf("a uid has at most %d bytes, and that of the driver %d", len(uid), len(RandomSuffix()))
	}
	return uid
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
	must.Succeed(t, removeInPlace(s.root, idOf("pvc-1"), strings.TrimPrefix(piece, "./")))
	s = openAs(t, path, "node-1")
	wantPieces(t, s, piece)
	wantVolumes(t, s)
	if vacant, err := s.Vacant(); vacant || err != nil {
		t.Errorf("the pool is vacant: %v, %v", vacant, err)
	}
	if e, _, err := s.LookupUnlocked(idOf("pvc-1")); err != nil || e.Exists() {
		t.Errorf("what is being removed is %+v, %v; want it not to exist", e, err)
	}
	if _, dropped, err := s.Trash().FinishRemoval(s.root, "./pvc-1.another+5"); dropped || err != nil {
		t.Errorf("the record of another volume is dropped: %v, %v", dropped, err)
	}
	if _, dropped, err := s.Trash().FinishRemoval(s.root, piece); !dropped || err != nil {
		t.Errorf("the record is dropped: %v, %v", dropped, err)
	}

	must.Succeed(t, os.Mkdir(at, 0o700))
	wantVolumes(t, s, "pvc-1")
	erased := 0
	must.Succeed(t, s.Trash().In(piece, func(in *dir.Dir, entry string) error {
		erased++
		return in.RemoveDir(entry)
	}))
	if _, err := os.Stat(at); err != nil || erased != 1 {
		t.Errorf("erased %d times, and the other volume: %v", erased, err)
	}
	wantPieces(t, s)
}

// A full disk takes no mark. The call fails with a code that kubelet repeats, and no mark is left that would count.
func TestMark_withoutRoom(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	must.Succeed(t, loopfs.Mount(t.Context(), path, "ext4", 16<<20))
	t.Cleanup(func() { must.Succeed(t, loopfs.Unmount(path)) })
	pool, foreign := filepath.Join(path, "pool"), filepath.Join(path, "foreign")
	must.Succeed(t, os.MkdirAll(filepath.Join(pool, "pvc-1"), 0o700), os.Mkdir(foreign, 0o700))
	s, other := openAs(t, pool, "node-1"), openAs(t, pool, "node-2")
	must.Succeed(t, other.Nodes().Mark(idOf("pvc-2"))) // there are directories for marks
	fulldisk.Fill(t, foreign, fulldisk.Shortage{Inodes: true})

	err := other.Nodes().Mark(idOf("pvc-1"))
	must.ErrorIs(t, err, volume.ErrNoSpace)
	must.ErrorIs(t, err, syscall.ENOSPC)
	wantPublishedElsewhere(t, s, idOf("pvc-1"), false)
	wantPublishedElsewhere(t, s, idOf("pvc-2"), true)
	must.Succeed(t, other.Nodes().Unmark(idOf("pvc-1")))

	fulldisk.Empty(t, foreign)
	must.Succeed(t, other.Nodes().Mark(idOf("pvc-1")))
	wantPublishedElsewhere(t, s, idOf("pvc-1"), true)
}

// A node whose directories do not fit does not serve, and all is as usual once there is room.
func TestCreate_withoutRoom(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	must.Succeed(t, loopfs.Mount(t.Context(), path, "ext4", 16<<20))
	t.Cleanup(func() { must.Succeed(t, loopfs.Unmount(path)) })
	pool, foreign := filepath.Join(path, "pool"), filepath.Join(path, "foreign")
	must.Succeed(t, os.MkdirAll(filepath.Join(pool, "pvc-1"), 0o700), os.Mkdir(foreign, 0o700))
	wantNoRoom := func(node string) {
		t.Helper()
		fulldisk.Fill(t, foreign, fulldisk.Shortage{Bytes: true, Inodes: true})
		_, _, err := Create(t.Context(), locationOf(t, pool, node))
		must.ErrorIs(t, err, ErrNoRoom)
		fulldisk.Empty(t, foreign)
		wantVolumes(t, openAs(t, pool, node), "pvc-1")
	}
	wantNoRoom("node-1")
	wantNoRoom("node-2")
}

// One node erases what was removed in place, also while the call that has removed it is not through.
func TestPiecesAreLocked(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	s, other := openAs(t, path, "node-1"), openAs(t, path, "node-2")
	called, err := s.Nodes().TryLockByte(VolumeByte(idOf("pvc-1")))
	must.Succeed(t, err)
	defer called()
	erased, err := s.Trash().Lock("./pvc-1.uid+5")
	must.Succeed(t, err)
	_, err = other.Trash().Lock("./pvc-1.uid+5")
	must.ErrorIs(t, err, volume.ErrBusy)
	erased()
	erased, err = other.Trash().Lock("./pvc-1.uid+5")
	must.Succeed(t, err)
	erased()
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
	node := must.Value(volume.ParseNodeID(name))(t)
	ignore := func(*dir.Dir) error { return nil }
	return &Location{Path: path, Node: node, Shared: true, Verify: ignore, Nested: ignore}
}

func wantPieces(t *testing.T, s *Store, want ...string) {
	t.Helper()
	got, err := s.Trash().InPlace()
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

func wantPublishedElsewhere(t *testing.T, s *Store, id volume.ID, want bool) {
	t.Helper()
	if err := s.Nodes().UnpublishedElsewhere(id); errors.Is(err, volume.ErrInUse) != want || err != nil && !want {
		t.Errorf("%s is published by another node: %v, want %v", id, err, want)
	}
}
