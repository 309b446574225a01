// Package health_test makes the volumes of a real driver ill, on real filesystems and disks,
// and hears what it says of them.
package health_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/rotten"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// A harness is a driver with one pool.
type harness struct{ *drivertest.Driver }

func newHarness(t *testing.T, binary, pool string) *harness {
	t.Helper()
	return &harness{drivertest.Launch(t, drivertest.Config{
		Binary: binary, Pools: []drivertest.PoolConfig{{Name: "local", Path: pool}}, Flags: []string{drivertest.ServeMetrics},
	})}
}

// publish publishes a volume until the test ends.
func (h *harness) publish(id string) {
	h.Helper()
	h.Must(h.Publish(h.Context(), drivertest.Volume{ID: id}, id))
	h.Cleanup(func() { h.Must(h.Unpublish(context.WithoutCancel(h.Context()), id, id)) })
}

// conditions are what the calls say of a published volume.
func (h *harness) conditions(id string) map[string]*oldcsi.VolumeCondition {
	h.Helper()
	reported := make(map[string]*oldcsi.VolumeCondition)
	list, err := h.List(h.Context(), 0)
	h.Must(err)
	for _, entry := range list {
		if entry.GetVolume().GetVolumeId() == id {
			reported["ListVolumes"] = oldcsi.Condition(entry.GetStatus())
		}
	}
	got, err := h.Get(h.Context(), id)
	h.Must(err)
	reported["ControllerGetVolume"] = oldcsi.Condition(got.GetStatus())
	stats, err := h.Stats(h.Context(), id, id)
	h.Must(err)
	reported["NodeGetVolumeStats"] = oldcsi.Condition(stats)
	return reported
}

// wantCondition says that all calls say the same of a published volume.
func (h *harness) wantCondition(id string, abnormal bool, says string) {
	h.Helper()
	reported := h.conditions(id)
	for call, condition := range reported {
		if diff := cmp.Diff(reported["ListVolumes"], condition, protocmp.Transform()); diff != "" {
			h.Errorf("%s says something else of %s than ListVolumes (-list +call):\n%s", call, id, diff)
		}
		if condition.GetAbnormal() != abnormal || !strings.Contains(condition.GetMessage(), says) {
			h.Errorf("the condition of %s by %s is %v, want abnormal: %v, with the words %q", id, call, condition, abnormal, says)
		}
	}
}

func TestAbnormalVolume(t *testing.T) {
	fs := testenv.CountingBtrfs(t, 256*mib)
	pool := filepath.Join(fs, "pool")
	h := newHarness(t, drivertest.Built(t), pool)
	for _, id := range []string{"good", "lost", "torn", "full"} {
		h.MustCreate(drivertest.Volume{ID: id, Bytes: 16 * mib})
		h.publish(id)
		h.wantCondition(id, false, "in order")
	}
	must.Succeed(t, os.Rename(filepath.Join(pool, "lost"), filepath.Join(fs, "aside")))
	h.wantCondition("lost", true, "directory is missing")
	must.Succeed(t, os.WriteFile(filepath.Join(pool, ".hostpath-provisioner/volumes/torn.json"), []byte("{"), 0o600))
	h.wantCondition("torn", true, "record is unreadable")
	if err := os.WriteFile(filepath.Join(h.Target("full"), "data"), make([]byte, 17*mib), 0o600); !errors.Is(err, syscall.EDQUOT) && !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing more than the volume holds ends with %v", err)
	}
	syncFS(t, fs) // btrfs counts when it commits
	h.wantCondition("full", true, "no space")
	h.wantCondition("good", false, "in order")

	must.Succeed(t, syscall.Mount("", fs, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	h.wantCondition("good", true, "read-only")
	must.Succeed(t, syscall.Mount("", fs, "", syscall.MS_REMOUNT, ""))
	h.wantCondition("good", false, "in order")

	// The pool itself: what is asked from outside is the same, from memory.
	must.Succeed(t, os.Rename(filepath.Join(pool, ".hostpath-provisioner"), filepath.Join(fs, "own")))
	h.wantCondition("good", true, "pool does not serve")
	h.Eventually("the metrics say that all volumes are abnormal", func() bool {
		return strings.Contains(h.MustMetrics(), "hostpath_pool_abnormal_volumes{pool=\"local\",reason=\"PoolMissing\"} 4\n")
	})
	must.Succeed(t, os.Rename(filepath.Join(fs, "own"), filepath.Join(pool, ".hostpath-provisioner")))
	h.wantCondition("good", false, "in order")
}

// What is wrong below the root of a volume is seen by its user alone, and by the
// filesystem, which counts it.
func TestErrorBelowVolumeRoot(t *testing.T) {
	binary := drivertest.Built(t)
	for _, kind := range rotten.Kinds() {
		t.Run(kind, func(t *testing.T) {
			t.Parallel() // most of it is waiting for the next check
			disk := rotten.New(t, kind)
			h := newHarness(t, binary, filepath.Join(disk.Path, filepath.Dir(rotten.Volume)))
			volume := filepath.Base(rotten.Volume)
			h.publish(volume)
			h.wantCondition(volume, false, "in order")
			if scraped := h.MustMetrics(); !strings.Contains(scraped, "hostpath_pool_filesystem_errors{pool=\"local\"} 0\n") {
				t.Errorf("the metrics do not say that there are no errors yet:\n%s", scraped)
			}
			disk.Touch(t)
			// The pool may be checked between two of the calls.
			h.Eventually("all calls say that the volume is abnormal", func() bool {
				for _, condition := range h.conditions(volume) {
					if !condition.GetAbnormal() {
						return false
					}
				}
				return true
			})
			h.wantCondition(volume, true, "has counted")
			counted := regexp.MustCompile(`(?m)^hostpath_pool_filesystem_errors\{pool="local"\} [1-9]`)
			if scraped := h.MustMetrics(); !counted.MatchString(scraped) {
				t.Errorf("the metrics do not count the errors:\n%s", scraped)
			}
			if !strings.Contains(h.Process.Log(), "The pool's filesystem reports errors") {
				t.Errorf("the log does not report the errors:\n%s", h.Process.Log())
			}
		})
	}
}

// Since Linux 6.12 statfs(2) does not report it.
func TestErrorRemountsReadOnly(t *testing.T) {
	disk := rotten.New(t, "ext4", "errors=remount-ro")
	binary, pool := drivertest.Built(t), filepath.Join(disk.Path, filepath.Dir(rotten.Volume))
	h := newHarness(t, binary, pool)
	volume := filepath.Base(rotten.Volume)
	h.publish(volume)
	if scraped := h.MustMetrics(); !strings.Contains(scraped, "hostpath_pool_read_only{pool=\"local\"} 0\n") {
		t.Errorf("the metrics do not say that the pool can be written to:\n%s", scraped)
	}
	syncFS(t, pool) // what only the journal has is lost with it
	disk.Touch(t)
	h.Eventually("the pool has no room", func() bool {
		got := must.Value(h.Capacity(t.Context(), ""))(t)
		return got == 0
	})
	h.Eventually("all calls say that the volume is read-only", func() bool {
		for _, condition := range h.conditions(volume) {
			if !strings.Contains(condition.GetMessage(), "read-only") {
				return false
			}
		}
		return true
	})
	_, err := h.Create(t.Context(), drivertest.Volume{ID: "new"})
	if code := status.Code(err); code != codes.ResourceExhausted && code != codes.Unavailable {
		t.Errorf("a volume is made with the answer %v", err)
	}
	// The metric is of the last check of the pool, and the conditions of the calls.
	h.Eventually("the metrics say that the pool is read-only", func() bool {
		return strings.Contains(h.MustMetrics(), "hostpath_pool_read_only{pool=\"local\"} 1\n")
	})
	inspect := exec.CommandContext(t.Context(), binary, "inspect", `--datadir=[{"name":"local","path":"`+pool+`"}]`)
	report, _ := inspect.CombinedOutput() // it ends with 2, and the report has it
	if got := strings.Count(string(report), "ABNORMAL: the pool's filesystem is read-only"); got != 2 {
		t.Errorf("inspect says %d times that the filesystem is read-only, want it of the pool and of its volume:\n%s", got, report)
	}
}

func syncFS(t *testing.T, path string) {
	t.Helper()
	f := must.Value(os.Open(path))(t)
	must.Succeed(t, errors.Join(unix.Syncfs(int(f.Fd())), f.Close()))
}
