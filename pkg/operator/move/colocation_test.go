package move

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

// withLogs adds a claim that pods use together with data, with its volume.
func withLogs(on string, change ...func(*corev1.PersistentVolume)) []client.Object {
	claim, volume := claimOf("logs"), volumeOf("pv-logs")
	claim.Spec.VolumeName = volume.Name
	volume.UID, volume.Spec.ClaimRef.Name, volume.Spec.ClaimRef.UID = "volume of logs", claim.Name, claim.UID
	volume.Spec.CSI.VolumeHandle = "pvc-2"
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
		"no pod uses both":                   {append(withLogs(nodeA), appPod("data-0", false)), to(""), nodeB},
		"the other stays":                    {append(withLogs(nodeA), pod()), to(""), "make a VolumeMove for it, too"},
		"the other moves too":                {append(withLogs(nodeA), pod(), ofLogs()), to(""), nodeB},
		"the other has to go elsewhere":      {append(withLogs(nodeA), pod(), ofLogs(to(nodeC))), to(""), nodeC},
		"the other goes elsewhere":           {append(withLogs(nodeA), pod(), begun(ofLogs(), nodeC)), to(""), nodeC},
		"the other is elsewhere":             {append(withLogs(nodeC), pod()), to(""), nodeC},
		"this has to go where no other goes": {append(withLogs(nodeC), pod()), to(nodeB), "the claim logs, which pods use too, is on node node-c"},
		"both have no room":                  {append(withLogs(nodeA, sized("95Gi")), pod(), ofLogs()), to(""), "no room"},
		"both have no room in one pool":      {append(withLogs(nodeA, sized("95Gi"), inClass("another")), pod(), ofLogs()), to(""), "no room"},
		"both have room elsewhere only":      {append(withLogs(nodeA, sized("45Gi")), pod(), ofLogs()), to(nodeC), "50Gi of 55Gi"},
		"the other cannot move":              {append(withLogs(nodeA, guarded), pod(), ofLogs()), to(""), "which cannot move: the volume pv-logs has the finalizer"},
		"the other's move is deleted":        {append(withLogs(nodeA), pod(), leaving(ofLogs())), to(""), "make a VolumeMove for it, too"},
		"by another pod": {
			append(withLogs(nodeC), appPod("data-0", false), using(appPod("backup", false), "more"), using(more("backup-2"), "more", "logs")), to(""), nodeC,
		},
		"another driver's is on the source": {append(withLogs(nodeA, local(nodeA)), pod()), to(nodeB), "node node-b does not reach the volume pv-logs"},
		"another driver's is elsewhere":     {append(withLogs(nodeA, local(nodeC)), pod()), to(""), nodeC},
		"another driver's is everywhere":    {append(withLogs(nodeA, local(nodeC), everywhere), pod()), to(""), nodeB},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, append(tt.objects, moveOf("m", tt.move))...)
			w.reconcile("m")
			m := w.move("m")
			if strings.HasPrefix(tt.want, "node-") {
				if m.Status.Phase != v1alpha1.Copying || m.Status.TargetNode != tt.want {
					t.Errorf("in the phase %s it goes to %q, want %s: %s", m.Status.Phase, m.Status.TargetNode, tt.want, w.says("m"))
				}
			} else if m.Status.Phase != v1alpha1.Pending || !strings.Contains(w.says("m"), tt.want) {
				t.Errorf("in the phase %s it says %q, want %q", m.Status.Phase, w.says("m"), tt.want)
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

// Of two moves of one pod's volumes each goes where the other does, whichever begins.
func TestVolumesOfOnePodMeet(t *testing.T) {
	for _, first := range []string{"m", "logs"} {
		w := newWorld(t, append(withLogs(nodeA), using(appPod("data-0", false), "logs"), moveOf("m"), ofLogs(to(nodeC)))...)
		second := map[string]string{"m": "logs", "logs": "m"}[first]
		w.reconcile(first)
		w.reconcile(second)
		one, two := moveOf(first), moveOf(second)
		if w.has(one); !w.has(two) || one.Status.TargetNode != nodeC || two.Status.TargetNode != nodeC {
			t.Errorf("the first goes to %q, the second to %q: %s", one.Status.TargetNode, two.Status.TargetNode, w.says(second))
		}
	}
}

// What goes to a node is promised there before the node says that it has less room: of two volumes that move at once the second goes where there
// is room for it, too. It would wait on a node without, and never go to another.
func TestMovesThatBeginTogether(t *testing.T) {
	for name, tt := range map[string]struct {
		looks int // at the first
		want  string
	}{
		"the first has just begun":       {1, nodeC},
		"the first has begun long since": {2, nodeB}, // its mover was made at the time zero
	} {
		t.Run(name, func(t *testing.T) {
			other := more("logs-0")
			w := newWorld(t, append(withLogs(nodeA, sized("45Gi")), appPod("data-0", false), using(other, "logs"), moveOf("m"), ofLogs())...)
			change(volumeOf("pv"), sized("60Gi"))(w)
			for range tt.looks {
				w.reconcile("m")
			}
			w.reconcile("logs")
			one, two := moveOf("m"), moveOf("logs")
			if w.has(one); !w.has(two) || one.Status.TargetNode != nodeB || two.Status.TargetNode != tt.want {
				t.Errorf("the first goes to %q, the second to %q, want %s: %s", one.Status.TargetNode, two.Status.TargetNode, tt.want, w.says("logs"))
			}
		})
	}
}
