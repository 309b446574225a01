package operator

import (
	"errors"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/pkg/operator/move"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// errKilled is what an operator gets of a write amid which it is killed.
var errKilled = errors.New("killed")

// runOperator has an operator that knows nothing but the objects.
func (c *cluster) runOperator() {
	c.dies, c.dead = false, false
	c.operator = &move.Reconciler{Client: c.watched(), APIReader: c.api, Reports: c, DriverNamespace: storage, Now: c.clock}
}

// kill kills the operator before it makes its next write, or after it, or a driver or a mover.
func (c *cluster) kill(random *rand.Rand) (killed string) {
	c.Helper()
	var running []*mover
	for _, m := range c.movers {
		if m.runs() && !m.told {
			running = append(running, m)
		}
	}
	name := nodeA
	if random.IntN(2) == 0 {
		name = nodeB
	}
	switch victim := random.IntN(3); {
	case victim == 0:
		c.dies, c.late = true, random.IntN(2) == 0
		return "operator"
	case victim == 1 && len(running) > 0:
		m := running[random.IntN(len(running))]
		m.kill()
		return m.command
	}
	if err := c.nodes[name].Process.Signal(os.Kill); !errors.Is(err, os.ErrProcessDone) { // as it is until it runs again
		must.Succeed(c, err)
	}
	return name
}

// A hundred moves under load, with the operator, the drivers and the movers killed several times in each, at random moments: the contents are
// equal, the claim is bound, one node has the volume, nothing is promised twice, and nothing is left.
func TestHundredMovesWithRandomKills(t *testing.T) {
	count := 100
	if testing.Short() {
		count = 2
	}
	seed := rand.Uint64()
	t.Logf("the seed is %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	c := newCluster(t, "")
	kills := map[string]int{}
	took := 2 * time.Second // that a move takes
	for n := range count {
		c.begin(corev1.PersistentVolumeReclaimDelete)
		began, left := time.Now(), 1+random.IntN(6)
		next := began
		c.move(deletion{}, func() {
			if left == 0 || time.Now().Before(next) {
				return
			}
			kills[c.kill(random)]++
			left--
			next = time.Now().Add(time.Duration(random.Int64N(int64(took) / 3)))
		})
		if t.Failed() {
			t.Fatalf("in move %d, after the kills %v\n%s", n, kills, c.output())
		}
	}
	t.Logf("%d moves, and the kills %v", count, kills)
	for _, victim := range []string{"operator", "move-out", "move-in", nodeA, nodeB} {
		if kills[victim] < count/20 {
			t.Errorf("%s was killed %d times in %d moves", victim, kills[victim], count)
		}
	}
}
