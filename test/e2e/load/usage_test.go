package load

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// A usage is what the driver's process has for itself while nothing is asked of it.
type usage struct {
	heap       float64 // bytes that the last round of the garbage collector left
	goroutines float64
	files      float64 // descriptors
	threads    float64
}

// scrape is what Prometheus gets, by name and labels.
func (h *harness) scrape() map[string]float64 {
	h.Helper()
	scraped, err := h.Scrape(h.Context(), h.scraper)
	h.Must(err)
	all := make(map[string]float64)
	for line := range strings.Lines(scraped) {
		line = strings.TrimSpace(line)
		space := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || space < 0 {
			continue
		}
		all[line[:space]], err = strconv.ParseFloat(line[space+1:], 64)
		h.Must(err)
	}
	return all
}

// settled measures a driver that has nothing to do: the least that it has in a time that
// the garbage collector needs for some rounds. Only what calls leave behind makes that
// more; what one of the checks of a pool holds for a moment, or the scrape, does not. The
// collector comes when enough is thrown away: pages of the list are.
func (h *harness) settled() usage {
	h.Helper()
	const (
		// Two rounds empty what is kept for another use, the third counts what is left.
		rounds = 3
		after  = 3
		// scrapes are enough to meet a moment in which no pool is checked.
		scrapes = 50
	)
	least := usage{math.Inf(1), math.Inf(1), math.Inf(1), math.Inf(1)}
	h.lap("measured", func() {
		first, seen := -1.0, 0
		h.Eventually("the garbage collector comes", func() bool {
			_, err := h.Controller().ListVolumes(h.Context(), &csi.ListVolumesRequest{MaxEntries: 50})
			h.Must(err)
			got := h.scrape()
			collected := got["go_gc_duration_seconds_count"]
			live, reported := got["go_gc_heap_live_bytes"]
			if !reported {
				h.Fatal("the metrics do not have what the last round left")
			}
			if first < 0 {
				first = collected
			}
			if collected < first+rounds {
				return false
			}
			least.lower(usage{
				heap:       live,
				goroutines: got["go_goroutines"],
				files:      got["process_open_fds"],
				threads:    got["go_threads"],
			})
			seen++
			return collected >= first+rounds+after && seen >= scrapes
		})
	})
	h.Logf("%v", least)
	return least
}

func (u *usage) lower(by usage) {
	u.heap = min(u.heap, by.heap)
	u.goroutines = min(u.goroutines, by.goroutines)
	u.files = min(u.files, by.files)
	u.threads = min(u.threads, by.threads)
}

// String formats it for people.
func (u usage) String() string {
	return fmt.Sprintf("heap %.1f MiB, %.0f goroutines, %.0f descriptors, %.0f threads", u.heap/mib, u.goroutines, u.files, u.threads)
}

// wantFlat compares two quiet times that have the same volumes.
func (h *harness) wantFlat(before, after usage) {
	h.Helper()
	// A call that leaves a descriptor leaves it for ever.
	if after.files > before.files {
		h.Errorf("before: %v, after: %v; want no more descriptors", before, after)
	}
	// A call that leaves a goroutine would have left thousands by now. Each collector of
	// metrics has one of its own, and some of them are at work when they are counted.
	if bound := before.goroutines + 10; after.goroutines > bound {
		h.Errorf("before: %v, after: %v; want at most %.0f goroutines", before, after, bound)
	}
	// Maps grow in steps and keep their size, series of metrics come with the first call
	// that has a new code. A hundred bytes for each call would be many times this.
	if bound := before.heap + before.heap/8 + mib; after.heap > bound {
		h.Errorf("before: %v, after: %v; want a heap of at most %.1f MiB", before, after, bound/mib)
	}
	// Go never ends a thread. Each call can be in one system call, and so have one; the
	// rest are those of the collector, of the checks of pools, and of the reapers.
	if bound := float64(h.callers + 6*len(h.pools) + 20); after.threads > bound {
		h.Errorf("before: %v, after: %v; want at most %.0f threads", before, after, bound)
	}
}
