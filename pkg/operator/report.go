package operator

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// A reporter tells users of an object, by its status and by events.
type reporter struct {
	client   client.Client
	recorder events.EventRecorder
}

func (r *Reconciler) reporter() reporter { return reporter{r.Client, r.Recorder} }

// update writes the status of an object, if it has changed.
func (r reporter) update(ctx context.Context, object *hppv1.HostPathProvisioner, to hppv1.HostPathProvisionerStatus) error {
	if equality.Semantic.DeepEqual(object.Status, to) {
		return nil
	}
	changed := object.DeepCopy()
	changed.Status = to
	if err := r.client.Status().Update(ctx, changed); err != nil {
		return client.IgnoreNotFound(err)
	}
	r.announce(object, to)
	return nil
}

// announce makes an event of each condition that has changed its value.
func (r reporter) announce(object *hppv1.HostPathProvisioner, to hppv1.HostPathProvisionerStatus) {
	for _, condition := range to.Conditions {
		before := meta.FindStatusCondition(object.Status.Conditions, condition.Type)
		if before != nil && before.Status == condition.Status && before.Reason == condition.Reason {
			continue
		}
		kind := corev1.EventTypeNormal
		if condition.Type == hppv1.ConditionDegraded && condition.Status == metav1.ConditionTrue {
			kind = corev1.EventTypeWarning
		}
		reason := condition.Reason
		if condition.Type == hppv1.ConditionAvailable && condition.Status == metav1.ConditionTrue {
			reason = status.ReasonHealthy
		}
		r.event(object, kind, reason, fmt.Sprintf("%s is %s: %s", condition.Type, condition.Status, condition.Message))
	}
}

// event makes an event of an object. The API server refuses longer notes.
func (r reporter) event(object *hppv1.HostPathProvisioner, kind, reason, note string) {
	const most = 1024
	r.recorder.Eventf(object, nil, kind, reason, "Reconcile", "%s", status.Shorten(note, most))
}
