package load

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// check expects the driver, its metrics, the pools and the kernel to have what the clients
// got as answers, and nothing else. The clients make no calls meanwhile.
func (h *harness) check() {
	h.Helper()
	h.lap("all checked", func() {
		all := h.expected()
		for _, p := range h.places {
			h.AwaitNoTrash(p.Path)
		}
		h.checkListed(all)
		h.checkGone()
		h.checkMetrics(all)
		for _, p := range h.places {
			h.checkPool(p, all)
		}
		h.checkMounts(all)
	})
	if h.Failed() {
		h.FailNow()
	}
}

// expected are the volumes that there should be, by their ids. Of those that clients share
// the driver is asked, one by one.
func (h *harness) expected() map[string]*volume {
	h.Helper()
	all := make(map[string]*volume)
	for _, c := range h.clients {
		for _, v := range c.volumes {
			if v.there {
				all[v.ID] = v
			}
		}
	}
	mounted := h.mounts()
	for _, common := range h.common {
		v := &volume{Volume: common, pods: make(map[string]bool)}
		for _, c := range h.clients {
			if slices.Contains(mounted, c.Target(c.commonPod(common))) {
				v.pods[c.commonPod(common)] = false
			}
		}
		_, err := h.Get(h.Context(), v.ID)
		if v.there = err == nil; v.there {
			all[v.ID] = v
		}
		if status.Code(err) != codes.NotFound && err != nil || !v.there && len(v.pods) > 0 {
			h.Errorf("%s, which is mounted for %v: %v", v.ID, v.pods, err)
		}
	}
	return all
}

// list is all that the driver lists.
func (h *harness) list() []*csi.ListVolumesResponse_Entry {
	h.Helper()
	all, err := h.List(h.Context(), 999)
	h.Must(err)
	return all
}

// wantSame expects a list to be the one from before.
func (h *harness) wantSame(before, now []*csi.ListVolumesResponse_Entry) {
	h.Helper()
	if diff := cmp.Diff(before, now, protocmp.Transform()); diff != "" {
		h.Errorf("the list after a restart (-before +after):\n%.4000s", diff)
	}
}

// checkListed expects each volume to be listed once, as it is.
func (h *harness) checkListed(all map[string]*volume) {
	h.Helper()
	missing := maps.Clone(all)
	for _, e := range h.list() {
		at := e.GetVolume().GetVolumeId()
		v := missing[at]
		if v == nil {
			h.Errorf("%s is listed, and is not there or was listed before", at)
			continue
		}
		delete(missing, at)
		if err := errors.Join(h.clients[0].same(e.GetVolume(), v), v.sameStatus(e.GetStatus().GetPublishedNodeIds(), oldcsi.Condition(e.GetStatus()))); err != nil {
			h.Errorf("list: %v", err)
		}
	}
	for at := range missing {
		h.Errorf("%s is not listed", at)
	}
}

// checkGone expects what was deleted not to be there for those who ask for it by name.
func (h *harness) checkGone() {
	h.Helper()
	h.all(func(c *client, ctx context.Context) error {
		for _, v := range c.volumes {
			if v.there {
				continue
			}
			if _, err := c.Get(ctx, v.ID); status.Code(err) != codes.NotFound {
				return fmt.Errorf("get %s, which was deleted: %v", v.ID, err)
			}
		}
		return nil
	})()
}

// checkMetrics compares the sums, and expects no call to have failed within the driver.
func (h *harness) checkMetrics(all map[string]*volume) {
	h.Helper()
	got := h.scrape()
	for _, p := range h.places {
		volumes, promised := 0, int64(0)
		for _, v := range all {
			if v.Pool == p.Name {
				volumes++
				promised += v.Bytes
			}
		}
		for name, want := range map[string]int64{
			"serving": 1, "volumes": int64(volumes), "promised_bytes": promised, "trash_entries": 0, "trash_stuck_entries": 0, "limits_restored_total": 0,
		} {
			series := fmt.Sprintf(`hostpath_pool_%s{pool="%s"}`, name, p.Name)
			if value, ok := got[series]; !ok || int64(value) != want {
				h.Errorf("%s is %.0f, want %d", series, value, want)
			}
		}
	}
	for series, value := range got {
		broken := strings.HasPrefix(series, "hostpath_csi_panics_total") ||
			strings.HasPrefix(series, "hostpath_csi_call_duration_seconds_count") &&
				(strings.Contains(series, `code="Internal"`) || strings.Contains(series, `code="Unknown"`) || strings.Contains(series, `code="DeadlineExceeded"`))
		if broken && value > 0 {
			h.Errorf("%s is %.0f", series, value)
		}
	}
}

// checkPool expects a pool to have its volumes, in order and with what was written in them,
// and nothing that is half made or half removed.
func (h *harness) checkPool(p *place, all map[string]*volume) {
	h.Helper()
	var kept []drivertest.Kept
	devices := 0
	for _, v := range all {
		if v.Pool != p.Name {
			continue
		}
		kept = append(kept, drivertest.Kept{Volume: v.Volume, Pods: slices.Collect(maps.Keys(v.pods))})
		devices += v.devices()
	}
	problems := []error{p.Holds(kept)}
	for _, k := range kept {
		problems = append(problems, p.InOrder(k), h.content(p, all[k.ID]))
	}
	attached, err := p.Attached()
	if len(attached) != devices {
		problems = append(problems, fmt.Errorf("attached are %v, want %d devices", attached, devices))
	}
	if err := errors.Join(append(problems, err)...); err != nil {
		h.Errorf("pool %s: %v", p.Name, err)
	}
}

// devices is how many a volume has: one for those who write, and one for each that reads.
func (v *volume) devices() int {
	if !v.Block {
		return 0
	}
	readers := 0
	for _, readOnly := range v.pods {
		if readOnly {
			readers++
		}
	}
	return readers + min(1, len(v.pods)-readers)
}

// content expects a volume to hold what was written in it last.
func (h *harness) content(p *place, v *volume) error {
	if v.stamp == "" {
		return nil
	}
	if v.Block {
		return v.wantStamp(p.Image(v.ID))
	}
	return v.wantStamp(filepath.Join(p.Path, v.ID, "stamp"))
}

func (h *harness) mounts() []string {
	h.Helper()
	mounts, err := mountns.Below(h.Targets)
	h.Must(err)
	return mounts
}

// checkMounts expects one mount for each pod that has a volume.
func (h *harness) checkMounts(all map[string]*volume) {
	h.Helper()
	var want []string
	for _, v := range all {
		for pod := range v.pods {
			want = append(want, h.Target(pod))
		}
	}
	got := h.mounts()
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		h.Errorf("mounted (-want +got):\n%.2000s", diff)
	}
}

// wantNothingLeft expects a node without volumes to have nothing of them, and the kernel
// to forget all that it has limited.
func (h *harness) wantNothingLeft() {
	h.Helper()
	h.check()
	for _, p := range h.places {
		if p.kept() {
			h.lap("all forgotten in "+p.Name, func() { h.wantNoLimits(p) })
		}
	}
}

// wantNoLimits expects the kernel to keep no limit. Of btrfs it goes through all ids that
// subvolumes can have had: they are counted up from the first, and none is given twice.
func (h *harness) wantNoLimits(p *place) {
	h.Helper()
	const first = 256
	f, err := quota.Detect(p.root)
	h.Must(err)
	if f.Kind() != quota.Btrfs {
		h.Must(p.Unleaked())
		return
	}
	d, err := f.Make(p.root, "last")
	h.Must(err)
	last, err := f.IDOf(d)
	h.Must(errors.Join(err, d.Close(), p.root.RemoveDir("last")))
	for id := quota.ID(first); id <= last; id++ {
		h.Eventually(fmt.Sprintf("the kernel forgets the subvolume %d", id), func() bool {
			usage, err := f.Usage(p.root, id)
			h.Must(err)
			if usage.Limit == (quota.Limit{}) && usage.Bytes == 0 {
				return true
			}
			h.Must(p.Settle())
			return false
		})
	}
}
