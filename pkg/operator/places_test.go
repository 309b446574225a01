package operator

import (
	"context"
	"errors"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A user replaces a pool by one with the right path while it is being deployed to many nodes, and the status that is written afterwards is refused.
// Where mounters have begun is known all the same.
func TestPlaceIsKnownBeforeAnythingIsMountedThere(t *testing.T) {
	object := onClaims()
	object.Status.MountedPools = nil
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"))
	mounter := mounterOf("local", "here")
	replaced := false
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Apply: func(ctx context.Context, api client.WithWatch, wanted runtime.ApplyConfiguration, options ...client.ApplyOption) error {
			err := api.Apply(ctx, wanted, options...)
			if h.has(mounter) && !replaced {
				replaced = true
				h.has(object)
				object.Spec.StoragePools = []hppv1.StoragePool{{Name: "other", Path: "/mnt/other"}}
				must.Succeed(t, h.Update(ctx, object))
			}
			return err
		},
	})
	if _, err := h.reconciler.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKeyFromObject(object)}); !apierrors.IsConflict(err) {
		t.Fatalf("the pool was replaced: %v; the status was written: %v", replaced, err)
	}
	h.reconcile("hpp")
	h.reconcile("hpp")
	if job := cleanUpOf(mounter); !h.has(job) || job.Spec.Template.Spec.Volumes[0].HostPath.Path != "/mnt/local" {
		t.Errorf("it is not unmounted; the object waits for %q", h.waitsFor())
	}
}

// The cache has a mounter only some time after it was made. What was to be mounted is looked for where it is surely found, before its place is forgotten
// or the object goes.
func TestMounterThatTheCacheDoesNotHaveYetIsCleanedUp(t *testing.T) {
	for name, change := range map[string]func(*harness, *hppv1.HostPathProvisioner) error{
		"the pool gets another path": func(h *harness, o *hppv1.HostPathProvisioner) error {
			o.Spec.StoragePools[0].Path = "/mnt/other"
			return h.Update(t.Context(), o)
		},
		"the pool is removed": func(h *harness, o *hppv1.HostPathProvisioner) error {
			o.Spec.StoragePools = []hppv1.StoragePool{{Name: "other", Path: "/mnt/other"}}
			return h.Update(t.Context(), o)
		},
		"the object is deleted": func(h *harness, o *hppv1.HostPathProvisioner) error {
			return errors.Join(h.Delete(t.Context(), o), h.Delete(t.Context(), driverPod("here")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			object, mounter := onClaims(), mounterOf("local", "here")
			object.Status.MountedPools = nil
			h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"))
			h.reconcile("hpp")
			if !h.has(mounter) || !h.has(object) {
				t.Fatal("there is no mounter")
			}
			must.Succeed(t, change(h, object))
			h.reconciler.Client = withoutMounters(h.Client)
			h.reconcile("hpp")
			h.reconciler.Client = h.Client
			h.reconcile("hpp")
			h.reconcile("hpp")
			if job := cleanUpOf(mounter); !h.has(job) || job.Spec.Template.Spec.Volumes[0].HostPath.Path != "/mnt/local" {
				t.Errorf("it is not unmounted; the object waits for %q", h.waitsFor())
			}
		})
	}
}

// The API server of Kubernetes before 1.33 takes no status of an object that breaks a rule of its definition. It is served all the same, and can be
// deleted, with what it has mounted.
func TestObjectWhoseStatusIsInvalidIsServed(t *testing.T) {
	object := onClaims()
	object.Status.MountedPools = nil
	h := newHarness(t, object, nodeThat("here", corev1.ConditionTrue), driverPod("here"))
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		SubResourceUpdate: func(context.Context, client.Client, string, client.Object, ...client.SubResourceUpdateOption) error {
			return apierrors.NewInvalid(hppv1.GroupVersion.WithKind(hppv1.Kind).GroupKind(), object.Name, nil)
		},
	})
	mounter, set := mounterOf("local", "here"), &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	h.attempt("hpp")
	if !h.has(set) || !h.has(mounter) {
		t.Fatalf("the driver is deployed: %v, the pool mounted: %v", h.has(set), h.has(mounter))
	}
	must.Succeed(t, h.Delete(t.Context(), object))
	h.attempt("hpp") // its claim is not bound: the mounter ends first
	h.attempt("hpp")
	if !h.has(cleanUpOf(mounter)) {
		t.Fatal("it is deleted, and the pool is not unmounted")
	}
	h.completed(cleanUpOf(mounter))
	must.Succeed(t, h.Delete(t.Context(), driverPod("here")))
	for range 3 {
		h.attempt("hpp")
	}
	if h.has(mounter) || h.has(object) {
		t.Error("the mounter or the object is left over")
	}
}

// withoutMounters is a cache that has no Deployments yet.
func withoutMounters(api client.Client) client.Client {
	return interceptor.NewClient(api.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
			if object.GetObjectKind().GroupVersionKind().Kind == "Deployment" {
				return apierrors.NewNotFound(appsv1.Resource("deployments"), key.Name)
			}
			return api.Get(ctx, key, object, options...)
		},
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			if list.GetObjectKind().GroupVersionKind().Kind == "DeploymentList" {
				return nil
			}
			return api.List(ctx, list, options...)
		},
	})
}

// The API server takes no condition without a reason, and the upstream operator leaves them so.
func TestPlaceOfAPoolOfTheUpstreamOperatorIsRemembered(t *testing.T) {
	object := onClaims()
	object.Status = hppv1.HostPathProvisionerStatus{ObservedVersion: "v0.23.0", Conditions: []metav1.Condition{{Type: hppv1.ConditionAvailable, Status: metav1.ConditionTrue}}}
	h := newHarness(t, object)
	first := true
	h.reconciler.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		SubResourceUpdate: func(_ context.Context, _ client.Client, _ string, changed client.Object, _ ...client.SubResourceUpdateOption) error {
			now := changed.(*hppv1.HostPathProvisioner).Status
			if first && (len(now.MountedPools) != 1 || now.ObservedGeneration != 0 || now.Conditions[0].Reason == "" || now.Conditions[0].Status != metav1.ConditionTrue) {
				t.Errorf("the status is %+v", now)
			}
			first = false
			return nil
		},
	})
	h.reconcile("hpp")
	if first {
		t.Error("no status is written")
	}
}
