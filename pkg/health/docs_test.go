package health_test

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// The table for administrators has each reason with its status, the worst first.
func TestDocumentsHaveEachReason(t *testing.T) {
	words := map[health.Status]string{health.Degraded: "DEGRADED", health.Inaccessible: "INACCESSIBLE", health.DataLoss: "DATA_LOSS"}
	var want, got []string
	for _, reason := range health.Reasons() {
		want = append(want, words[reason.Status()]+" "+string(reason))
	}
	page, err := os.ReadFile("../../docs/monitoring.md")
	must.Succeed(t, err)
	for _, row := range regexp.MustCompile("(?m)^\\|[^|]+\\| ([A-Z_]+) \\| `([A-Za-z]+)` \\|").FindAllSubmatch(page, -1) {
		got = append(got, string(row[1])+" "+string(row[2]))
	}
	if !slices.Equal(got, want) {
		t.Errorf("docs/monitoring.md has\n%q, want\n%q", got, want)
	}
}
