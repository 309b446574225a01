package kubectl

import (
	"fmt"
	"time"
)

// A Pace knows how fast moves are. What was sent before it was first asked about a move does not count.
type Pace struct {
	began map[string]start
}

type start struct {
	at   time.Time
	sent int64
}

// Lines say for a terminal how far all moves are, and below that each that has begun and not ended.
func (pace *Pace) Lines(p Progress, now time.Time) []string {
	all := fmt.Sprintf("%d of %d moved", p.Moved, p.Of)
	if p.Problem != "" {
		all += ", and now: " + p.Problem
	}
	if p.Failed > 0 {
		all += fmt.Sprintf(", %d not", p.Failed)
	}
	lines := []string{cut(all + pace.of("", p.BytesSent, p.BytesToGo, now))}
	for _, m := range p.Each {
		toGo := int64(0)
		if m.BytesToGo != nil {
			toGo = *m.BytesToGo
		}
		lines = append(lines, cut(fmt.Sprintf("  %s/%s%s: %s", m.Namespace, m.Claim, pace.of(string(m.uid), m.BytesSent, toGo, now), m.Message)))
	}
	return lines
}

// of is the pace of one move, or of all by the empty id.
func (pace *Pace) of(id string, sent, toGo int64, now time.Time) (said string) {
	if pace.began == nil {
		pace.began = map[string]start{}
	}
	first, ok := pace.began[id]
	if !ok {
		first = start{now, sent}
		pace.began[id] = first
	}
	if sent > 0 {
		said += ", " + size(&sent) + " sent"
	}
	rate := int64(float64(sent-first.sent) / max(now.Sub(first.at).Seconds(), 1))
	if rate <= 0 {
		return said
	}
	said += ", " + size(&rate) + "/s"
	if toGo > 0 {
		said += fmt.Sprintf(", about %v to go in this pass", (time.Duration(toGo/rate) * time.Second).Round(time.Second))
	}
	return said
}

// cut shortens a line for a terminal.
func cut(line string) string {
	const width = 150
	runes := []rune(printable(line))
	if len(runes) > width {
		return string(runes[:width]) + "..."
	}
	return string(runes)
}
