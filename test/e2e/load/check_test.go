package load

import (
	"errors"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// check expects the driver, its metrics, the pools and the kernel to have what the clients
// got as answers, and nothing else. The clients make no calls meanwhile.
func (h *harness) check() {
	h.Helper()
	h.lap("all checked", func() {
		h.erased()
		metrics := h.scrape()
		var mounts []string
		for _, p := range h.pools {
			var kept []drivertest.Kept
			promised := int64(0)
			for _, v := range h.kept(p) {
				promised += v.Bytes
				kept = append(kept, v.Kept)
				for _, pod := range v.Pods {
					mounts = append(mounts, h.Target(pod))
				}
				if err := errors.Join(p.InOrder(v.Kept), h.content(p, v)); err != nil {
					h.Errorf("pool %s: %v", p.Name, err)
				}
			}
			if err := errors.Join(p.Holds(kept), p.Lists(kept), p.Unleaked(), p.AttachedOnly(kept)); err != nil {
				h.Errorf("pool %s: %v", p.Name, err)
			}
			if got := metrics[`hostpath_pool_promised_bytes{pool="`+p.Name+`"}`]; int64(got) != promised {
				h.Errorf("the pool %s promises %.0f bytes, want %d", p.Name, got, promised)
			}
		}
		got, err := mountns.Below(h.Targets)
		h.Must(err)
		slices.Sort(got)
		slices.Sort(mounts)
		if !slices.Equal(got, mounts) {
			h.Errorf("mounted are %q, want %q", got, mounts)
		}
		for series, value := range metrics {
			broken := strings.HasPrefix(series, "hostpath_csi_panics_total") || strings.HasPrefix(series, "hostpath_csi_call_duration_seconds_count") &&
				slices.ContainsFunc([]string{"Internal", "Unknown", "DeadlineExceeded"}, func(code string) bool { return strings.Contains(series, `code="`+code+`"`) })
			if broken && value > 0 {
				h.Errorf("%s is %.0f", series, value)
			}
		}
	})
	if h.Failed() {
		h.FailNow()
	}
}

// kept are the volumes that a pool should have.
func (h *harness) kept(p *drivertest.Pool) (all []*volume) {
	for _, c := range h.clients {
		for _, v := range c.volumes {
			if v.there && v.Pool == p.Name {
				all = append(all, v)
			}
		}
	}
	return all
}

// content expects a volume to hold what was written in it last.
func (h *harness) content(p *drivertest.Pool, v *volume) error {
	switch {
	case v.stamp == "":
		return nil
	case v.Block:
		return v.wantStamp(p.Image(v.ID))
	}
	return v.wantStamp(v.inside(p.Path + "/" + v.ID))
}
