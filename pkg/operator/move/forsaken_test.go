package move

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A VolumeMove that is removed by force leaves no mover, which would fence the volume for nothing, and no certificates. What replaces its
// PersistentVolume stays, as that may be missing.
func TestRemovedByForce(t *testing.T) {
	for phase, keeps := range map[v1alpha1.Phase]bool{v1alpha1.Copying: false, v1alpha1.Fenced: false, v1alpha1.Switching: true, v1alpha1.Removing: true} {
		t.Run(string(phase), func(t *testing.T) {
			w := newWorld(t, moveOf("m"), moveOf("other", func(m *v1alpha1.VolumeMove) { m.Namespace = "elsewhere" }), appPod("data-0", false))
			other := &corev1.Pod{ObjectMeta: objects{move: moveOf("other"), namespace: storage}.meta("-in")}
			other.Annotations[nameAnnotation] = "elsewhere/other"
			other.Labels[roleLabel] = string(roleIn)
			other.Spec.NodeName, other.Spec.Containers = nodeC, []corev1.Container{{Args: []string{"move-in"}}}
			must.Succeed(t, w.api.Create(t.Context(), other))
			reached := false
			w.run("m", func(int) {
				m := w.move("m")
				if m == nil || m.Status.Phase != phase || reached {
					return
				}
				reached = true
				m.Finalizers = nil
				w.update(m)
				must.Succeed(t, client.IgnoreNotFound(w.api.Delete(t.Context(), m)))
			})
			pods := &corev1.PodList{}
			must.Succeed(t, w.api.List(t.Context(), pods, client.InNamespace(storage), client.HasLabels{moveLabel}))
			if !reached || len(pods.Items) != 1 || pods.Items[0].Name != other.Name {
				t.Errorf("reached: %v; the movers are %+v", reached, pods.Items)
			}
			if secret := (&corev1.Secret{ObjectMeta: madeFor("m").meta("")}); w.has(secret) != keeps {
				t.Errorf("the Secret is there: %v, want %v", !keeps, keeps)
			}
		})
	}
}
