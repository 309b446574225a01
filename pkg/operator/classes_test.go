package operator

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// What matters of a StorageClass cannot change. One that is there stays, also that of an administrator, and the rest of the object does not suffer.
func TestStorageClassThatIsThereStays(t *testing.T) {
	immediate, deleted := storagev1.VolumeBindingImmediate, corev1.PersistentVolumeReclaimDelete
	for name, tt := range map[string]struct {
		provisioner, pool string
		labels            map[string]string
		says              bool
	}{
		"of another pool":   {render.DriverName, "before", render.Owned, true},
		"of another driver": {"example.com", "", nil, true},
		"of the same pool":  {render.DriverName, "local", nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			object := onClaims()
			object.Spec.StoragePools[0].PVCTemplate.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
			class := &storagev1.StorageClass{
				ObjectMeta:  metav1.ObjectMeta{Name: hppv1.DefaultOverlayClass, Labels: tt.labels},
				Provisioner: tt.provisioner, Parameters: map[string]string{render.PoolParameter: tt.pool, "own": "yes"}, ReclaimPolicy: &deleted, VolumeBindingMode: &immediate,
			}
			h := newHarness(t, object, class)
			before := class.DeepCopy()
			h.reconcile("hpp")
			h.reconcile("hpp")
			if !h.has(class) || class.Parameters["own"] != "yes" || class.Parameters[render.PoolParameter] != before.Parameters[render.PoolParameter] {
				t.Errorf("the class has become %+v", class)
			}
			wanted, err := h.reconciler.deploy(t.Context(), object)
			if said := strings.Join(wanted.notices, ""); err != nil || strings.Contains(said, "The pool local has no StorageClass: hpp-overlay is there") != tt.says {
				t.Errorf("it says %q, %v", said, err)
			}
		})
	}
}

// An error that lasts replaces no poll by a pause of many minutes.
func TestErrorsAreRetriedAsOftenAsOtherThings(t *testing.T) {
	limiter, request := retries(), ctrl.Request{NamespacedName: client.ObjectKey{Name: "hpp"}}
	for range 100 {
		if pause := limiter.When(request); pause > poll {
			t.Fatalf("the next try is in %v", pause)
		}
	}
}
