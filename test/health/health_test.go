// Package health_test makes the volumes of a real driver ill, on real filesystems and disks,
// and hears what it says of them.
package health_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/testing/protocmp"

	"kubevirt.io/hostpath-provisioner/test/node"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/rotten"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib = 1 << 20
	// inTime is far above the 10 seconds after which a pool is looked at again.
	inTime = time.Minute
)

// A driver serves one pool.
type driver struct {
	*node.Node
	dir string // of targets
}

func start(t *testing.T, binary, pool string) *driver {
	t.Helper()
	n, err := node.Start(t.Context(), node.Config{
		Binary: binary, Name: "node-a", Version: "v1",
		Pools: []node.Pool{{Name: "local", Path: pool}},
		Flags: []string{"--metrics-address=127.0.0.1:0"},
	})
	must(t, err)
	t.Cleanup(func() { must(t, n.Close()) })
	return &driver{Node: n, dir: t.TempDir()}
}

func build(t *testing.T) string {
	t.Helper()
	binary, err := node.Binary(t.Context(), t.TempDir())
	must(t, err)
	return binary
}

func writer() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

func (d *driver) create(t *testing.T, id string, bytes int64) {
	t.Helper()
	_, err := csi.NewControllerClient(d.Conn()).CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: id, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}, VolumeCapabilities: []*csi.VolumeCapability{writer()},
	})
	must(t, err)
}

// publish publishes a volume until the test ends.
func (d *driver) publish(t *testing.T, id string) (target string) {
	t.Helper()
	target = filepath.Join(d.dir, id)
	client := csi.NewNodeClient(d.Conn())
	_, err := client.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, TargetPath: target, VolumeCapability: writer()})
	must(t, err)
	t.Cleanup(func() {
		_, err := client.NodeUnpublishVolume(context.WithoutCancel(t.Context()), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		must(t, err)
	})
	return target
}

// condition is what all calls say of a published volume, which has to be the same.
func (d *driver) condition(t *testing.T, id string) *csi.VolumeCondition {
	t.Helper()
	list, err := csi.NewControllerClient(d.Conn()).ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	var listed *csi.VolumeCondition
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() == id {
			listed = entry.GetStatus().GetVolumeCondition()
		}
	}
	if listed == nil {
		t.Fatalf("%s is not in the list, or without a condition: %v", id, list)
	}
	got, err := csi.NewControllerClient(d.Conn()).ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	must(t, err)
	stats, err := csi.NewNodeClient(d.Conn()).NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: filepath.Join(d.dir, id)})
	must(t, err)
	if diff := cmp.Diff(listed, got.GetStatus().GetVolumeCondition(), protocmp.Transform()); diff != "" {
		t.Errorf("ControllerGetVolume says something else of %s than ListVolumes (-list +get):\n%s", id, diff)
	}
	if diff := cmp.Diff(listed, stats.GetVolumeCondition(), protocmp.Transform()); diff != "" {
		t.Errorf("NodeGetVolumeStats says something else of %s than ListVolumes (-list +stats):\n%s", id, diff)
	}
	return listed
}

func (d *driver) wantCondition(t *testing.T, id string, abnormal bool, says string) {
	t.Helper()
	if got := d.condition(t, id); got.GetAbnormal() != abnormal || !strings.Contains(got.GetMessage(), says) {
		t.Errorf("the condition of %s is %v, want abnormal: %v, with the words %q", id, got, abnormal, says)
	}
}

// eventually waits until something is so.
func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), inTime)
	defer cancel()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for !so() {
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("%v went by without this: %s", inTime, what)
		}
	}
}

var metricsAddress = regexp.MustCompile(`Serving metrics" address="([^"]+)"`)

func (d *driver) scrape(t *testing.T) string {
	t.Helper()
	found := metricsAddress.FindStringSubmatch(d.Log())
	if found == nil {
		t.Fatalf("the log tells no address of the metrics:\n%s", d.Log())
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+found[1]+"/metrics", http.NoBody)
	must(t, err)
	response, err := transport.RoundTrip(request)
	must(t, err)
	body, err := io.ReadAll(response.Body)
	must(t, errors.Join(err, response.Body.Close()))
	return string(body)
}

func TestAVolumeThatIsIll(t *testing.T) {
	fs := testenv.CountingBtrfs(t, 256*mib)
	pool := filepath.Join(fs, "pool")
	d := start(t, build(t), pool)
	for _, id := range []string{"good", "lost", "torn", "full"} {
		d.create(t, id, 16*mib)
		d.publish(t, id)
		d.wantCondition(t, id, false, "in order")
	}
	must(t, os.Rename(filepath.Join(pool, "lost"), filepath.Join(fs, "aside")))
	d.wantCondition(t, "lost", true, "directory is missing")
	must(t, os.WriteFile(filepath.Join(pool, ".hostpath-provisioner/volumes/torn.json"), []byte("{"), 0o600))
	d.wantCondition(t, "torn", true, "record is unreadable")
	if err := os.WriteFile(filepath.Join(d.dir, "full", "data"), make([]byte, 17*mib), 0o600); !errors.Is(err, syscall.EDQUOT) && !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing more than the volume holds ends with %v", err)
	}
	syncFS(t, fs) // btrfs counts when it commits
	d.wantCondition(t, "full", true, "no space")
	d.wantCondition(t, "good", false, "in order")

	must(t, syscall.Mount("", fs, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	d.wantCondition(t, "good", true, "read-only")
	must(t, syscall.Mount("", fs, "", syscall.MS_REMOUNT, ""))
	d.wantCondition(t, "good", false, "in order")

	// The pool itself: what is asked from outside is the same, from memory.
	must(t, os.Rename(filepath.Join(pool, ".hostpath-provisioner"), filepath.Join(fs, "own")))
	d.wantCondition(t, "good", true, "pool does not serve")
	eventually(t, "the metrics say that all volumes are abnormal", func() bool {
		return strings.Contains(d.scrape(t), "hostpath_pool_abnormal_volumes{pool=\"local\",reason=\"pool_not_serving\"} 4\n")
	})
	must(t, os.Rename(filepath.Join(fs, "own"), filepath.Join(pool, ".hostpath-provisioner")))
	d.wantCondition(t, "good", false, "in order")
}

// What is wrong below the root of a volume is seen by nobody but its user, and by the
// filesystem, which counts it.
func TestAnErrorBelowTheRootOfAVolume(t *testing.T) {
	binary := build(t)
	for _, kind := range rotten.Kinds() {
		t.Run(kind, func(t *testing.T) {
			disk := rotten.New(t, kind)
			d := start(t, binary, filepath.Join(disk.Path, filepath.Dir(rotten.Volume)))
			volume := filepath.Base(rotten.Volume)
			d.publish(t, volume)
			d.wantCondition(t, volume, false, "in order")
			if scraped := d.scrape(t); !strings.Contains(scraped, "hostpath_pool_filesystem_errors{pool=\"local\"} 0\n") {
				t.Errorf("the metrics do not say that there are no errors yet:\n%s", scraped)
			}
			disk.Touch(t)
			eventually(t, "the volume is abnormal", func() bool { return d.condition(t, volume).GetAbnormal() })
			d.wantCondition(t, volume, true, "has counted")
			counted := regexp.MustCompile(`(?m)^hostpath_pool_filesystem_errors\{pool="local"\} [1-9]`)
			if scraped := d.scrape(t); !counted.MatchString(scraped) {
				t.Errorf("the metrics do not count the errors:\n%s", scraped)
			}
			if !strings.Contains(d.Log(), "has counted errors") {
				t.Errorf("the log does not tell the errors:\n%s", d.Log())
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func syncFS(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	must(t, errors.Join(unix.Syncfs(int(f.Fd())), f.Close()))
}
