package pool_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// provisionerAndDriver are two processes with a pool each, and a volume of the first that goes to the second.
func provisionerAndDriver(t *testing.T) (provisioner, driver *bench, h pool.Handover) {
	root := t.TempDir()
	var sides []*bench
	for _, name := range []string{"provisioner", "driver"} {
		must(t, os.Mkdir(filepath.Join(root, name), 0o755))
		b := newBench(t, filepath.Join(root, name))
		b.start(`[{"name":"local","path":"pool"}]`)
		sides = append(sides, b)
	}
	sides[0].create("pvc-1", 10*mib)
	must(t, os.WriteFile(sides[0].path("pool", "pvc-1", "data"), []byte("kept"), 0o600))
	return sides[0], sides[1], pool.Handover{
		From: pool.Place{Directory: sides[0].path("pool"), Name: "pvc-1"},
		To:   pool.Place{Directory: sides[1].path("pool"), Name: "pvc-1"},
	}
}

// The processes that serve the two pools run meanwhile: one has the volume as soon as it is asked, with its promise,
// and counts the promise a minute later. The other one does not report it as lost.
func TestAHandoverIsNoticedByBothSides(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *bench) {
		provisioner, driver, h := provisionerAndDriver(t)
		must(t, h.Check())
		must(t, h.Move())
		must(t, h.Record(1))
		got, err := driver.Volume(t.Context(), id(t, "pvc-1"))
		if err != nil || got.Bytes != 10*mib {
			t.Errorf("%+v (%v)", got, err)
		}
		must(t, driver.publish("pvc-1", "a"))
		must(t, driver.unpublish("pvc-1", "a"))
		driver.later(time.Minute)
		driver.wantVolumes("pvc-1")
		provisioner.wantVolumes()
		if a, b := driver.Status()[0].Promised, provisioner.Status()[0].Promised; a != 10*mib || b != 0 {
			t.Errorf("the driver counts a promise of %d, the provisioner one of %d", a, b)
		}
		// And back.
		must(t, h.Reverse().Check())
		must(t, h.Reverse().Move())
		must(t, h.Reverse().Record(1))
		driver.later(time.Minute)
		provisioner.wantVolumes("pvc-1")
		driver.wantVolumes()
		provisioner.delete("pvc-1")
	})
}

// A handover is ended between any two of its changes to the disk, and what was done last is repeated.
func TestAHandoverIsRepeated(t *testing.T) {
	sides := func(t *testing.T, h pool.Handover) (from, to *store.Side) {
		t.Helper()
		from, err := store.OpenSide(h.From.Directory)
		must(t, err)
		t.Cleanup(from.Close)
		to, err = store.OpenSide(h.To.Directory)
		must(t, err)
		t.Cleanup(to.Close)
		return from, to
	}
	for title, begin := range map[string]func(from, to *store.Side) error{
		"renamed": func(from, to *store.Side) error { return from.Root().Rename("pvc-1", to.Root(), "pvc-1") },
		"renamed, and two records": func(from, to *store.Side) error {
			if err := to.Take(from, "pvc-1", "pvc-1"); err != nil {
				return err
			}
			return to.KeepRecord(from, "pvc-1", "pvc-1", 1)
		},
	} {
		t.Run(title, func(t *testing.T) {
			inBubble(t, func(t *testing.T, _ *bench) {
				provisioner, driver, h := provisionerAndDriver(t)
				must(t, begin(sides(t, h)))
				w, err := h.Find()
				if err != nil || w.From.Directory || !w.To.Directory || !w.From.Recorded {
					t.Errorf("%+v (%v)", w, err)
				}
				must(t, h.Record(1))
				w, err = h.Find()
				if want := (pool.Whereabouts{To: pool.Presence{Directory: true, Recorded: true, Bytes: 10 * mib}}); err != nil || w != want {
					t.Errorf("%+v (%v), want %+v", w, err, want)
				}
				must(t, provisioner.Close(t.Context()))
				must(t, driver.Close(t.Context()))
			})
		})
	}
}

func TestAHandoverIsCheckedBeforeItBegins(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *bench) {
		_, driver, h := provisionerAndDriver(t)
		for title, change := range map[string]func(h *pool.Handover){
			"no directory": func(h *pool.Handover) { h.From.Name = "pvc-2" },
			"no pool":      func(h *pool.Handover) { h.To.Directory = driver.path("dev") },
			"no id":        func(h *pool.Handover) { h.To.Name = ".hidden" },
			"two mounts":   func(h *pool.Handover) { h.From = pool.Place{Directory: "/proc/self", Name: "task"} },
		} {
			wrong := h
			change(&wrong)
			if err := wrong.Check(); err == nil {
				t.Errorf("%s: nothing is wrong with %+v", title, wrong)
			}
		}
		must(t, os.Mkdir(driver.path("pool", "pvc-1"), 0o755))
		if err := h.Check(); err == nil {
			t.Error("a name that is taken is free")
		}
		must(t, os.WriteFile(driver.own("volumes", "pvc-1.json"), []byte("{"), 0o600))
		_, err := h.Find()
		wantError(t, err, volume.ErrDamagedRecord)
	})
}
