package operator

import (
	"context"
	"fmt"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// otherClass says whether what is wanted is a StorageClass, and there is another one of its name: it is left as it is, because what differs cannot
// change. The notice is for users, and empty if that class makes volumes in the same pool.
func (c *cluster) otherClass(ctx context.Context, want *unstructured.Unstructured) (other bool, notice string, err error) {
	if want.GetKind() != storageClassKind.Kind {
		return false, "", nil
	}
	has, wanted := &storagev1.StorageClass{}, &storagev1.StorageClass{}
	// The cache may have none: one that has not the operator's labels.
	if err := c.api.Get(ctx, client.ObjectKeyFromObject(want), has); err != nil {
		return false, "", client.IgnoreNotFound(err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(want.Object, wanted); err != nil {
		return false, "", fmt.Errorf("read the StorageClass %s: %w", want.GetName(), err)
	}
	same := has.Provisioner == wanted.Provisioner && equality.Semantic.DeepEqual(has.Parameters, wanted.Parameters) &&
		equality.Semantic.DeepEqual(has.ReclaimPolicy, wanted.ReclaimPolicy) && equality.Semantic.DeepEqual(has.VolumeBindingMode, wanted.VolumeBindingMode)
	pool := wanted.Parameters[render.PoolParameter]
	if same || has.Provisioner == wanted.Provisioner && has.Parameters[render.PoolParameter] == pool {
		return !same, "", nil
	}
	return true, fmt.Sprintf("The pool %s has no StorageClass: %s is there already, makes volumes elsewhere, and is left as it is. "+
		"Give the pool another overlayClassName, or delete that class", pool, has.Name), nil
}
