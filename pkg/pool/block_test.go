package pool_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const thin = `[{"name":"local","path":"pool","allocation":"thin"}]`

func (h *harness) tryCreateBlock(name string, bytes int64) (pool.Volume, error) {
	return h.Create(h.t.Context(), pool.Request{ID: id(h.t, name), Mode: volume.ModeBlock, Range: volume.Range{Required: bytes}})
}

func (h *harness) createBlock(name string, bytes int64) pool.Volume {
	h.t.Helper()
	v := must.Value(h.tryCreateBlock(name, bytes))(h.t)
	return v
}

func (h *harness) publishBlock(name, target string, change ...func(*pool.Publication)) error {
	p := pool.Publication{ID: id(h.t, name), Target: h.Target(target), Mode: volume.ModeBlock}
	for _, c := range change {
		c(&p)
	}
	return h.Publications().Publish(h.t.Context(), p)
}

func readOnly(p *pool.Publication)  { p.ReadOnly = true }
func singleUse(p *pool.Publication) { p.SingleTarget = true }

// attached are the devices there are, which a test expects to be so many.
func (h *harness) attached(want int) []loop.Device {
	h.t.Helper()
	devices := must.Value(h.Loops.Attached())(h.t)
	if len(devices) != want {
		h.t.Errorf("%d devices are attached (%+v), want %d", len(devices), devices, want)
	}
	return devices
}

func (h *harness) disk(name string) *loop.File {
	h.t.Helper()
	f := must.Value(loop.Open(h.open(name), "disk.img"))(h.t)
	h.t.Cleanup(func() { must.Succeed(h.t, f.Close()) })
	return f
}

func (h *harness) stat(name string) *syscall.Stat_t {
	h.t.Helper()
	var st syscall.Stat_t
	must.Succeed(h.t, syscall.Stat(h.Path("pool", name, "disk.img"), &st))
	return &st
}

func TestSingleTargetBlockVolume(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		for range 2 {
			must.Succeed(t, h.publishBlock("pvc-1", "a", singleUse))
		}
		wantError(t, h.publishBlock("pvc-1", "b", singleUse), volume.ErrInUse)
		// Kubelet mounts the node once more for itself.
		must.Succeed(t, h.Mounts.PublishDevice(h.Dev, h.attached(1)[0].Name, h.Target("kubelet")))
		must.Succeed(t, h.publishBlock("pvc-1", "a", singleUse))
		wantError(t, h.publishBlock("pvc-1", "b", singleUse), volume.ErrInUse)
		must.Succeed(t, h.Mounts.Unpublish(h.Target("kubelet"), nil))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.attached(0)
	})
}

// fourDevices makes volumes whose devices are published, attached, held open by a process until release, and attached by
// another process.
func (h *harness) fourDevices(readOnly bool) (release func(), foreign loop.Device) {
	h.t.Helper()
	for _, name := range []string{"published", "attached", "held", "foreign"} {
		h.createBlock(name, mib)
	}
	must.Succeed(h.t, h.publishBlock("published", "a"))
	_, err := h.Loops.Attach(h.disk("attached"), loop.Options{})
	must.Succeed(h.t, err)
	held, err := h.Loops.Attach(h.disk("held"), loop.Options{})
	must.Succeed(h.t, err)
	release, err = h.Loops.Hold(held.Name)
	must.Succeed(h.t, err)
	foreign, err = h.Loops.AttachForeign(h.disk("foreign"), readOnly)
	must.Succeed(h.t, err)
	return release, foreign
}

// As the upstream driver leaves it, which removes the directory and knows of no device.
func TestDeviceOnDeletedFileIsDetached(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		release, foreign := h.fourDevices(false)
		must.Succeed(t, h.Close(t.Context()))
		for _, name := range []string{"published", "attached", "held", "foreign"} {
			must.Succeed(t, os.RemoveAll(h.Path("pool", name)))
			must.Succeed(t, os.Remove(h.Own("volumes", name+".json")))
		}
		h.start(local)
		h.attached(3)
		release()
		h.later(time.Minute)
		h.attached(2)
		must.Succeed(t, h.unpublish("published", "a"))
		h.later(time.Minute)
		if left := h.attached(1); left[0].Name != foreign.Name {
			t.Errorf("%+v is left, want the device that another process attached", left)
		}
		must.Succeed(t, h.Loops.End(foreign.Name))
	})
}

func TestUnpublishBlockVolumeAfterRestoreFromBackup(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		must.Succeed(t, os.Rename(h.Path("pool", "pvc-1"), h.Path("broken")))
		must.Succeed(t, os.CopyFS(h.Path("pool", "pvc-1"), os.DirFS(h.Path("broken"))))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.attached(0)
		wantGone(t, h.Path("pods", "a"))
	})
}

// What a volume is cannot be read from its record then, but from its device.
func TestBlockVolumeWithBadRecordIsInUse(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, record string){
		"the record is damaged": func(t *testing.T, record string) { must.Succeed(t, os.Truncate(record, 20)) },
		"the record is gone":    func(t *testing.T, record string) { must.Succeed(t, os.Remove(record)) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, h *harness) {
				h.createBlock("pvc-1", mib)
				h.createBlock("pvc-2", mib)
				must.Succeed(t, h.publishBlock("pvc-1", "a"))
				change(t, h.Own("volumes", "pvc-1.json"))
				for range 2 {
					wantError(t, h.Delete(t.Context(), id(t, "pvc-1")), volume.ErrInUse)
					wantError(t, h.unpublish("pvc-2", "a"), volume.ErrInUse)
					if v := h.volume("pvc-1"); len(v.Nodes) != 1 {
						t.Errorf("the volume is published on %v, want this node", v.Nodes)
					}
					if page, _ := h.List(t.Context(), volume.ID{}, 1); len(page[0].Nodes) != 1 {
						t.Errorf("list %+v, want the volume published on this node", page)
					}
					if _, err := h.Publications().Stats(t.Context(), id(t, "pvc-1"), h.Target("a")); err != nil {
						t.Error(err)
					}
					h.restart(local)
				}
				must.Succeed(t, h.unpublish("pvc-1", "a"))
				h.attached(0)
				h.delete("pvc-1")
				h.delete("pvc-2")
				h.wantClean()
			})
		})
	}
}

func TestDeviceOfDamagedRecordIsDetachedAfterCrash(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		must.Succeed(t, must.Err(h.Loops.Attach(h.disk("pvc-1"), loop.Options{})))
		must.Succeed(t, os.Truncate(h.Own("volumes", "pvc-1.json"), 20))
		h.restart(local)
		h.attached(0)
	})
}

// A crash came after the file had grown, and before its record was written: in a pool
// that has not as much free again.
func TestInterruptedExpandIsFinishedAtStart(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.Tmpfs(t, 100*mib), local, func(t *testing.T, h *harness, _ *faulty) {
		h.createBlock("pvc-1", 10*mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		must.Succeed(t, h.disk("pvc-1").Grow(t.Context(), 70*mib, loop.Thick))
		h.restart(local)
		if v := h.volume("pvc-1"); v.Bytes != 70*mib || v.Condition.Abnormal || h.limitOf("pvc-1") < 70*mib {
			t.Errorf("volume %+v under a limit of %d, want 70 MiB in order", v, h.limitOf("pvc-1"))
		}
		if device := h.attached(1)[0]; device.SizeBytes != 70*mib {
			t.Errorf("the device has %d bytes, want 70 MiB", device.SizeBytes)
		}
		if got := h.capacity(); got > 30*mib {
			t.Errorf("capacity %d, want 30 MiB at most", got)
		}
		bytes, err := h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), volume.ModeBlock, volume.Range{Required: 70 * mib})
		must.Succeed(t, err)
		if bytes != 70*mib {
			t.Errorf("expanded to %d, want 70 MiB", bytes)
		}
		h.wantClean()
	})
}

func TestExpandBeyondFreeSpaceChangesNothing(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.Tmpfs(t, 64*mib), local, func(t *testing.T, h *harness, f *faulty) {
		h.createBlock("pvc-1", 10*mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		// Others take what is free between the check and the allocation.
		fill := func() { must.Succeed(t, os.WriteFile(h.Path("filler"), make([]byte, 30*mib), 0o600)) }
		f.meanwhile.Store(&fill)
		_, err := h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), volume.ModeBlock, volume.Range{Required: 40 * mib})
		wantError(t, err, volume.ErrNoSpace)
		h.wantUnchanged("pvc-1", 10*mib)
	})
}

func TestExpandKeepsFileWhenLimitFails(t *testing.T) {
	withFaults(t, local, func(t *testing.T, h *harness, f *faulty) {
		h.createBlock("pvc-1", 10*mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		f.failBefore.Store(true)
		_, err := h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), volume.ModeBlock, volume.Range{Required: 20 * mib})
		wantError(t, err, errFault)
		f.failBefore.Store(false)
		h.wantUnchanged("pvc-1", 10*mib)
	})
}

func TestExpandIsUndoneWhenRecordFails(t *testing.T) {
	testenv.NeedRoot(t)
	withFaultsAt(t, testenv.Tmpfs(t, 64*mib), local, func(t *testing.T, h *harness, _ *faulty) {
		h.createBlock("pvc-1", 10*mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		expand := func(bytes int64) error {
			return must.Err(h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), volume.ModeBlock, volume.Range{Required: bytes}))
		}
		// All that is free, so that the record finds no room.
		err := expand(64 * mib)
		for bytes := int64(64 * mib); errors.Is(err, volume.ErrCannotGrow) && !errors.Is(err, volume.ErrNoSpace) && bytes > 10*mib; bytes -= 4096 {
			err = expand(bytes)
		}
		wantError(t, err, volume.ErrNoSpace)
		wantError(t, err, volume.ErrCannotGrow)
		h.wantUnchanged("pvc-1", 10*mib)
		must.Succeed(t, expand(12*mib))
		h.wantUnchanged("pvc-1", 12*mib)
	})
}

// The file is larger than its record, from a growth that could not be taken back, and
// what is beyond is in use by now: none of it may be cut off.
func TestExpandIsUndoneToPreviousFileSize(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", 10*mib)
		must.Succeed(t, h.disk("pvc-1").Grow(t.Context(), 20*mib, loop.Thick))
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		// The record cannot be written.
		must.Succeed(t, os.MkdirAll(h.Own("volumes", ".new-pvc-1.json", "in the way"), 0o700))
		_, err := h.Expand(t.Context(), id(t, "pvc-1"), h.Target("a"), volume.ModeBlock, volume.Range{Required: 30 * mib})
		if err == nil {
			t.Error("grew without a record")
		}
		if st := h.stat("pvc-1"); st.Size != 20*mib {
			t.Errorf("the file has %d bytes, want the 20 MiB that its device has", st.Size)
		}
	})
}

// wantUnchanged expects file, device and promise to have that size.
func (h *harness) wantUnchanged(name string, bytes int64) {
	h.t.Helper()
	if st := h.stat(name); st.Size != bytes {
		h.t.Errorf("the file has %d bytes, want %d", st.Size, bytes)
	}
	if device := h.attached(1)[0]; device.SizeBytes != bytes {
		h.t.Errorf("the device has %d bytes, want %d", device.SizeBytes, bytes)
	}
	if v := h.volume(name); v.Bytes != bytes || v.Condition.Abnormal {
		h.t.Errorf("volume %+v, want %d bytes in order", v, bytes)
	}
	h.wantClean()
}

// A volume of the upstream KubeVirt driver is its user's, and so is what he calls a disk.
func TestDiskFileOfUserIsIgnored(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		for i, makeEntry := range []func(string) error{
			func(path string) error { return os.Symlink("/etc/passwd", path) },
			func(path string) error { return syscall.Mkfifo(path, 0o600) },
			func(path string) error { return os.Mkdir(path, 0o700) },
			func(path string) error { return syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0) },
		} {
			name := fmt.Sprintf("old-%d", i)
			must.Succeed(t, os.Mkdir(h.Path("pool", name), 0o777))
			must.Succeed(t, makeEntry(h.Path("pool", name, "disk.img")))
			must.Succeed(t, h.publish(name, "a"))
			must.Succeed(t, h.unpublish(name, "a"))
			h.delete(name)
		}
		h.wantClean()
	})
}

// A pod can have a device that only reads show another file of its own (LOOP_CHANGE_FD), also one that has the name of a disk
// in a directory without a record.
func TestUnpublishDeviceThatShowsFileOfDirectory(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a", readOnly))
		must.Succeed(t, os.Mkdir(h.Path("pool", "old"), 0o777))
		must.Succeed(t, os.WriteFile(h.Path("pool", "old", "disk.img"), make([]byte, mib), 0o600))
		must.Succeed(t, h.publish("old", "b"))
		published := h.attached(1)[0]
		must.Succeed(t, h.Loops.End(published.Name))
		changed := must.Value(h.Loops.Attach(h.disk("old"), loop.Options{ReadOnly: true}))(t)
		if changed.Name != published.Name {
			t.Fatalf("the file is on %s, want %s", changed.Name, published.Name)
		}
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.attached(0)
	})
}

func TestUnpublishKeepsReadOnlyDeviceOfVolumeWithBadRecord(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a", readOnly))
		must.Succeed(t, os.Truncate(h.Own("volumes", "pvc-1.json"), 10))
		h.restart(local)
		wantError(t, h.unpublish("pvc-2", "a"), volume.ErrInUse)
		h.attached(1)
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		h.attached(0)
	})
}

func TestBlockVolumeLimitIncludesMetadata(t *testing.T) {
	withQuota(t, "", func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", 64*mib)
		want := int64(69 * mib)
		if h.Quota.Kind() == quota.Btrfs { // which keeps what was discarded
			want += 64 * mib
		}
		if got := h.limitOf("pvc-1"); got != want {
			t.Errorf("the limit is %d, want %d", got, want)
		}
	})
}

// dead is what a loop device answers whose filesystem was shut down.
type dead struct{ *looptest.Fake }

func (dead) Inspect(string) (loop.Device, error) { return loop.Device{}, syscall.EIO }

func TestUnpublishOnDeadFilesystem(t *testing.T) {
	inBubble(t, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		h.devices = dead{h.Loops}
		h.restart(local)
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		wantGone(t, h.Path("pods", "a"))
	})
}

// silent has one more device, which does not answer.
type silent struct {
	*looptest.Fake
	path string
}

func (s *silent) Attached(fileNames ...string) ([]loop.Device, error) {
	devices, err := s.Fake.Attached(fileNames...)
	return append(devices, loop.Device{Name: "loop99", Silent: true, FormerPath: s.path}), err
}

// mute are devices that cannot be asked for at all.
type mute struct{ *looptest.Fake }

func (mute) Attached(...string) ([]loop.Device, error) { return nil, syscall.EIO }

// What a device does not report says nothing of the volume: it may be anybody's, with its file
// on a filesystem that is dead.
func TestSilentDeviceIsNotAbnormal(t *testing.T) {
	for name, devices := range map[string]func(*looptest.Fake) pool.Devices{
		"one that does not answer":   func(f *looptest.Fake) pool.Devices { return &silent{Fake: f, path: "/elsewhere/pvc-1/disk.img"} },
		"none that can be asked for": func(f *looptest.Fake) pool.Devices { return mute{f} },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newHarness(t, t.TempDir())
				h.each = true
				h.start(local)
				h.createBlock("pvc-1", mib)
				must.Succeed(t, h.publishBlock("pvc-1", "a"))
				h.devices = devices(h.Loops)
				h.restart(local)
				for call, condition := range h.conditions("pvc-1", "a") {
					if diff := cmp.Diff(health.Condition{Message: "in order"}, condition); diff != "" {
						t.Errorf("the condition by %s (-want +got):\n%s", call, diff)
					}
				}
			})
		})
	}
}

// conditions is how a volume is, by all calls that report it.
func (h *harness) conditions(name, target string) map[string]health.Condition {
	h.t.Helper()
	page, _ := h.List(h.t.Context(), volume.ID{}, 2)
	stats := must.Value(h.Publications().Stats(h.t.Context(), id(h.t, name), h.Target(target)))(h.t)
	surveyed := h.Surveyed()
	if len(page) != 1 || len(surveyed) != 1 {
		h.t.Fatalf("listed are %+v, surveyed %+v; want one volume", page, surveyed)
	}
	return map[string]health.Condition{
		"Volume":   h.volume(name).Condition,
		"List":     page[0].Condition,
		"Stats":    stats.Condition,
		"Surveyed": surveyed[0].Condition,
		"inspect":  h.seen(local),
	}
}

func TestSilentDeviceCountsForItsVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.devices = &silent{Fake: h.Loops, path: "/elsewhere/pvc-1/disk.img"}
		h.start(local)
		for name, want := range map[string]error{"pvc-1": volume.ErrUnavailable, "pvc-2": nil} {
			_, err := h.Create(t.Context(), pool.Request{ID: id(t, name), Mode: volume.ModeBlock, Range: volume.Range{Required: mib}})
			must.Succeed(t, err)
			if err := h.Delete(t.Context(), id(t, name)); !errors.Is(err, want) {
				t.Errorf("deleting %s: %v, want %v", name, err, want)
			}
		}
	})
}

// Whether a volume of a shared pool is still published cannot be known then: its mark stays, and
// keeps no pool away and no pod.
func TestSilentDeviceKeepsPublishedMark(t *testing.T) {
	const shared = `[{"name":"local","path":"pool","shared":true}]`
	onPools(t, shared, func(t *testing.T, h *harness) {
		h.createBlock("pvc-1", mib)
		h.create("pvc-2", mib)
		must.Succeed(t, h.publishBlock("pvc-1", "a"))
		must.Succeed(t, h.Mounts.Unpublish(h.Target("a"), nil)) // as a node that was started again
		h.devices = &silent{Fake: h.Loops, path: "/elsewhere/pvc-1/disk.img"}
		h.restart(shared)
		must.Succeed(t, h.publish("pvc-2", "b"))
		must.Succeed(t, h.unpublish("pvc-1", "a"))
		mark := h.Own("published", "node-1", "pvc-1")
		if _, err := os.Stat(mark); err != nil {
			t.Errorf("the mark is gone: %v", err)
		}
		h.devices = h.Loops
		h.restart(shared)
		if _, err := os.Stat(mark); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the mark is still there: %v", err)
		}
	})
}
