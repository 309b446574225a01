// Command metricsdoc prints docs/metrics.md: what the driver, and of moves the operator, shows to Prometheus, as it is
// registered. `make docs` writes the file, and a test here fails when it is out of date.
package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/operator/move/measure"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func main() {
	if err := write(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "metricsdoc:", err)
		os.Exit(1)
	}
}

const head = `# Metrics

<!-- Written by make docs. -->

What ` + "`GET /metrics`" + ` shows. [configuration.md](configuration.md#metrics) has how it is served and who can read it.

A scrape answers from memory, and never waits for a pool or a call. The numbers of a pool's filesystem are up to 10 seconds old, and what is
counted volume by volume up to a minute or more. What is not known is absent, and never 0. Names in ` + "`_total`" + ` are counters, others gauges
unless the table says summary or histogram.

- how full the disk is: ` + "`1 - hostpath_pool_free_bytes / hostpath_pool_size_bytes`" + `; of inodes ` + "`1 - hostpath_pool_free_inodes / hostpath_pool_inodes`" + `
- whether volumes can take more than is free: ` + "`hostpath_pool_filesystem_unlimited_volumes > 0 or hostpath_pool_filesystem_promised_unused_bytes > hostpath_pool_free_bytes`" + `
- how long a snapshot takes: ` + "`rate(hostpath_pool_copy_duration_seconds_sum[1h]) / rate(hostpath_pool_copy_duration_seconds_count[1h])`" + `
- how long trash has been waiting: ` + "`time() - hostpath_pool_trash_oldest_timestamp_seconds`" + `
- how fast trash is erased: ` + "`rate(hostpath_pool_reaper_removed_files_total[5m])`" + `
- how slow calls are: ` + "`histogram_quantile(0.99, sum by (method, le) (rate(hostpath_csi_call_duration_seconds_bucket[5m])))`" + `
- which calls fail: ` + "`sum by (method, code) (rate(hostpath_csi_call_duration_seconds_count{code!=\"OK\"}[5m]))`" + `
`

// A section is the metrics whose names begin alike. The text says of the labels that all of them have.
type section struct {
	prefix, title, text string
	labels              []string
}

var sections = []section{
	{"hostpath_pool_", "Pools", "One series for each `pool` of the node. In a shared pool the volumes and promises are those that the node knows of.", []string{"pool"}},
	{"hostpath_volume_", "Volumes", "One series for each `volume` of a `pool`, only with `--volume-metrics`. Kubelet has the size and use of volumes that pods use, as `kubelet_volume_stats_*` with the names of their claims.", []string{"pool", "volume"}},
	{"hostpath_csi_", "Calls", "", nil},
	{"hostpath_abandoned_", "What hangs", "", nil},
	{"hostpath_tracing_", "Tracing", "", nil},
	{"hostpath_build_", "The program", "", nil},
	{"kubevirt_hpp_pool_", "Of the upstream driver", "", nil},
	{"kubevirt_hpp_volume_move_", "Moves of volumes", "Of the operator, with those [of its own](operator.md#metrics): one series for each `move` in `move_namespace`, from `node` to `target`, until the VolumeMove goes.", []string{"move", "move_namespace", "node", "target"}},
	{"kubevirt_hpp_volume_moves", "All moves", "", nil},
}

func write(w io.Writer) error {
	families, err := examples().Gather()
	if err != nil {
		return err
	}
	fmt.Fprint(w, head)
	for _, s := range sections {
		fmt.Fprintf(w, "\n## %s\n", s.title)
		if s.text != "" {
			fmt.Fprintf(w, "\n%s\n", s.text)
		}
		fmt.Fprint(w, "\n| metric | meaning |\n|---|---|\n")
		for _, family := range families {
			if strings.HasPrefix(family.GetName(), s.prefix) {
				fmt.Fprintf(w, "| `%s` | %s |\n", family.GetName(), meaning(family)+kind(family)+labels(family, s.labels))
			}
		}
	}
	fmt.Fprint(w, "\n## The Go runtime and the process\n\nThe usual ones of Prometheus' library for Go: ")
	fmt.Fprintf(w, "%s.\nBeside them there is `go_gc_heap_live_bytes`, what the last garbage collection left in use.\n", strings.Join(usual(families), ", "))
	return nil
}

// examples are metrics of the two programs, of which none is absent.
func examples() prometheus.Gatherers {
	operator := prometheus.NewRegistry()
	operator.MustRegister(measure.New([]string{"Fenced"}, func() ([]measure.Move, error) {
		return []measure.Move{{Running: true, Remaining: new(int64), Fenced: new(time.Duration), Idle: new(time.Duration)}}, nil
	}))
	return prometheus.Gatherers{example().Gatherer(), operator}
}

// example are those of the driver.
func example() *metrics.Metrics {
	now := time.Now()
	m := metrics.New(metrics.Options{
		Version:  "v1",
		Revision: "0123abc",
		Pools: func() []pool.Status {
			return []pool.Status{{
				Space:      &dir.Space{SizeBytes: 1, Inodes: 1},
				SharesWith: []volume.PoolName{{}},
				Trash:      ledger.TrashSum{Since: now},
				LastError:  now,
				Abnormal:   map[health.Reason]int{health.NoSpace: 1},
				Copies:     pool.Copies{Done: map[volume.CopyMethod]pool.CopySum{volume.ByReference: {}}},
			}}
		},
		Volumes:      func() []pool.Surveyed { return []pool.Surveyed{{}} },
		DroppedSpans: func() uint64 { return 1 },
	})
	m.Call("Probe", "OK", time.Millisecond)
	m.Panic("Probe")
	return m
}

// kind is what a name does not say.
func kind(family *dto.MetricFamily) string {
	switch family.GetType() {
	case dto.MetricType_COUNTER, dto.MetricType_GAUGE:
		return ""
	default:
		return " A " + strings.ToLower(family.GetType().String()) + "."
	}
}

// labels are those that not all metrics of the section have.
func labels(family *dto.MetricFamily, of []string) string {
	var names []string
	for _, label := range family.GetMetric()[0].GetLabel() {
		if !slices.Contains(of, label.GetName()) {
			names = append(names, "`"+label.GetName()+"`")
		}
	}
	if len(names) == 0 {
		return ""
	}
	return " Labels: " + strings.Join(names, ", ") + "."
}

func meaning(family *dto.MetricFamily) string {
	text := family.GetHelp()
	histogram := family.GetMetric()[0].GetHistogram()
	if histogram == nil {
		return text
	}
	var bounds []string
	for _, bucket := range histogram.GetBucket() {
		bounds = append(bounds, strconv.FormatFloat(bucket.GetUpperBound(), 'g', -1, 64))
	}
	return text + " Buckets: " + strings.Join(bounds, ", ") + "."
}

// usual are the groups of the metrics that are not the driver's own.
func usual(families []*dto.MetricFamily) []string {
	groups := make(map[string]bool)
	for _, family := range families {
		group, _, _ := strings.Cut(family.GetName(), "_")
		if group != "hostpath" && group != "kubevirt" {
			groups["`"+group+"_*`"] = true
		}
	}
	return slices.Sorted(maps.Keys(groups))
}
