package moves

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// The filesystem of the target is filled by others after the room was promised. The source is as it was, and the move goes on when there is
// room again.
func TestTargetFillsUp(t *testing.T) {
	h := newHarness(t, ways()[0], none)
	h.begin()
	state, err := h.from.moves.Call(t.Context(), moves.State, moves.Request{Volume: h.volume.ID})
	h.from.Must(err)
	_, err = h.to.moves.Call(t.Context(), moves.PrepareTarget, moves.Request{Volume: h.volume.ID, Move: "move-1", Peer: h.to.peer, Shape: state.Shape})
	h.to.Must(err)
	filler := filepath.Join(filepath.Dir(h.to.pool.Path), "filler")
	must.Succeed(t, fillUp(filler))
	in := h.start("move-in", "copy")
	if last := h.once("move-out", "copy"); last.Event != "failed" || !in.running() {
		t.Errorf("it ends with %+v", last)
	}
	h.from.Must(h.from.Publish(t.Context(), h.volume, "another"))
	h.unpublish(h.from, "another")
	in.kill()
	must.Succeed(t, os.Remove(filler))
	h.move()
	h.end()
}

// fillUp makes a file of all the space that a filesystem has.
func fillUp(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	end := int64(0)
	for step := int64(256 * mib); step >= 4096; {
		if unix.Fallocate(int(f.Fd()), 0, end, step) == nil {
			end += step
		} else {
			step /= 2
		}
	}
	return f.Close()
}

// A volume that has the name on the target stays as it is, and so does the source.
func TestNameIsTaken(t *testing.T) {
	h := newHarness(t, ways()[0], none)
	h.begin()
	other := drivertest.Volume{ID: h.volume.ID, Bytes: mib}
	_, err := h.to.Create(t.Context(), other)
	h.to.Must(err)
	in := h.start("move-in", "copy")
	if last := h.once("move-out", "copy"); last.Event != "failed" {
		t.Errorf("it ends with %+v", last)
	}
	in.kill()
	h.run("move-in", "abort")
	h.check(h.to, []drivertest.Kept{{Volume: other}})
	h.from.Must(h.from.Publish(t.Context(), h.volume, "another"))
	h.unpublish(h.from, "another")
	h.to.Must(h.to.Delete(t.Context(), other.ID))
	h.to.pool.AwaitErased()
	h.move()
	h.end()
}

// onFailing is a filesystem on a disk that can fail.
func onFailing(kind string, d **disk.Disk) place {
	return place{name: kind, mount: func(t *testing.T) string {
		t.Helper()
		image := must.Value(loopfs.Format(t.Context(), t.TempDir(), kind, 512*mib))(t)
		*d = disk.New(t, image, t.TempDir())
		at := t.TempDir()
		must.Succeed(t, os.Remove(image))
		(*d).Mount(t, at, kind)
		return at
	}}
}

// The disk of the target refuses a write, as one that is full behind its back, and is well again. The copy is on the disk before the source goes.
func TestDiskOfTargetRefusesAWrite(t *testing.T) {
	for _, from := range []place{onXFS, onExt4} {
		t.Run("from "+from.name, func(t *testing.T) {
			var d *disk.Disk
			h := newHarness(t, way{from, onFailing("xfs", &d), false}, none)
			h.begin()
			refused := bytes.Repeat([]byte("what is refused "), mib/16)
			h.from.Must(os.WriteFile(filepath.Join(h.from.Target("pod"), "refused"), refused, 0o600))
			d.RefuseWritesOf(refused[:64])
			in := h.start("move-in", "copy")
			out := h.start("move-out", "copy")
			for again := time.NewTicker(10 * time.Millisecond); out.running(); <-again.C {
				if out.says("waiting") {
					t.Fatalf("a copy is taken for whole that the disk refuses:\n%s", out.output())
				}
			}
			if last := out.last(); last.Event != "failed" || !strings.Contains(last.Error, "input/output error") {
				t.Errorf("it ends with %+v", last)
			}
			in.kill()
			d.Heal()
			h.move()
			copied := must.Value(os.Open(filepath.Join(h.to.pool.Path, h.volume.ID, "refused")))(t)
			must.Succeed(t, unix.Fadvise(int(copied.Fd()), 0, 0, unix.FADV_DONTNEED), copied.Close())
			if is := must.Value(os.ReadFile(copied.Name()))(t); !bytes.Equal(is, refused) {
				t.Errorf("the disk has %d of %d bytes of the file", len(is)-bytes.Count(is, []byte{0}), len(refused))
			}
			h.end()
		})
	}
}
