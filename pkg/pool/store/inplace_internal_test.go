package store

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
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
	must.Succeed(t, other.publishInPlace(original))
	must.Succeed(t, s.removeInPlace(t.Context(), original, "pvc-1.uid+5"))
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
	must.Succeed(t, s.removeInPlace(t.Context(), idOf("pvc-1"), "pvc-1.zzhioir5avpfwbox+5"))
	record := filepath.Join(path, OwnName, volumesName, "pvc-1"+recordSuffix)
	must.Succeed(t, os.WriteFile(record, []byte(wholeRecord), 0o600))
	wantPieces(t, s, "./pvc-1.zzhioir5avpfwbox+5")
	wantVolumes(t, s)
	if e, _, err := s.LookupUnlocked(idOf("pvc-1")); err != nil || e.Exists() {
		t.Errorf("what is being removed is %+v, %v; want it not to exist", e, err)
	}
	must.Succeed(t, s.removeInPlace(t.Context(), idOf("pvc-1"), "pvc-1.another+5"))
	wantPieces(t, s)
	wantVolumes(t, s, "pvc-1")
}

func openAs(t *testing.T, path, name string) *Store {
	t.Helper()
	node, err := volume.ParseNodeID(name)
	must.Succeed(t, err)
	ignore := func(*dir.Dir) error { return nil }
	s, _, err := Create(t.Context(), &Location{Path: path, Node: node, Shared: true, Verify: ignore, Nested: ignore})
	must.Succeed(t, err)
	t.Cleanup(s.Close)
	return s
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
