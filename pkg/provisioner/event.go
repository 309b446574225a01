package provisioner

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/reference"
)

// A reporter makes events that many instances may want to make: their names follow from what they say, so that there is
// one, whichever instance is first. It is made again after the API server has dropped it, in an hour.
type reporter struct {
	client kubernetes.Interface
	source corev1.EventSource
	log    logr.Logger
}

func (r reporter) warn(ctx context.Context, about runtime.Object, reason, message string) {
	r.report(ctx, about, corev1.EventTypeWarning, reason, message)
}

func (r reporter) note(ctx context.Context, about runtime.Object, reason, message string) {
	r.report(ctx, about, corev1.EventTypeNormal, reason, message)
}

func (r reporter) report(ctx context.Context, about runtime.Object, kind, reason, message string) {
	object, err := reference.GetReference(scheme.Scheme, about)
	if err != nil {
		r.log.Error(err, "Failed to report an event", "reason", reason)
		return
	}
	object.ResourceVersion = ""
	event := newEvent(object, kind, reason, message)
	event.Source = r.source
	_, err = r.client.CoreV1().Events(event.Namespace).Create(ctx, event, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return
	}
	if err != nil {
		r.log.Error(err, "Failed to report an event", "reason", reason, "object", object.Name)
		return
	}
	r.log.Info(message, "reason", reason, "kind", object.Kind, "namespace", object.Namespace, "name", object.Name)
}

func newEvent(object *corev1.ObjectReference, kind, reason, message string) *corev1.Event {
	sum := sha256.Sum256([]byte(string(object.UID) + "\x00" + reason + "\x00" + message))
	now := metav1.NewTime(time.Now())
	name := strings.TrimRight(object.Name[:min(len(object.Name), 200)], "-.") // of 253 bytes that a name may have
	return &corev1.Event{
		// Events about objects of no namespace belong into the default one.
		ObjectMeta:     metav1.ObjectMeta{Name: name + "." + hex.EncodeToString(sum[:8]), Namespace: cmp.Or(object.Namespace, metav1.NamespaceDefault)},
		InvolvedObject: *object,
		Type:           kind,
		Reason:         reason,
		Message:        message,
		FirstTimestamp: now,
		LastTimestamp:  now,
		Count:          1,
	}
}
