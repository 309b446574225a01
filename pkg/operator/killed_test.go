package operator

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"

	"kubevirt.io/hostpath-provisioner/test/must"
)

var errKilled = errors.New("killed")

// A limit is how many writes an operator makes before it is killed.
type limit struct{ left, made int }

func (l *limit) write(do func() error) error {
	if l.left == 0 {
		return errKilled
	}
	l.left--
	l.made++
	return do()
}

// limited is a client that makes no more writes than a limit.
func (l *limit) limited(api client.Client) client.Client {
	return interceptor.NewClient(api.(client.WithWatch), interceptor.Funcs{
		Apply: func(ctx context.Context, c client.WithWatch, o runtime.ApplyConfiguration, opts ...client.ApplyOption) error {
			return l.write(func() error { return c.Apply(ctx, o, opts...) })
		},
		Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			return l.write(func() error { return c.Patch(ctx, o, p, opts...) })
		},
		Delete: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.DeleteOption) error {
			return l.write(func() error { return c.Delete(ctx, o, opts...) })
		},
		SubResourceUpdate: func(ctx context.Context, c client.Client, kind string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			return l.write(func() error { return c.SubResource(kind).Update(ctx, o, opts...) })
		},
	})
}

// replace has another operator work on the same cluster.
func (h *harness) replace(api client.Client) {
	before := h.reconciler
	h.reconciler = &Reconciler{
		Client: api, APIReader: h.Client, Recorder: before.Recorder, Optional: before.Optional, TLS: before.TLS, Config: before.Config,
		manifests: before.manifests, kinds: kindDiscovery{ask: before.kinds.ask},
	}
}

// owned is all that the operator has made, without what differs from time to time.
func (h *harness) owned() map[string]any {
	h.t.Helper()
	found := map[string]any{}
	for _, kind := range ownedKinds {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(kind)
		must.Succeed(h.t, h.List(h.t.Context(), list))
		for _, object := range list.Items {
			object.SetResourceVersion("")
			object.SetManagedFields(nil)
			object.SetCreationTimestamp(metav1.Time{})
			found[kind.Kind+" "+object.GetName()] = object.Object
		}
	}
	return found
}

// However many writes an operator made before it was killed, the next one makes of it what one alone would have.
func TestKilledAtAnyWrite(t *testing.T) {
	undisturbed := newHarness(t, stored("hpp", 1, false))
	undisturbed.reconcile("hpp")
	want := undisturbed.owned()
	for name, deleted := range map[string]bool{"while it deploys": false, "while it removes": true} {
		t.Run(name, func(t *testing.T) {
			for writes := 0; ; writes++ {
				h := newHarness(t, stored("hpp", 1, false))
				if deleted {
					h.reconcile("hpp")
					must.Succeed(h.t, h.Delete(t.Context(), stored("hpp", 1, false)))
				}
				l := &limit{left: writes}
				h.replace(l.limited(h.Client))
				_, err := h.reconciler.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "hpp"}})
				if err == nil {
					if l.made < 5 {
						t.Errorf("it makes %d writes alone: nothing was tested", l.made)
					}
					return
				}
				if !errors.Is(err, errKilled) {
					t.Fatal(err)
				}
				h.replace(h.Client)
				h.reconcile("hpp")
				expected := want
				if deleted {
					expected = map[string]any{}
				}
				if diff := cmp.Diff(expected, h.owned()); diff != "" {
					t.Fatalf("killed after %d writes: %s", writes, diff)
				}
				if there := h.has(&hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: "hpp"}}); there == deleted {
					t.Fatalf("killed after %d writes: the object is there: %v", writes, there)
				}
			}
		})
	}
}
