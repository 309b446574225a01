package operator

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// Clocks that are an hour apart on the two nodes and the API server keep nothing from moving: the certificates of the movers hold on both,
// and pods are evicted that have to be.
func TestClocksAnHourApart(t *testing.T) {
	programs := map[string]string{}
	for _, name := range []string{"move-out", "move-in", nodeA, nodeB} {
		programs[name] = itself(t)
	}
	trap.New(t, trap.AsksForTime(t, drivertest.Built(t)))
	for name, ahead := range map[string][3]time.Duration{
		"the source is ahead":                          {time.Hour, 0, -time.Hour},
		"the target is ahead, and the API server more": {0, time.Hour, 2 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			c := startCluster(t, programs, map[string]string{nodeA: trap.Clock(ahead[0]), nodeB: trap.Clock(ahead[1])})
			c.ahead = ahead[2]
			c.begin(corev1.PersistentVolumeReclaimDelete)
			c.move(deletion{}, func() {})
			for _, m := range c.movers {
				c.wantTime(m, map[bool]time.Duration{true: ahead[0], false: ahead[1]}[m.command == "move-out"])
			}
		})
	}
}

// wantTime expects a mover to have lived by a clock that is ahead.
func (c *cluster) wantTime(m *mover, ahead time.Duration) {
	c.Helper()
	var first struct{ Time time.Time }
	if err := json.NewDecoder(strings.NewReader(m.said())).Decode(&first); err != nil {
		c.Fatalf("%s says %q: %v", m.command, m.said(), err)
	}
	if is := time.Until(first.Time); is < ahead-drivertest.Patience || is > ahead {
		c.Errorf("the clock of %s is %v ahead, want %v", m.command, is, ahead)
	}
}
