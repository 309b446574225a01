package move

import (
	"context"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
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
