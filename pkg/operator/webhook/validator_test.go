package webhook

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func validator(t *testing.T, objects ...client.Object) *Validator {
	t.Helper()
	scheme := clientgoscheme.Scheme
	must.Succeed(t, hppv1.AddToScheme(scheme))
	return &Validator{Reader: fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).Build()}
}

func provisioner(name string, pools ...hppv1.StoragePool) *hppv1.HostPathProvisioner {
	return &hppv1.HostPathProvisioner{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: hppv1.HostPathProvisionerSpec{StoragePools: pools}}
}

func pool(name, path string) hppv1.StoragePool {
	return hppv1.StoragePool{Name: name, Path: hppv1.HostDirectory(path)}
}

func onClass(name, path, class string) hppv1.StoragePool {
	block, p := corev1.PersistentVolumeBlock, pool(name, path)
	p.PVCTemplate = &hppv1.ClaimTemplate{StorageClassName: &class, VolumeMode: &block}
	return p
}

func class(name, provisioner, pool string) *storagev1.StorageClass {
	c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner}
	if pool != "" {
		c.Parameters = map[string]string{render.PoolParameter: pool}
	}
	return c
}

func volumeOf(name, pool string) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{Driver: render.DriverName, VolumeHandle: name}
	if pool != "" {
		v.Spec.CSI.VolumeAttributes = map[string]string{render.PoolParameter: pool}
	}
	return v
}

func localVolume(name, path string) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
	v.Spec.Local = &corev1.LocalVolumeSource{Path: path}
	return v
}

// legacyVolume is one that the pre-CSI provisioner has made.
func legacyVolume(name, path string) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{"pv.kubernetes.io/provisioned-by": render.LegacyName}}}
	v.Spec.HostPath = &corev1.HostPathVolumeSource{Path: path}
	return v
}

func TestCreate(t *testing.T) {
	legacy := provisioner("hpp")
	legacy.Spec.PathConfig = &hppv1.PathConfig{Path: "/var/old"}
	deleted := provisioner("old")
	deleted.DeletionTimestamp, deleted.Finalizers = &metav1.Time{Time: metav1.Now().Time}, []string{hppv1.Finalizer}
	for name, tt := range map[string]struct {
		there            []client.Object
		object           *hppv1.HostPathProvisioner
		refused, warning string
	}{
		"plain pool":              {nil, provisioner("hpp", pool("local", "/var/hpvolumes")), "", ""},
		"second object":           {[]client.Object{provisioner("first")}, provisioner("hpp", pool("local", "/var/hpvolumes")), "there is first", ""},
		"the first one goes":      {[]client.Object{deleted}, provisioner("hpp", pool("local", "/var/hpvolumes")), "", ""},
		"pathConfig":              {nil, legacy, "", "pathConfig is deprecated"},
		"on a class of its own":   {[]client.Object{class("c", render.DriverName, "a")}, provisioner("hpp", onClass("a", "/a", "c")), "cannot lie on one of them", ""},
		"on its own as legacy":    {[]client.Object{class("c", render.DriverName, "")}, provisioner("hpp", onClass("legacy", "/a", "c")), "cannot lie on one of them", ""},
		"on its own as the only":  {[]client.Object{class("c", render.DriverName, "")}, provisioner("hpp", onClass("a", "/a", "c")), "cannot lie on one of them", ""},
		"beside the legacy pool":  {[]client.Object{class("c", render.DriverName, "")}, provisioner("hpp", pool("legacy", "/l"), onClass("a", "/a", "c")), "", ""},
		"on another pool":         {[]client.Object{class("c", render.DriverName, "b")}, provisioner("hpp", onClass("a", "/a", "c")), "", ""},
		"on another driver":       {[]client.Object{class("c", "ebs.csi.aws.com", "a")}, provisioner("hpp", onClass("a", "/a", "c")), "", ""},
		"on a class that is none": {nil, provisioner("hpp", onClass("a", "/a", "c")), "", "there is no StorageClass c yet"},
		"a volume lies in it":     {[]client.Object{localVolume("pv", "/a/csi/x")}, provisioner("hpp", pool("a", "/a")), "PersistentVolume pv", ""},
		"a volume is it":          {[]client.Object{localVolume("pv", "/a/csi/")}, provisioner("hpp", pool("a", "/a")), "PersistentVolume pv", ""},
		"it lies in a volume":     {[]client.Object{localVolume("pv", "/a")}, provisioner("hpp", pool("a", "/a")), "", "lies in the PersistentVolume pv"},
		"a volume is beside it":   {[]client.Object{localVolume("pv", "/a/csi-2"), localVolume("pv-2", "/a/pvc-1")}, provisioner("hpp", pool("a", "/a")), "", ""},
		"options without effect":  {nil, provisioner("hpp", hppv1.StoragePool{Name: "a", Path: "/a", FSType: "ext4"}), "", "no effect without a pvcTemplate"},
		"template without a mode": {nil, provisioner("hpp", hppv1.StoragePool{Name: "a", Path: "/a", PVCTemplate: &hppv1.ClaimTemplate{}}), "", "has no volumeMode"},
	} {
		t.Run(name, func(t *testing.T) {
			warnings, err := validator(t, tt.there...).ValidateCreate(t.Context(), tt.object)
			wantAnswer(t, warnings, err, tt.warning, tt.refused)
		})
	}
}

// A read that fails, as when the operator ends, says nothing of the object: the API server answers 503, which clients repeat, and not
// that the object is denied. What is refused is denied although something else could not be read.
func TestFailedReadIsNoRefusal(t *testing.T) {
	scheme := validator(t).Reader.(client.Client).Scheme()
	ending := func(reads client.ObjectList) *Validator {
		return &Validator{Reader: fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(interceptor.Funcs{
			List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
				if fmt.Sprintf("%T", list) == fmt.Sprintf("%T", reads) {
					return apierrors.NewForbidden(schema.GroupResource{Resource: "any"}, "", context.Canceled)
				}
				return api.List(ctx, list, options...)
			},
		}).WithObjects(class("c", render.DriverName, "a")).Build()}
	}
	code := func(v *Validator, operation admissionv1.Operation, before, after *hppv1.HostPathProvisioner) int32 {
		t.Helper()
		encoded := func(o *hppv1.HostPathProvisioner) runtime.RawExtension {
			raw, err := json.Marshal(o)
			must.Succeed(t, err)
			return runtime.RawExtension{Raw: raw}
		}
		response := v.Handler(scheme).Handle(t.Context(), admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
			Operation: operation, Object: encoded(after), OldObject: encoded(before),
		}})
		if response.Allowed {
			return 0
		}
		return response.Result.Code
	}
	one, two := provisioner("hpp", pool("a", "/a")), provisioner("hpp", pool("b", "/b"))
	for _, unread := range []client.ObjectList{&hppv1.HostPathProvisionerList{}, &corev1.PersistentVolumeList{}} {
		if got := code(ending(unread), admissionv1.Create, one, one); got != http.StatusServiceUnavailable {
			t.Errorf("without %T the answer to a new object is %d", unread, got)
		}
	}
	if got := code(ending(&corev1.PersistentVolumeList{}), admissionv1.Update, one, two); got != http.StatusServiceUnavailable {
		t.Errorf("the answer to a change is %d", got)
	}
	if got := code(ending(&corev1.PersistentVolumeList{}), admissionv1.Create, one, provisioner("hpp", onClass("a", "/a", "c"))); got != http.StatusForbidden {
		t.Errorf("the answer to an object that cannot work is %d", got)
	}
}

func wantAnswer(t *testing.T, warnings []string, err error, warning, refused string) {
	t.Helper()
	if (err != nil) != (refused != "") || err != nil && !strings.Contains(err.Error(), refused) {
		t.Errorf("the error is %v, want %q", err, refused)
	}
	if text := strings.Join(warnings, "; "); (text != "") != (warning != "") || !strings.Contains(text, warning) {
		t.Errorf("the warnings are %q, want %q", text, warning)
	}
}

func TestUpdate(t *testing.T) {
	one, two := pool("a", "/a"), pool("b", "/b")
	legacy := provisioner("hpp")
	legacy.Spec.PathConfig = &hppv1.PathConfig{Path: "/a"}
	withPrefix := legacy.DeepCopy()
	withPrefix.Spec.PathConfig.UseNamingPrefix = true
	going := provisioner("hpp", two)
	going.DeletionTimestamp = &metav1.Time{Time: metav1.Now().Time}
	for name, tt := range map[string]struct {
		there            []client.Object
		before, after    *hppv1.HostPathProvisioner
		refused, warning string
	}{
		"pool with volumes goes":         {[]client.Object{volumeOf("pv-1", "a"), volumeOf("pv-0", "a")}, provisioner("hpp", one, two), provisioner("hpp", two), "pool a may have 2 PersistentVolumes, such as pv-0", ""},
		"pool of others goes":            {[]client.Object{volumeOf("pv-1", "b")}, provisioner("hpp", one, two), provisioner("hpp", two), "", ""},
		"pathConfig with volumes goes":   {[]client.Object{volumeOf("pv-1", "")}, legacy, provisioner("hpp", two), "pool legacy may have 1 PersistentVolume, such as pv-1", ""},
		"pathConfig becomes pool legacy": {[]client.Object{volumeOf("pv-1", "")}, legacy, provisioner("hpp", pool("legacy", "/a")), "", ""},
		"pathConfig leaves volumes":      {[]client.Object{legacyVolume("pv-2", "/a/pv-2"), legacyVolume("pv-1", "/a/pv-1")}, legacy, provisioner("hpp", pool("legacy", "/a")), "", "2 PersistentVolumes of the pre-CSI provisioner, such as pv-1"},
		"pathConfig leaves one volume":   {[]client.Object{legacyVolume("pv-1", "/a/pv-1")}, legacy, provisioner("hpp", pool("legacy", "/a")), "", "1 PersistentVolume of the pre-CSI provisioner, such as pv-1"},
		"pathConfig stays":               {[]client.Object{legacyVolume("pv-1", "/a/pv-1")}, legacy, withPrefix, "", "pathConfig is deprecated"},
		"object that is deleted":         {[]client.Object{volumeOf("pv-1", "a")}, provisioner("hpp", one, two), going, "", ""},
		"nothing of the spec":            {[]client.Object{localVolume("pv", "/a/csi")}, legacy, legacy, "", ""},
		"pool that is there":             {[]client.Object{localVolume("pv", "/a/csi")}, provisioner("hpp", one), provisioner("hpp", one, two), "", ""},
		"pool that is new":               {[]client.Object{localVolume("pv", "/b/csi")}, provisioner("hpp", one), provisioner("hpp", one, two), "PersistentVolume pv", ""},
	} {
		t.Run(name, func(t *testing.T) {
			warnings, err := validator(t, tt.there...).ValidateUpdate(t.Context(), tt.before, tt.after)
			wantAnswer(t, warnings, err, tt.warning, tt.refused)
		})
	}
}
