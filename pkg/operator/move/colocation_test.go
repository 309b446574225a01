package move

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

// withLogs adds a claim that pods use together with data, with its volume.
func withLogs(on string, change ...func(*corev1.PersistentVolume)) []client.Object {
	return withClaim("logs", on, change...)
}

// withClaim is another claim, with its volume.
func withClaim(name, on string, change ...func(*corev1.PersistentVolume)) []client.Object {
	claim, volume := claimOf(name), volumeOf("pv-"+name)
	claim.Spec.VolumeName = volume.Name
	volume.UID, volume.Spec.ClaimRef.Name, volume.Spec.ClaimRef.UID = types.UID("volume of "+name), claim.Name, claim.UID
	volume.Spec.CSI.VolumeHandle = "pvc-" + name
	volume.Spec.NodeAffinity = onNode(on)
	for _, do := range change {
		do(volume)
	}
	return []client.Object{claim, volume}
}

// using has a pod use more claims.
func using(pod *corev1.Pod, claims ...string) *corev1.Pod {
	for _, claim := range claims {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: claim, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim},
		}})
	}
	return pod
}

func ofLogs(change ...func(*v1alpha1.VolumeMove)) *v1alpha1.VolumeMove {
	return moveOf("logs", append(change, func(m *v1alpha1.VolumeMove) { m.Spec.ClaimName = "logs" })...)
}

// begun is a move that goes to a node.
func begun(m *v1alpha1.VolumeMove, target string) *v1alpha1.VolumeMove {
	m.Status.Phase, m.Status.SourceNode, m.Status.TargetNode = v1alpha1.Copying, nodeA, target
	return m
}

// A pod starts only where all of its volumes are: they go to one node, or none of them moves.
func TestVolumesOfOnePod(t *testing.T) {
	local := func(on string) func(*corev1.PersistentVolume) {
		return func(v *corev1.PersistentVolume) {
			v.Spec.CSI.Driver = "other.example.com"
			v.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0] = corev1.NodeSelectorRequirement{
				Key: "kubernetes.io/hostname", Operator: corev1.NodeSelectorOpIn, Values: []string{on},
			}
		}
	}
	pod := func() *corev1.Pod { return using(appPod("data-0", false), "logs") }
	for name, tt := range map[string]struct {
		objects []client.Object
		move    func(*v1alpha1.VolumeMove)
		want    string // the target, or what is said
	}{
		"no pod uses both":                            {append(withLogs(nodeA), appPod("data-0", false)), to(""), nodeB},
		"the other stays":                             {append(withLogs(nodeA), pod()), to(""), "make a VolumeMove for it, too"},
		"the other moves too":                         {append(withLogs(nodeA), pod(), ofLogs()), to(""), nodeB},
		"the other has to go elsewhere":               {append(withLogs(nodeA), pod(), ofLogs(to(nodeC))), to(""), nodeC},
		"the other goes elsewhere":                    {append(withLogs(nodeA), pod(), begun(ofLogs(), nodeC)), to(""), nodeC},
		"the other is elsewhere":                      {append(withLogs(nodeC), pod()), to(""), nodeC},
		"this has to go where no other goes":          {append(withLogs(nodeC), pod()), to(nodeB), "the claim logs, which pods use too, is on node node-c"},
		"both have no room":                           {append(withLogs(nodeA, sized("95Gi")), pod(), ofLogs()), to(""), "no room"},
		"both have no room in one pool":               {append(withLogs(nodeA, sized("95Gi"), inClass("another")), pod(), ofLogs()), to(""), "no room"},
		"both have room elsewhere only":               {append(withLogs(nodeA, sized("45Gi")), pod(), ofLogs()), to(nodeC), "50Gi of 55Gi"},
		"the other cannot move":                       {append(withLogs(nodeA, guarded), pod(), ofLogs()), to(""), "which cannot move: the volume pv-logs has the finalizer"},
		"another PersistentVolume leads to the other": {append(append(withLogs(nodeA), withLogs(nodeA, alsoNamed("pv-2"))[1]), pod(), ofLogs()), to(""), "which cannot move: the PersistentVolume pv-2 leads"},
		"the other's move is deleted":                 {append(withLogs(nodeA), pod(), leaving(ofLogs())), to(""), "make a VolumeMove for it, too"},
		"by another pod": {
			append(withLogs(nodeC), appPod("data-0", false), using(appPod("backup", false), "more"), using(more("backup-2"), "more", "logs")), to(""), nodeC,
		},
		"another driver's is on the source": {append(withLogs(nodeA, local(nodeA)), pod()), to(nodeB), "node node-b does not reach the volume pv-logs"},
		"another driver's is elsewhere":     {append(withLogs(nodeA, local(nodeC)), pod()), to(""), nodeC},
		"another driver's is everywhere":    {append(withLogs(nodeA, local(nodeC), everywhere), pod()), to(""), nodeB},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, append(tt.objects, moveOf("m", tt.move))...)
			h.reconcile("m")
			m := h.move("m")
			if strings.HasPrefix(tt.want, "node-") {
				if m.Status.Phase != v1alpha1.Copying || m.Status.TargetNode != tt.want {
					t.Errorf("in the phase %s it goes to %q, want %s: %s", m.Status.Phase, m.Status.TargetNode, tt.want, h.says("m"))
				}
			} else if m.Status.Phase != v1alpha1.Pending || !strings.Contains(h.says("m"), tt.want) {
				t.Errorf("in the phase %s it says %q, want %q", m.Status.Phase, h.says("m"), tt.want)
			}
		})
	}
}

func sized(size string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) {
		v.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
	}
}

// inClass has a volume be of another StorageClass of the same pool.
func inClass(name string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) { v.Spec.StorageClassName = name }
}

func guarded(v *corev1.PersistentVolume) { v.Finalizers = append(v.Finalizers, "example.com/keep") }

func alsoNamed(name string) func(*corev1.PersistentVolume) {
	return func(v *corev1.PersistentVolume) { v.Name = name }
}

func everywhere(v *corev1.PersistentVolume) { v.Spec.NodeAffinity = nil }

func leaving(m *v1alpha1.VolumeMove) *v1alpha1.VolumeMove {
	m.Finalizers, m.DeletionTimestamp = []string{v1alpha1.Finalizer}, ptr.To(metav1.Now())
	return m
}

// more is another pod, which does not use the claim data.
func more(name string) *corev1.Pod {
	pod := appPod(name, false)
	pod.Spec.Volumes = nil
	return pod
}

// setOf is a StatefulSet without pods, whose pods would use claims of its templates.
func setOf(name string, templates []string, change ...func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: space, Name: name}, Spec: appsv1.StatefulSetSpec{Replicas: ptr.To(int32(0))}}
	for _, template := range templates {
		set.Spec.VolumeClaimTemplates = append(set.Spec.VolumeClaimTemplates, corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: template}})
	}
	for _, do := range change {
		do(set)
	}
	return set
}

// alsoUsing has the pods of a StatefulSet use a claim, too.
func alsoUsing(claim string) func(*appsv1.StatefulSet) {
	return func(set *appsv1.StatefulSet) {
		set.Spec.Template.Spec.Volumes = using(&corev1.Pod{}, claim).Spec.Volumes
	}
}

// A StatefulSet that is scaled to zero has no pod that shows which claims its next pods use together.
func TestVolumesOfStatefulSetWithoutPods(t *testing.T) {
	both := []string{"data", "logs"}
	for name, tt := range map[string]struct {
		set     *appsv1.StatefulSet
		claim   string // of the move
		objects []client.Object
		want    string // the target, or what is said
	}{
		"the other stays":          {setOf("db", both), "data-db-0", withClaim("logs-db-0", nodeA), "make a VolumeMove for it, too"},
		"the other is elsewhere":   {setOf("db", both), "data-db-0", withClaim("logs-db-0", nodeC), nodeC},
		"of another ordinal":       {setOf("db", both), "data-db-0", withClaim("logs-db-1", nodeA), nodeB},
		"of no ordinal":            {setOf("db", both), "data-db-0", withClaim("logs-db-00", nodeA), nodeB},
		"of another StatefulSet":   {setOf("db", both), "data-db-0", withClaim("logs-web-0", nodeA), nodeB},
		"of one that is scaled up": {setOf("db", both, func(s *appsv1.StatefulSet) { s.Spec.Replicas = ptr.To(int32(3)) }), "data-db-17", withClaim("logs-db-17", nodeC), nodeC},
		"of one that begins later": {setOf("db", both, func(s *appsv1.StatefulSet) { s.Spec.Ordinals = &appsv1.StatefulSetOrdinals{Start: 5} }), "data-db-5", withClaim("logs-db-5", nodeC), nodeC},
		"of all ordinals":          {setOf("db", []string{"data"}, alsoUsing("logs")), "data-db-0", withClaim("logs", nodeC), nodeC},
		"of all ordinals, first":   {setOf("db", []string{"data"}, alsoUsing("logs")), "logs", withClaim("data-db-0", nodeC), nodeC},
		"in place of a volume":     {setOf("db", []string{"logs"}, alsoUsing("logs")), "logs", withClaim("logs-db-0", nodeC), nodeB},
		"in another namespace":     {setOf("db", both, func(s *appsv1.StatefulSet) { s.Namespace = "elsewhere" }), "data-db-0", withClaim("logs-db-0", nodeC), nodeB},
		"that is deleted": {setOf("db", both, func(s *appsv1.StatefulSet) {
			s.Finalizers, s.DeletionTimestamp = []string{"orphan"}, ptr.To(metav1.Now())
		}), "data-db-0", withClaim("logs-db-0", nodeC), nodeB},
		"whose pods may run on one node": {setOf("db", both, func(s *appsv1.StatefulSet) {
			s.Spec.Template.Spec.NodeSelector = map[string]string{corev1.LabelHostname: nodeC}
		}), "data-db-0", nil, nodeC},
	} {
		t.Run(name, func(t *testing.T) {
			m := moveOf("m", to(""), func(m *v1alpha1.VolumeMove) { m.Spec.ClaimName = tt.claim })
			h := newHarness(t, append(append(withClaim(tt.claim, nodeA), tt.objects...), tt.set, m)...)
			h.reconcile("m")
			h.has(m)
			if strings.HasPrefix(tt.want, "node-") && m.Status.TargetNode != tt.want || !strings.HasPrefix(tt.want, "node-") && !strings.Contains(h.says("m"), tt.want) {
				t.Errorf("in the phase %s it goes to %q, and says %q, want %q", m.Status.Phase, m.Status.TargetNode, h.says("m"), tt.want)
			}
		})
	}
}

// Of two moves of one pod's volumes each goes where the other does, whichever begins.
func TestVolumesOfOnePodMeet(t *testing.T) {
	for _, first := range []string{"m", "logs"} {
		h := newHarness(t, append(withLogs(nodeA), using(appPod("data-0", false), "logs"), moveOf("m"), ofLogs(to(nodeC)))...)
		second := map[string]string{"m": "logs", "logs": "m"}[first]
		h.reconcile(first)
		h.reconcile(second)
		one, two := moveOf(first), moveOf(second)
		if h.has(one); !h.has(two) || one.Status.TargetNode != nodeC || two.Status.TargetNode != nodeC {
			t.Errorf("the first goes to %q, the second to %q: %s", one.Status.TargetNode, two.Status.TargetNode, h.says(second))
		}
	}
}

// What goes to a node is promised there before the node says that it has less room: of two volumes that move one after the other the second goes where
// there is room for it, too, however far the first is by then. It would wait on a node without, and never go to another.
func TestMovesThatBeginTogether(t *testing.T) {
	for _, phase := range []v1alpha1.Phase{v1alpha1.Copying, v1alpha1.Fenced, v1alpha1.Switching, v1alpha1.Removing, v1alpha1.Succeeded} {
		for after, want := range map[time.Duration]string{0: nodeC, counted + time.Minute: nodeB} {
			t.Run(fmt.Sprintf("%s, after %v", phase, after), func(t *testing.T) {
				other := more("logs-0")
				other.Status.Phase = corev1.PodPending // for the stand-in of a mover any pod that runs uses the volume
				h := newHarness(t, append(withLogs(nodeA, sized("45Gi")), appPod("data-0", false), using(other, "logs"), moveOf("m"), ofLogs())...)
				change(volumeOf("pv"), sized("60Gi"))(h)
				now := time.Now()
				h.clock = func() time.Time { return now }
				for looks := 0; h.move("m").Status.Phase != phase; looks++ {
					if looks == 100 {
						t.Fatalf("the first is %s", h.move("m").Status.Phase)
					}
					h.reconcile("m")
					if h.move("m").Status.Phase != phase {
						h.live()
					}
				}
				if phase == v1alpha1.Copying { // its mover is made
					h.reconcile("m")
				}
				now = now.Add(after)
				h.reconcile("logs")
				one, two := moveOf("m"), moveOf("logs")
				if h.has(one); !h.has(two) || one.Status.TargetNode != nodeB || two.Status.TargetNode != want {
					t.Errorf("the first goes to %q, the second to %q, want %s: %s", one.Status.TargetNode, two.Status.TargetNode, want, h.says("logs"))
				}
			})
		}
	}
}

// The room that was found for all volumes of one pod when the first of them began is kept for those that have not, and is given to no third. It is none
// too many for them.
func TestRoomOfVolumesOfOnePod(t *testing.T) {
	ofOther := func(change ...func(*v1alpha1.VolumeMove)) *v1alpha1.VolumeMove {
		return moveOf("other", append(change, func(m *v1alpha1.VolumeMove) { m.Spec.ClaimName = "other" })...)
	}
	for name, tt := range map[string]struct {
		size  string // of the other's volume
		order []string
		want  map[string]string // the targets, or empty for none
	}{
		"the other fits beside them":        {"20Gi", []string{"m", "other", "logs"}, map[string]string{"m": nodeB, "logs": nodeB, "other": nodeB}},
		"the other comes between":           {"21Gi", []string{"m", "other", "logs"}, map[string]string{"m": nodeB, "logs": nodeB, "other": ""}},
		"the other comes after both":        {"21Gi", []string{"m", "logs", "other"}, map[string]string{"m": nodeB, "logs": nodeB, "other": ""}},
		"the other comes first":             {"21Gi", []string{"other", "m", "logs"}, map[string]string{"m": "", "logs": "", "other": nodeB}},
		"the other comes first, and fits":   {"20Gi", []string{"other", "m", "logs"}, map[string]string{"m": nodeB, "logs": nodeB, "other": nodeB}},
		"the second begins, then the other": {"21Gi", []string{"logs", "other", "m"}, map[string]string{"m": nodeB, "logs": nodeB, "other": ""}},
	} {
		t.Run(name, func(t *testing.T) {
			other := more("other-0")
			objects := append(withLogs(nodeA, sized("50Gi")), withClaim("other", nodeA, sized(tt.size))...)
			h := newHarness(t, append(objects, using(appPod("data-0", false), "logs"), using(other, "other"), moveOf("m", to(nodeB)), ofLogs(to(nodeB)), ofOther(to(nodeB)))...)
			change(volumeOf("pv"), sized("30Gi"))(h)
			now := time.Now()
			h.clock = func() time.Time { return now }
			for _, name := range tt.order {
				h.reconcile(name)
			}
			got := map[string]string{}
			for name := range tt.want {
				got[name] = h.move(name).Status.TargetNode
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s\n%s", diff, h.says("other"))
			}
		})
	}
}

// A mover that starts late has the room promised late.
func TestRoomOfMoverThatStartsLate(t *testing.T) {
	other := more("logs-0")
	h := newHarness(t, append(withLogs(nodeA, sized("45Gi")), appPod("data-0", false), using(other, "logs"), moveOf("m"), ofLogs())...)
	change(volumeOf("pv"), sized("60Gi"))(h)
	now := time.Now()
	h.clock = func() time.Time { return now }
	h.reconcile("m")
	now = now.Add(2 * counted)
	h.reconcile("logs")
	if two := moveOf("logs"); !h.has(two) || two.Status.TargetNode != nodeC {
		t.Errorf("the second goes to %q: %s", two.Status.TargetNode, h.says("logs"))
	}
}
