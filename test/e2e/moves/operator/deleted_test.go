package operator

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// A deletion is what a user deletes amid a move.
type deletion struct {
	name   string
	policy corev1.PersistentVolumeReclaimPolicy
	do     func(c *cluster)
	// undone says that the move may be undone by it.
	undone bool
}

func deleteMove(c *cluster) { c.delete(c.moveObject()) }

func deletePod(c *cluster) { c.delete(appPod()) }

func deleteClaim(c *cluster) {
	c.delete(c.claim())
	if m := c.moveObject(); c.has(m) && !m.Underway() { // it would wait for another claim of the name
		deleteMove(c)
	}
}

func deleteAll(c *cluster) {
	c.replicas = false
	deletePod(c)
	deleteClaim(c)
}

// deletions are of each of the objects. The claim of a pod that runs is there until that ends.
var deletions = []deletion{
	{"VolumeMove", corev1.PersistentVolumeReclaimDelete, deleteMove, true},
	{"claim and pod, of a retained volume", corev1.PersistentVolumeReclaimRetain, deleteAll, true},
	{"claim and pod", corev1.PersistentVolumeReclaimDelete, deleteAll, true},
	{"claim", corev1.PersistentVolumeReclaimDelete, deleteClaim, true},
	{"pod", corev1.PersistentVolumeReclaimDelete, deletePod, false},
}

// each tests some deletions in one cluster.
func each(t *testing.T, trapped string, some []deletion, test func(t *testing.T, c *cluster, d deletion)) {
	t.Helper()
	c := newCluster(t, trapped)
	for _, d := range some {
		if !t.Run(d.name, func(t *testing.T) {
			c.lend(t)
			test(t, c, d)
		}) {
			return // something may be left
		}
	}
}

// lend has a subtest use the cluster while it lasts.
func (c *cluster) lend(to testing.TB) {
	put := func(t testing.TB) {
		c.TB = t
		for _, n := range c.nodes {
			n.TB = t
		}
	}
	to.Cleanup(func() { put(c.parent) })
	put(to)
}

// move moves the volume, with something deleted by what is called meanwhile, and expects one copy, or none of a volume that goes with its
// claim.
func (c *cluster) move(d deletion, meanwhile func()) {
	c.Helper()
	c.run(meanwhile)
	m, volume := c.moveObject(), c.persistentVolume()
	if !d.undone && (!c.has(m) || m.Status.Phase != v1alpha1.Succeeded || !c.has(volume) || place.NodeOfVolume(volume) != nodeB) {
		c.Errorf("the move is %+v, and the volume on %q", m.Status, place.NodeOfVolume(volume))
	}
	c.end()
}

// Something is deleted before each write of the operator in turn.
func TestDeletedAtEveryWrite(t *testing.T) {
	var writes []string // of a whole move
	turn := 0
	each(t, "", deletions, func(t *testing.T, c *cluster, d deletion) {
		if writes == nil {
			c.begin(d.policy)
			c.move(deletion{}, func() {})
			writes = slices.Clone(c.writes)
		}
		all, done := writes, 0
		if testing.Short() {
			first := slices.DeleteFunc(slices.Clone(writes), func(w string) bool { return !strings.HasSuffix(w, ", 1") })
			turn += len(first) / (len(deletions) + 1)
			all = first[turn : turn+1]
		}
		for _, at := range all {
			c.begin(d.policy)
			c.at, c.now = at, func() {
				done++
				d.do(c)
			}
			c.move(d, func() {})
			if t.Failed() {
				t.Fatalf("deleted before the operator would %s\n%s", at, c.output())
			}
		}
		t.Logf("deleted before %d of %q", done, all)
		if done < 1+len(all)/2 {
			t.Errorf("only before %d writes of %d", done, len(all))
		}
	})
}

// Something is deleted as a process is killed, before each of its steps in turn.
func TestDeletedAtEveryStep(t *testing.T) {
	for _, victim := range []string{"move-out", "move-in", nodeA, nodeB} {
		some, first, most := deletions[:2], 1, 1000
		if victim == nodeB { // which has the volume in the end
			some = deletions
		}
		if testing.Short() {
			if victim != "move-in" {
				continue
			}
			some, first, most = deletions[:1], 10, 10
		}
		t.Run(victim, func(t *testing.T) {
			each(t, victim, some, func(t *testing.T, c *cluster, d deletion) {
				at := first
				for done := true; done && at <= most; at++ {
					done = false
					c.begin(d.policy)
					c.trap.Arm(at)
					c.move(d, func() {
						if !done && c.trap.HasKilled() {
							done = true
							d.do(c)
						}
					})
					c.trap.Disarm()
					if t.Failed() {
						t.Fatalf("deleted at step %d\n%s", at, c.output())
					}
				}
				if at < first+5 && !testing.Short() {
					t.Errorf("it takes only %d steps", at)
				}
			})
		})
	}
}

// Something is deleted at random instants.
func TestDeletedAtRandom(t *testing.T) {
	some, count := deletions, 20
	if testing.Short() {
		some, count = deletions[2:3], 1
	}
	seed := rand.Uint64()
	t.Logf("the seed is %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	took := 2 * time.Second // that a move takes
	each(t, "", some, func(t *testing.T, c *cluster, d deletion) {
		for range count {
			c.begin(d.policy)
			began, done, at := time.Now(), false, time.Duration(random.Int64N(int64(took)))
			c.move(d, func() {
				if !done && time.Since(began) >= at {
					done = true
					d.do(c)
				}
			})
			if !done {
				took = time.Since(began)
			}
			if t.Failed() {
				t.Fatalf("deleted after %v\n%s", at, c.output())
			}
		}
	})
}
