package upstream_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/upstream"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A harness is a snapshotPath.
type harness struct {
	*testing.T
	path string
	dir  *dir.Dir
}

func aHarness(t *testing.T) *harness {
	t.Helper()
	h := &harness{T: t, path: t.TempDir()}
	var err error
	h.dir, err = dir.Open(h.path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, h.dir.Close()) })
	return h
}

func (h *harness) make(directories ...string) {
	h.Helper()
	for _, d := range directories {
		must.Succeed(h, os.MkdirAll(filepath.Join(h.path, d), 0o755))
	}
}

func (h *harness) write(file string) {
	h.Helper()
	must.Succeed(h, os.WriteFile(filepath.Join(h.path, file), []byte(file), 0o644))
}

func (h *harness) id(name string) volume.ID {
	h.Helper()
	id := must.Value(volume.ParseSnapshot(name))(h)
	return id
}

// snapshot is one as the upstream driver leaves it: CreateSnapshot of pkg/hostpath/reflink.go in kubevirt/hostpath-provisioner v0.25.2.
func (h *harness) snapshot(name, of string) {
	h.Helper()
	h.make(filepath.Join(name, of), filepath.Join(name, "data", "sub"))
	h.write(filepath.Join(name, "data", "disk.img"))
}

func (h *harness) names() []string {
	h.Helper()
	entries := must.Value(os.ReadDir(h.path))(h)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func (h *harness) remove(name string) error {
	return upstream.Remove(h.Context(), h.dir, h.id(name), func(ctx context.Context) error { return ctx.Err() })
}

func TestList(t *testing.T) {
	h := aHarness(t)
	h.snapshot("snapshot-2", "pvc-1")
	h.snapshot("snapshot-1", "pvc-1")
	h.make(".removed-snapshot-3", "lost+found", ".hidden")
	h.write("file")
	must.Succeed(t, os.Symlink("snapshot-1", filepath.Join(h.path, "link")))
	all := must.Value(upstream.List(h.dir))(t)
	var names []string
	for _, id := range all {
		names = append(names, id.String())
	}
	if diff := cmp.Diff([]string{"~snapshot-1", "~snapshot-2"}, names); diff != "" {
		t.Errorf("other snapshots are listed (-want +got):\n%s", diff)
	}
}

func TestOpen(t *testing.T) {
	h := aHarness(t)
	h.snapshot("snapshot-1", "pvc-1")
	s, data, err := upstream.Open(h.dir, h.id("snapshot-1"))
	must.Succeed(t, err)
	defer func() { _ = data.Close() }()
	if s.Source.String() != "pvc-1" || s.ID != h.id("snapshot-1") || s.Made.IsZero() {
		t.Errorf("the snapshot is %+v", s)
	}
	if there, err := data.Exists("disk.img"); err != nil || !there {
		t.Errorf("its content is missing (%v)", err)
	}
	if _, err := upstream.Read(h.dir, h.id("snapshot-9")); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("a missing snapshot: %v, want ErrNotFound", err)
	}
	must.Succeed(t, os.Symlink("snapshot-1", filepath.Join(h.path, "link")))
	if _, err := upstream.Read(h.dir, h.id("link")); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("a link: %v, want ErrNotFound", err)
	}
}

// odd are directories that are not what the upstream driver leaves when it is done.
var odd = map[string]struct {
	make func(h *harness)
	// is what Open answers, and removable whether Remove removes it.
	is        error
	removable bool
}{
	"nothing in it yet":     {func(h *harness) { h.make("s") }, volume.ErrDamagedRecord, true},
	"without data":          {func(h *harness) { h.make("s/pvc-1") }, volume.ErrDamagedRecord, true},
	"data alone":            {func(h *harness) { h.make("s/data/sub") }, volume.ErrDamagedRecord, true},
	"two volumes":           {func(h *harness) { h.make("s/data", "s/pvc-1", "s/pvc-2") }, volume.ErrPrecondition, false},
	"a volume with content": {func(h *harness) { h.make("s/data", "s/pvc-1/more") }, volume.ErrPrecondition, false},
	"a file beside":         {func(h *harness) { h.make("s/data", "s/pvc-1"); h.write("s/notes") }, volume.ErrPrecondition, false},
	"a name of no volume":   {func(h *harness) { h.make("s/data", "s/.pvc") }, volume.ErrPrecondition, false},
	"data that is a file":   {func(h *harness) { h.make("s/pvc-1"); h.write("s/data") }, volume.ErrPrecondition, false},
	"data that leads out":   {func(h *harness) { h.make("s/pvc-1"); must.Succeed(h, os.Symlink("/", filepath.Join(h.path, "s/data"))) }, volume.ErrPrecondition, false},
	"a volume that is a link": {func(h *harness) {
		h.make("s/data")
		must.Succeed(h, os.Symlink("/etc", filepath.Join(h.path, "s/pvc-1")))
	}, volume.ErrPrecondition, false},
}

func TestOddDirectories(t *testing.T) {
	for name, c := range odd {
		t.Run(name, func(t *testing.T) {
			h := aHarness(t)
			c.make(h)
			if _, err := upstream.Read(h.dir, h.id("s")); !errors.Is(err, c.is) {
				t.Errorf("reading it: %v, want %v", err, c.is)
			}
			err := h.remove("s")
			if left := len(h.names()) > 0; left == c.removable || (err == nil) != c.removable {
				t.Errorf("removing it: %v, and %q is left", err, h.names())
			}
			if !c.removable && !errors.Is(err, volume.ErrPrecondition) {
				t.Errorf("removing it: %v, want ErrPrecondition", err)
			}
		})
	}
}

func TestRemove(t *testing.T) {
	h := aHarness(t)
	h.snapshot("snapshot-1", "pvc-1")
	h.snapshot("snapshot-2", "pvc-1")
	outside := filepath.Join(t.TempDir(), "outside")
	must.Succeed(t, os.WriteFile(outside, nil, 0o644))
	must.Succeed(t, os.Symlink(outside, filepath.Join(h.path, "snapshot-1/data/link")))
	must.Succeed(t, h.remove("snapshot-1"))
	if diff := cmp.Diff([]string{"snapshot-2"}, h.names()); diff != "" {
		t.Errorf("what is left (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(outside); err != nil {
		t.Errorf("what a link led to is gone: %v", err)
	}
	if err := h.remove("snapshot-1"); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("once more: %v, want ErrNotFound", err)
	}
}

func TestIn(t *testing.T) {
	h := aHarness(t)
	h.make("inside/deep", "elsewhere")
	must.Succeed(t, os.Symlink("inside", filepath.Join(h.path, "link")))
	pool := func(name string) *poolconfig.Config {
		return &poolconfig.Config{Path: h.path, SnapshotPath: filepath.Join(h.path, name)}
	}
	for name, c := range map[string]struct {
		config *poolconfig.Config
		found  bool
		err    error
	}{
		"none":                    {&poolconfig.Config{Path: h.path}, false, nil},
		"in the pool":             {pool("inside"), true, nil},
		"deep in the pool":        {pool("inside/deep"), true, nil},
		"not made yet":            {pool("missing"), false, nil},
		"a link in the pool":      {pool("link/deep"), false, dir.ErrNotDirectory},
		"elsewhere":               {&poolconfig.Config{Path: h.path + "/inside", SnapshotPath: h.path + "/elsewhere"}, true, nil},
		"elsewhere, by a link":    {&poolconfig.Config{Path: h.path + "/inside", SnapshotPath: h.path + "/link"}, true, nil},
		"elsewhere and not there": {&poolconfig.Config{Path: h.path + "/inside", SnapshotPath: h.path + "/missing"}, false, volume.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			in, err := upstream.In(h.dir, c.config)
			if in != nil {
				defer func() { _ = in.Close() }()
			}
			if (in != nil) != c.found || !errors.Is(err, c.err) {
				t.Errorf("found %v, %v; want %v, %v", in, err, c.found, c.err)
			}
		})
	}
}
