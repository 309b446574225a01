// Package measure shows moves of volumes to Prometheus, as they are at a scrape. It links nothing of Kubernetes, so that the program which
// writes docs/metrics.md does not either; where moves are read from is up to the caller.
package measure

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A Move is one that there is, begun or not.
type Move struct {
	Namespace, Name string
	Phase           string
	// Running has begun and not ended. What follows is of such a move.
	Running        bool
	Source, Target string
	// Remaining is how many bytes are to go; nil if that is not known.
	Remaining *int64
	// Fenced is how long the fence has been up; nil while it is not.
	Fenced *time.Duration
	// Idle is how long ago the move last got further; nil if that is not known.
	Idle *time.Duration
}

var ofMove = []string{"move_namespace", "move", "node", "target"}

var (
	moves     = prometheus.NewDesc("kubevirt_hpp_volume_moves", "VolumeMoves, by phase.", []string{"phase"}, nil)
	remaining = prometheus.NewDesc("kubevirt_hpp_volume_move_remaining_bytes",
		"About how much a pass of a running move still has to send. Absent in the first pass.", ofMove, nil)
	fenced = prometheus.NewDesc("kubevirt_hpp_volume_move_fenced_seconds",
		"For how long a running move may have kept its volume from pods. Absent before and after.", ofMove, nil)
	idle = prometheus.NewDesc("kubevirt_hpp_volume_move_idle_seconds",
		"Time since a running move last got further, to about a minute.", ofMove, nil)
)

type collector struct {
	phases []string
	list   func() ([]Move, error)
}

// New has a scrape show the moves of a list, and how many there are of each of some phases. Of moves that cannot be listed nothing is shown.
func New(phases []string, list func() ([]Move, error)) prometheus.Collector {
	return collector{phases, list}
}

// Describe is of prometheus.Collector.
func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{moves, remaining, fenced, idle} {
		to <- d
	}
}

// Collect is of prometheus.Collector.
func (c collector) Collect(to chan<- prometheus.Metric) {
	all, err := c.list()
	if err != nil {
		return
	}
	show := func(of *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(of, prometheus.GaugeValue, value, labels...)
	}
	count := map[string]int{}
	for _, m := range all {
		count[m.Phase]++
		if !m.Running {
			continue
		}
		labels := []string{m.Namespace, m.Name, m.Source, m.Target}
		if m.Remaining != nil {
			show(remaining, float64(*m.Remaining), labels...)
		}
		if m.Fenced != nil {
			show(fenced, m.Fenced.Seconds(), labels...)
		}
		if m.Idle != nil {
			show(idle, m.Idle.Seconds(), labels...)
		}
	}
	for _, phase := range c.phases {
		show(moves, float64(count[phase]), phase)
	}
}
