package driver

import (
	"strings"
	"testing"
	"unicode/utf8"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Kubelet refuses more than 16 entries of a node. The API server refuses what is longer than its fields.
func TestHealthIsBounded(t *testing.T) {
	long := strings.Repeat("m\xff", 4096)
	var found []health.Condition
	for _, reason := range health.Reasons() {
		found = append(found, health.Condition{Abnormal: true, Reason: reason, Message: long})
	}
	name := must.Value(volume.ParsePoolName("local"))(t)
	id := must.Value(volume.ParseID("pvc-1"))(t)
	check := func(of string, entries int, message string) {
		t.Helper()
		if entries > 16 || len(message) == 0 || len(message) > 1024 || !utf8.ValidString(message) {
			t.Errorf("%s has %d entries, and a message of %d bytes, %q", of, entries, len(message), message)
		}
	}
	h := volumeHealth(id, found)
	for _, e := range h.GetHealthStatuses() {
		check("the volume", len(h.GetHealthStatuses()), e.GetMessage())
	}
	// Of many pools with the same reason there is one entry.
	storage := storageHealth([]pool.Status{{Name: name, Conditions: found}, {Name: name, Conditions: found}})
	seen := make(map[string]bool)
	for _, e := range storage {
		check("the node", len(storage), e.GetMessage())
		if seen[e.GetReason()] {
			t.Errorf("the reason %s is there twice", e.GetReason())
		}
		seen[e.GetReason()] = true
	}
}
