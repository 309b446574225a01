package operator

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A source that was cut off hears late that it is to remove what it has. Meanwhile the operator was down, and the target was set up anew under
// its name: the source has the only copy by then, with every write, and keeps it.
func TestRemovalIsHeardLate(t *testing.T) {
	c := newCluster(t, "")
	c.begin(corev1.PersistentVolumeReclaimDelete)
	c.replicas = false // no pod starts on the target
	removal := &corev1.Pod{}
	removal.Namespace, removal.Name = storage, "volumemove-"+string(c.uid("move"))+"-remove"
	c.until("the removal is asked for", func() bool {
		c.reconcile()
		if m := c.moveObject(); c.has(m) && m.Status.Phase == v1alpha1.Removing {
			c.cut = nodeA
		}
		return c.has(removal)
	})
	if volume := c.persistentVolume(); !c.has(volume) || place.NodeOfVolume(volume) != nodeB {
		t.Fatalf("the PersistentVolume is %+v", volume)
	}
	c.setUpAnew(t, nodeB)
	c.cut = ""
	c.until("the mover has tried to remove the volume", func() bool {
		m := c.movers[removal.UID]
		return m != nil && (m.restarts > 2 || !m.runs() && m.err == nil)
	})
	if _, err := c.stateOn(t, nodeA); err != nil {
		t.Fatalf("the only copy was removed: %v\n%s", err, c.output())
	}
	c.until("the operator says what is missing", func() bool {
		c.reconcile()
		return strings.Contains(c.says(), "node "+nodeB+" has the volume")
	})
	if is, err := c.stateOn(t, nodeA); err != nil || !is.HandedOver {
		t.Errorf("the source has %+v, %v", is, err)
	}
	deleteClaim(c)
	c.move(deletion{undone: true}, func() {})
}

// A target that was cut off hears late that it is to remove the copy of a move that was undone. Meanwhile the operator was down, and the source was
// set up anew under its name: the target has the only copy by then, with every write, and keeps it.
func TestAbortIsHeardLate(t *testing.T) {
	c := newCluster(t, "")
	c.begin(corev1.PersistentVolumeReclaimDelete)
	c.replicas = false // no pod starts on the source again
	abort := &corev1.Pod{}
	abort.Namespace, abort.Name = storage, "volumemove-"+string(c.uid("move"))+"-abort-undone"
	c.until("the copy is to be removed", func() bool {
		c.reconcile()
		if m := c.moveObject(); c.has(m) && m.Status.Phase == v1alpha1.Switching && m.DeletionTimestamp == nil {
			deleteMove(c)
		}
		if !c.has(abort) {
			return false
		}
		c.cut = nodeB
		return true
	})
	if is, err := c.stateOn(t, nodeB); err != nil || is.Fence == "" && is.Moved == "" {
		t.Fatalf("the target has no whole copy: %+v, %v", is, err)
	}
	c.setUpAnew(t, nodeA)
	c.cut = ""
	c.until("the mover has tried to remove the copy", func() bool {
		m := c.movers[abort.UID]
		return m != nil && (strings.Contains(m.said(), "listening") || !m.runs())
	})
	wantCopy := func() {
		t.Helper()
		if _, err := c.stateOn(t, nodeB); err != nil {
			t.Fatalf("the only copy was removed: %v\n%s", err, c.output())
		}
	}
	wantCopy()
	c.until("the operator says what is missing", func() bool {
		c.reconcile()
		return strings.Contains(c.says(), "node "+nodeA+" has the volume: the mover")
	})
	wantCopy()
	deleteClaim(c)
	c.move(deletion{undone: true}, func() {})
}

// setUpAnew has a node of that name come with another disk.
func (c *cluster) setUpAnew(t *testing.T, name string) {
	t.Helper()
	pods := &corev1.PodList{}
	must.Succeed(t, c.api.List(t.Context(), pods))
	for i := range pods.Items {
		if m := c.movers[pods.Items[i].UID]; m != nil && pods.Items[i].Spec.NodeName == name {
			m.kill()
			delete(c.movers, pods.Items[i].UID)
		}
	}
	must.Succeed(t, c.nodes[name].Process.Kill())
	anew := newNode(t, name, testenv.LoopFS(t, "ext4", 512*mib), "")
	anew.start(t, c.programs[name])
	c.nodes[name] = anew
}

// stateOn is what a node has of the volume.
func (c *cluster) stateOn(t *testing.T, name string) (moves.Volume, error) {
	t.Helper()
	driver, err := moves.Dial(strings.TrimPrefix(c.nodes[name].socket, "unix://"))
	must.Succeed(t, err)
	defer func() { must.Succeed(t, driver.Close()) }()
	return driver.Call(t.Context(), moves.State, moves.Request{Volume: c.volume.ID})
}
