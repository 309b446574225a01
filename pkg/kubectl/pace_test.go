package kubectl

import (
	"slices"
	"testing"
	"time"
)

// Each move is shown with its own rate and time, and all together. What was sent before does not count.
func TestPace(t *testing.T) {
	const mib = 1 << 20
	var pace Pace
	began := time.Now()
	at := func(seconds int, first, second int64, problem string) []string {
		toGo := int64(30 * mib)
		return pace.Lines(Progress{Moved: 1, Failed: 1, Of: 5, BytesSent: first + second, BytesToGo: toGo, Problem: problem, Each: []Moved{
			{Namespace: "apps", Claim: "db-0", uid: "1", BytesSent: first, BytesToGo: &toGo, Message: "Copying"},
			{Namespace: "apps", Claim: "db-1", uid: "2", BytesSent: second, Message: "pods are evicted"},
		}}, began.Add(time.Duration(seconds)*time.Second))
	}
	for name, c := range map[string]struct{ got, want []string }{
		"at first": {at(0, 100*mib, 0, ""), []string{"1 of 5 moved, 1 not, 100.0 MiB sent", "  apps/db-0, 100.0 MiB sent: Copying", "  apps/db-1: pods are evicted"}},
		"later": {at(10, 120*mib, 40*mib, "list volumemoves: refused"), []string{
			"1 of 5 moved, and now: list volumemoves: refused, 1 not, 160.0 MiB sent, 6.0 MiB/s, about 5s to go in this pass",
			"  apps/db-0, 120.0 MiB sent, 2.0 MiB/s, about 15s to go in this pass: Copying", "  apps/db-1, 40.0 MiB sent, 4.0 MiB/s: pods are evicted"}},
	} {
		if !slices.Equal(c.got, c.want) {
			t.Errorf("%s: %q, want %q", name, c.got, c.want)
		}
	}
}
