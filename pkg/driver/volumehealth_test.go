package driver_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// often has what is wrong noticed at once.
func often(o *pool.Options) {
	o.CheckEvery, o.RetryEvery, o.SyncEvery = 20*time.Millisecond, 20*time.Millisecond, 20*time.Millisecond
}

// eventually waits until something is so.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.NewTimer(time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// entries are the statuses and reasons of a volume, such as "DATA_LOSS DirectoryMissing".
func entries(h *csi.VolumeHealth) string {
	var all []string
	for _, e := range h.GetHealthStatuses() {
		all = append(all, e.GetStatus().String()+" "+e.GetReason())
	}
	return strings.Join(all, ", ")
}

func (h *harness) nodeHealth(t *testing.T, id, path string) *csi.VolumeHealth {
	t.Helper()
	var response *csi.NodeGetVolumeHealthResponse
	eventually(t, "no other call is at work on "+id, func() bool {
		var err error
		response, err = h.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: path})
		if status.Code(err) == codes.Aborted {
			return false
		}
		must.Succeed(t, err)
		return true
	})
	wantEqual(t, "the id", response.GetVolumeHealth().GetVolumeId(), id)
	return response.GetVolumeHealth()
}

// ill lists the volumes that are not healthy, some at a time.
func (h *harness) ill(t *testing.T, most int32) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for token := ""; ; {
		page, err := h.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: most, StartingToken: token})
		must.Succeed(t, err)
		if most > 0 && len(page.GetEntries()) > int(most) {
			t.Errorf("a page has %d entries, want at most %d", len(page.GetEntries()), most)
		}
		for _, e := range page.GetEntries() {
			if _, twice := all[e.GetVolumeId()]; twice || len(e.GetHealthStatuses()) == 0 {
				t.Errorf("%s is listed twice: %v; or is healthy: %v", e.GetVolumeId(), twice, e)
			}
			all[e.GetVolumeId()] = entries(e)
		}
		if token = page.GetNextToken(); token == "" {
			return all
		}
	}
}

func TestGetVolumeHealthOfUnknownVolumes(t *testing.T) {
	h := newHarness(t, setup{})
	for name, ask := range map[string]func(id string) error{
		"ControllerGetVolumeHealth": func(id string) error {
			return must.Err(h.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: id}))
		},
		"NodeGetVolumeHealth": func(id string) error {
			return must.Err(h.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id}))
		},
	} {
		t.Run(name+" of one that is not there", func(t *testing.T) { wantCode(t, ask("pvc-1"), codes.NotFound, "pvc-1") })
	}
	_, err := h.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "pvc-1", VolumePublishPath: "relative"})
	wantCode(t, err, codes.InvalidArgument, "not absolute")
}

// A volume is there or is not, whether it is published or not.
func TestNodeGetVolumeHealthOfUnpublishedVolume(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool, options: often})
	h.create(t, "pvc-1", "other")
	for _, path := range []string{"", h.target("pvc-1")} {
		wantEqual(t, "while nothing is wrong", entries(h.nodeHealth(t, "pvc-1", path)), "")
	}
	must.Succeed(t, os.Rename(h.path("other", "pvc-1"), h.path("other", ".aside")))
	_, err := h.NodePublishVolume(t.Context(), publishRequest("pvc-1", h.target("pvc-1")))
	wantCode(t, err, codes.NotFound, "lost")
	for _, path := range []string{"", h.target("pvc-1")} {
		wantEqual(t, "without its directory", entries(h.nodeHealth(t, "pvc-1", path)), "DATA_LOSS DirectoryMissing")
	}
	must.Succeed(t, os.Rename(h.path("other", ".hostpath-provisioner"), h.path("other", ".own")))
	eventually(t, "the pool is missing", func() bool {
		return strings.HasPrefix(entries(h.nodeHealth(t, "pvc-1", "")), "INACCESSIBLE PoolMissing")
	})
	// One that was never seen may be in that pool. Only this node is asked to publish it.
	wantEqual(t, "a volume that may be in the pool", entries(h.nodeHealth(t, "pvc-2", "")), "INACCESSIBLE PoolMissing")
	_, err = h.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: "pvc-2"})
	wantCode(t, err, codes.Unavailable, "other")

	must.Succeed(t, os.Rename(h.path("other", ".own"), h.path("other", ".hostpath-provisioner")))
	must.Succeed(t, os.Rename(h.path("other", ".aside"), h.path("other", "pvc-1")))
	wantEqual(t, "when all is back", entries(h.nodeHealth(t, "pvc-1", "")), "")
}

// hungQuota does not answer while it has a channel that is open.
type hungQuota struct {
	quota.Facility
	until *atomic.Pointer[chan struct{}]
}

func (h hungQuota) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	if until := h.until.Load(); until != nil {
		<-*until
	}
	return h.Facility.Usage(d, id)
}

// The answer does not wait for the disk, and the next ones not at all.
func TestVolumeHealthWhileDiskHangs(t *testing.T) {
	hangs, until := make(chan struct{}), atomic.Pointer[chan struct{}]{}
	h := newHarness(t, setup{options: func(o *pool.Options) {
		o.HangAfter, o.CheckEvery, o.SyncEvery = 5*time.Second, time.Hour, time.Hour
		o.DetectQuota = func(*dir.Dir) (quota.Facility, error) { return hungQuota{&quotatest.Fake{}, &until}, nil }
	}})
	h.create(t, "pvc-1", "")
	until.Store(&hangs)
	defer close(hangs)
	for range 3 {
		wantEqual(t, "while the disk hangs", entries(h.nodeHealth(t, "pvc-1", "")), "INACCESSIBLE PoolHangs")
	}
}

func TestControllerListVolumeHealth(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool, options: often})
	for _, id := range []string{"pvc-1", "pvc-2", "pvc-3", "pvc-4", "pvc-5", "pvc-6"} {
		h.create(t, id, "other")
	}
	eventually(t, "all are healthy", func() bool { return len(h.ill(t, 0)) == 0 })
	lost := map[string]string{"pvc-1": "DATA_LOSS DirectoryMissing", "pvc-3": "DATA_LOSS DirectoryMissing", "pvc-6": "DATA_LOSS DirectoryMissing"}
	for id := range lost {
		must.Succeed(t, os.Rename(h.path("other", id), h.path("other", "."+id)))
	}
	eventually(t, "the lost ones are listed", func() bool { return len(h.ill(t, 0)) == len(lost) })
	for most := range int32(5) {
		wantEqual(t, "the volumes in pages", h.ill(t, most), lost)
	}
	// What is well again is not listed, also before the next survey.
	must.Succeed(t, os.Rename(h.path("other", ".pvc-3"), h.path("other", "pvc-3")))
	delete(lost, "pvc-3")
	wantEqual(t, "with one that is back", h.ill(t, 1), lost)

	must.Succeed(t, os.Rename(h.path("other", ".hostpath-provisioner"), h.path("other", ".own")))
	eventually(t, "all volumes of a pool that is missing are listed", func() bool { return len(h.ill(t, 4)) == 6 })

	_, err := h.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{StartingToken: "unknown"})
	wantCode(t, err, codes.Aborted)
	_, err = h.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument)
}

func TestNodeGetStorageHealth(t *testing.T) {
	h := newHarness(t, setup{
		pools:   `[{"name":"a","path":"a"},{"name":"b","path":"b"},{"name":"c","path":"c"}]`,
		options: func(o *pool.Options) { often(o); o.CountErrors = countIn("c") },
	})
	storage := func() []*csi.NodeGetStorageHealthResponse_StorageBackendHealth {
		response := must.Value(h.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{}))(t)
		return response.GetBackendHealth()
	}
	for _, in := range []string{"a", "b"} {
		must.Succeed(t, os.Rename(h.path(in, ".hostpath-provisioner"), h.path(in, ".own")))
	}
	eventually(t, "both pools are missing", func() bool {
		got := storage()
		return len(got) == 2 && strings.Contains(got[0].GetMessage(), `"a"`) && strings.Contains(got[0].GetMessage(), `"b"`)
	})
	got := storage()
	wantEqual(t, "the first status", got[0].GetStatus(), csi.StorageHealthErrorType_STORAGE_UNREACHABLE)
	wantEqual(t, "the first reason", got[0].GetReason(), string(health.PoolMissing))
	wantContains(t, got[0].GetMessage(), `pool "a"`, `pool "b"`)
	wantEqual(t, "the second status", got[1].GetStatus(), csi.StorageHealthErrorType_STORAGE_DEGRADED)
	wantEqual(t, "the second reason", got[1].GetReason(), string(health.FilesystemErrors))
	wantContains(t, got[1].GetMessage(), `pool "c"`, "2 errors")
	for _, in := range []string{"a", "b"} {
		must.Succeed(t, os.Rename(h.path(in, ".own"), h.path(in, ".hostpath-provisioner")))
	}
	eventually(t, "the pools are back", func() bool { return len(storage()) == 1 })
}

// countIn has the filesystem of one pool count errors.
func countIn(name string) func(*dir.Dir) (int64, error) {
	return func(d *dir.Dir) (int64, error) {
		if filepath.Base(d.String()) == name {
			return 2, nil
		}
		return 0, nil
	}
}
