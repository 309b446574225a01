package store_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const promised = 10 << 20 // bytes

// poolToPool is the way of a volume from one pool to another. No driver serves them.
func poolToPool(t *testing.T) store.Handover {
	t.Helper()
	var pools []string
	for range 2 {
		path := t.TempDir()
		node, err := volume.ParseNodeID("node-1")
		must.Succeed(t, err)
		anything := func(*dir.Dir) error { return nil }
		s, _, err := store.Create(t.Context(), &store.Location{Path: path, Node: node, Verify: anything, Nested: anything})
		must.Succeed(t, err)
		t.Cleanup(s.Close)
		if len(pools) == 0 {
			id := must.Value(volume.ParseID("pvc-1"))(t)
			must.Succeed(t, s.Records().Write(store.NewRecord(id, volume.ModeMount, promised)))
			must.Succeed(t, os.Mkdir(filepath.Join(path, "pvc-1"), 0o755))
		}
		pools = append(pools, path)
	}
	return store.Handover{
		From: store.VolumePath{Directory: pools[0], Name: "pvc-1"},
		To:   store.VolumePath{Directory: pools[1], Name: "pvc-1"},
	}
}

// A handover is ended between any two of its changes to the disk, and what was done last is repeated.
func TestAHandoverIsRepeated(t *testing.T) {
	sides := func(t *testing.T, h store.Handover) (from, to *store.ParentDir) {
		t.Helper()
		from, err := store.OpenParentDir(h.From.Directory)
		must.Succeed(t, err)
		t.Cleanup(from.Close)
		to, err = store.OpenParentDir(h.To.Directory)
		must.Succeed(t, err)
		t.Cleanup(to.Close)
		return from, to
	}
	for title, begin := range map[string]func(from, to *store.ParentDir) error{
		"renamed": func(from, to *store.ParentDir) error { return from.Root().Rename("pvc-1", to.Root(), "pvc-1") },
		"renamed, and two records": func(from, to *store.ParentDir) error {
			if err := to.Take(from, "pvc-1", "pvc-1"); err != nil {
				return err
			}
			return to.KeepRecord(from, "pvc-1", "pvc-1", 1)
		},
	} {
		t.Run(title, func(t *testing.T) {
			h := poolToPool(t)
			must.Succeed(t, begin(sides(t, h)))
			w, err := h.Find()
			if err != nil || w.From.Directory || !w.To.Directory || !w.From.Recorded {
				t.Errorf("%+v (%v)", w, err)
			}
			must.Succeed(t, h.Record(1))
			w, err = h.Find()
			w.To.Created = time.Time{}
			if want := (store.Whereabouts{To: store.Presence{Directory: true, Recorded: true, Bytes: promised}}); err != nil || w != want {
				t.Errorf("%+v (%v), want %+v", w, err, want)
			}
		})
	}
}

func TestAHandoverIsCheckedBeforeItBegins(t *testing.T) {
	h := poolToPool(t)
	must.Succeed(t, h.Check())
	for title, change := range map[string]func(h *store.Handover){
		"no directory": func(h *store.Handover) { h.From.Name = "pvc-2" },
		"no pool":      func(h *store.Handover) { h.To.Directory = t.TempDir() },
		"no id":        func(h *store.Handover) { h.To.Name = ".hidden" },
		"two mounts":   func(h *store.Handover) { h.From = store.VolumePath{Directory: "/proc/self", Name: "task"} },
	} {
		wrong := h
		change(&wrong)
		if err := wrong.Check(); err == nil {
			t.Errorf("%s: nothing is wrong with %+v", title, wrong)
		}
	}
	must.Succeed(t, os.Mkdir(h.To.String(), 0o755))
	if err := h.Check(); err == nil {
		t.Error("a name that is taken is free")
	}
	must.Succeed(t, os.WriteFile(filepath.Join(h.To.Directory, store.OwnName, "volumes", "pvc-1.json"), []byte("{"), 0o600))
	_, err := h.Find()
	must.ErrorIs(t, err, volume.ErrDamagedRecord)
}

// rename(2) fails with EBUSY, when nothing of Kubernetes refers to the directory any more.
func TestMountPoint_isRefused(t *testing.T) {
	testenv.NeedRoot(t)
	h := poolToPool(t)
	must.Succeed(t, unix.Mount("none", h.From.String(), "tmpfs", 0, ""))
	defer func() { must.Succeed(t, unix.Unmount(h.From.String(), 0)) }()
	if err := h.Move(); err == nil {
		t.Error("a mount point can be renamed")
	}
	for _, check := range []func() error{h.Check, h.Movable} {
		if err := check(); err == nil || !strings.Contains(err.Error(), h.From.String()+" is a mount point") {
			t.Errorf("%v", err)
		}
	}
}
