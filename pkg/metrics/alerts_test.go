package metrics_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Each reason has one alert. Those of the whole pool have none here: the pool has one.
func TestEveryReasonHasAnAlert(t *testing.T) {
	rules, err := os.ReadFile("../../deploy/monitoring/prometheusrule.yaml")
	must.Succeed(t, err)
	selectors := regexp.MustCompile(`hostpath_pool_abnormal_volumes\{reason(=|=~|!~)"([A-Za-z|]+)"\}`).FindAllStringSubmatch(string(rules), -1)
	alertsOf := func(reason health.Reason) int {
		found := 0
		for _, selector := range selectors {
			if slices.Contains(strings.Split(selector[2], "|"), string(reason)) != (selector[1] == "!~") {
				found++
			}
		}
		return found
	}
	for _, reason := range health.Reasons() {
		want := 1
		if reason.OfPool() || reason == health.ReadOnly || reason == health.FilesystemErrors {
			want = 0
		}
		if got := alertsOf(reason); got != want {
			t.Errorf("%d alerts fire for volumes because of %s, want %d", got, reason, want)
		}
	}
	if got := alertsOf("NewReason"); got != 1 {
		t.Errorf("%d alerts fire for a new reason, want 1", got)
	}
}
