package provisioner

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
)

// bounds are the PersistentVolumes, by uid, that a claim had while this process has seen them.
type bounds struct{ uids sync.Map }

// follow has the bounds know what an informer says from when it is started on.
func (b *bounds) follow(volumes cache.SharedInformer) error {
	_, err := volumes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    b.see,
		UpdateFunc: func(_, now any) { b.see(now) },
		DeleteFunc: b.forget,
	})
	return err
}

func (b *bounds) see(object any) {
	if pv, ok := object.(*corev1.PersistentVolume); ok && pv.Status.Phase == corev1.VolumeBound {
		b.uids.Store(pv.UID, nil)
	}
}

func (b *bounds) forget(object any) {
	if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = last.Obj
	}
	if pv, ok := object.(*corev1.PersistentVolume); ok {
		b.uids.Delete(pv.UID)
	}
}

func (b *bounds) had(pv *corev1.PersistentVolume) bool {
	_, had := b.uids.Load(pv.UID)
	return had
}
