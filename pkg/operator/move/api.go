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
