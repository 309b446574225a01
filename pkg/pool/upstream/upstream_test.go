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

// A place is a snapshotPath.
type place struct {
	*testing.T
	path string
	dir  *dir.Dir
}

func aPlace(t *testing.T) *place {
	t.Helper()
	p := &place{T: t, path: t.TempDir()}
	var err error
	p.dir, err = dir.Open(p.path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, p.dir.Close()) })
	return p
}

func (p *place) make(directories ...string) {
	p.Helper()
	for _, d := range directories {
		must.Succeed(p, os.MkdirAll(filepath.Join(p.path, d), 0o755))
	}
}

func (p *place) write(file string) {
	p.Helper()
	must.Succeed(p, os.WriteFile(filepath.Join(p.path, file), []byte(file), 0o644))
}

func (p *place) id(name string) volume.ID {
	p.Helper()
	id := must.Value(volume.ParseSnapshot(name))(p)
	return id
}

// snapshot is one as the upstream driver leaves it: CreateSnapshot of pkg/hostpath/reflink.go in kubevirt/hostpath-provisioner v0.25.2.
func (p *place) snapshot(name, of string) {
	p.Helper()
	p.make(filepath.Join(name, of), filepath.Join(name, "data", "sub"))
	p.write(filepath.Join(name, "data", "disk.img"))
}

func (p *place) names() []string {
	p.Helper()
	entries := must.Value(os.ReadDir(p.path))(p)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func (p *place) remove(name string) error {
	return upstream.Remove(p.Context(), p.dir, p.id(name), func(ctx context.Context) error { return ctx.Err() })
}

func TestList(t *testing.T) {
	p := aPlace(t)
	p.snapshot("snapshot-2", "pvc-1")
	p.snapshot("snapshot-1", "pvc-1")
	p.make(".removed-snapshot-3", "lost+found", ".hidden")
	p.write("file")
	must.Succeed(t, os.Symlink("snapshot-1", filepath.Join(p.path, "link")))
	all := must.Value(upstream.List(p.dir))(t)
	var names []string
	for _, id := range all {
		names = append(names, id.String())
	}
	if diff := cmp.Diff([]string{"~snapshot-1", "~snapshot-2"}, names); diff != "" {
		t.Errorf("other snapshots are listed (-want +got):\n%s", diff)
	}
}

func TestOpen(t *testing.T) {
	p := aPlace(t)
	p.snapshot("snapshot-1", "pvc-1")
	s, data, err := upstream.Open(p.dir, p.id("snapshot-1"))
	must.Succeed(t, err)
	defer func() { _ = data.Close() }()
	if s.Source.String() != "pvc-1" || s.ID != p.id("snapshot-1") || s.Made.IsZero() {
		t.Errorf("the snapshot is %+v", s)
	}
	if there, err := data.Exists("disk.img"); err != nil || !there {
		t.Errorf("its content is missing (%v)", err)
	}
	if _, err := upstream.Read(p.dir, p.id("snapshot-9")); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("a missing snapshot: %v, want ErrNotFound", err)
	}
	must.Succeed(t, os.Symlink("snapshot-1", filepath.Join(p.path, "link")))
	if _, err := upstream.Read(p.dir, p.id("link")); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("a link: %v, want ErrNotFound", err)
	}
}

// odd are directories that are not what the upstream driver leaves when it is done.
var odd = map[string]struct {
	make func(p *place)
	// is what Open answers, and removable whether Remove removes it.
	is        error
	removable bool
}{
	"nothing in it yet":     {func(p *place) { p.make("s") }, volume.ErrDamagedRecord, true},
	"without data":          {func(p *place) { p.make("s/pvc-1") }, volume.ErrDamagedRecord, true},
	"data alone":            {func(p *place) { p.make("s/data/sub") }, volume.ErrDamagedRecord, true},
	"two volumes":           {func(p *place) { p.make("s/data", "s/pvc-1", "s/pvc-2") }, volume.ErrPrecondition, false},
	"a volume with content": {func(p *place) { p.make("s/data", "s/pvc-1/more") }, volume.ErrPrecondition, false},
	"a file beside":         {func(p *place) { p.make("s/data", "s/pvc-1"); p.write("s/notes") }, volume.ErrPrecondition, false},
	"a name of no volume":   {func(p *place) { p.make("s/data", "s/.pvc") }, volume.ErrPrecondition, false},
	"data that is a file":   {func(p *place) { p.make("s/pvc-1"); p.write("s/data") }, volume.ErrPrecondition, false},
	"data that leads out":   {func(p *place) { p.make("s/pvc-1"); must.Succeed(p, os.Symlink("/", filepath.Join(p.path, "s/data"))) }, volume.ErrPrecondition, false},
	"a volume that is a link": {func(p *place) {
		p.make("s/data")
		must.Succeed(p, os.Symlink("/etc", filepath.Join(p.path, "s/pvc-1")))
	}, volume.ErrPrecondition, false},
}

func TestOddDirectories(t *testing.T) {
	for name, c := range odd {
		t.Run(name, func(t *testing.T) {
			p := aPlace(t)
			c.make(p)
			if _, err := upstream.Read(p.dir, p.id("s")); !errors.Is(err, c.is) {
				t.Errorf("reading it: %v, want %v", err, c.is)
			}
			err := p.remove("s")
			if left := len(p.names()) > 0; left == c.removable || (err == nil) != c.removable {
				t.Errorf("removing it: %v, and %q is left", err, p.names())
			}
			if !c.removable && !errors.Is(err, volume.ErrPrecondition) {
				t.Errorf("removing it: %v, want ErrPrecondition", err)
			}
		})
	}
}

func TestRemove(t *testing.T) {
	p := aPlace(t)
	p.snapshot("snapshot-1", "pvc-1")
	p.snapshot("snapshot-2", "pvc-1")
	outside := filepath.Join(t.TempDir(), "outside")
	must.Succeed(t, os.WriteFile(outside, nil, 0o644))
	must.Succeed(t, os.Symlink(outside, filepath.Join(p.path, "snapshot-1/data/link")))
	must.Succeed(t, p.remove("snapshot-1"))
	if diff := cmp.Diff([]string{"snapshot-2"}, p.names()); diff != "" {
		t.Errorf("what is left (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(outside); err != nil {
		t.Errorf("what a link led to is gone: %v", err)
	}
	if err := p.remove("snapshot-1"); !errors.Is(err, volume.ErrNotFound) {
		t.Errorf("once more: %v, want ErrNotFound", err)
	}
}

func TestIn(t *testing.T) {
	p := aPlace(t)
	p.make("inside/deep", "elsewhere")
	must.Succeed(t, os.Symlink("inside", filepath.Join(p.path, "link")))
	pool := func(name string) *poolconfig.Config {
		return &poolconfig.Config{Path: p.path, SnapshotPath: filepath.Join(p.path, name)}
	}
	for name, c := range map[string]struct {
		config *poolconfig.Config
		found  bool
		err    error
	}{
		"none":                    {&poolconfig.Config{Path: p.path}, false, nil},
		"in the pool":             {pool("inside"), true, nil},
		"deep in the pool":        {pool("inside/deep"), true, nil},
		"not made yet":            {pool("missing"), false, nil},
		"a link in the pool":      {pool("link/deep"), false, dir.ErrNotDirectory},
		"elsewhere":               {&poolconfig.Config{Path: p.path + "/inside", SnapshotPath: p.path + "/elsewhere"}, true, nil},
		"elsewhere, by a link":    {&poolconfig.Config{Path: p.path + "/inside", SnapshotPath: p.path + "/link"}, true, nil},
		"elsewhere and not there": {&poolconfig.Config{Path: p.path + "/inside", SnapshotPath: p.path + "/missing"}, false, volume.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			in, err := upstream.In(p.dir, c.config)
			if in != nil {
				defer func() { _ = in.Close() }()
			}
			if (in != nil) != c.found || !errors.Is(err, c.err) {
				t.Errorf("found %v, %v; want %v, %v", in, err, c.found, c.err)
			}
		})
	}
}
