package move

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
)

// An apiServer is read itself: a cache may be late.
type apiServer struct {
	writer client.Client
	reader client.Reader
}

// find reads an object, if it is there.
func (a apiServer) find(ctx context.Context, key client.ObjectKey, to client.Object) (bool, error) {
	err := a.reader.Get(ctx, key, to)
	return err == nil, client.IgnoreNotFound(err)
}

// eachPage calls do for what a namespace has of a kind, some at a time.
func eachPage[T any, L interface {
	*T
	client.ObjectList
}](ctx context.Context, a apiServer, namespace string, do func(page L),
) error {
	for next := ""; ; {
		page := L(new(T))
		if err := a.reader.List(ctx, page, client.InNamespace(namespace), client.Limit(500), client.Continue(next)); err != nil {
			return err
		}
		do(page)
		if next = page.GetContinue(); next == "" {
			return nil
		}
	}
}

// another is a PersistentVolume, but for the one of a name, that leads to a volume on a node, or may; empty for none.
func (a apiServer) another(ctx context.Context, than, handle, on string) (name string, err error) {
	err = place.EachVolume(ctx, a.reader, func(one *corev1.PersistentVolume) {
		if one.Name != than && place.OfDriver(one) && one.Spec.CSI.VolumeHandle == handle && slices.Contains([]string{on, ""}, place.NodeOfVolume(one)) {
			name = one.Name
		}
	})
	return name, err
}

// ledByTwo says that a volume cannot move because another PersistentVolume leads to it, whose claim would have nothing any more.
func ledByTwo(another string) string {
	if another == "" {
		return ""
	}
	return fmt.Sprintf("the PersistentVolume %s leads to the same volume: keep one of the two, and delete the other once its policy is Retain", another)
}

// delete deletes an object that was read.
func (a apiServer) delete(ctx context.Context, object client.Object) error {
	return client.IgnoreNotFound(a.writer.Delete(ctx, object, client.Preconditions{UID: ptr.To(object.GetUID())}))
}

// drop deletes an object that was read, and that nothing keeps any more.
func (a apiServer) drop(ctx context.Context, object client.Object) error {
	if controllerutil.RemoveFinalizer(object, v1alpha1.Finalizer) {
		if err := a.writer.Update(ctx, object); err != nil {
			return client.IgnoreNotFound(err)
		}
	}
	return a.delete(ctx, object)
}
