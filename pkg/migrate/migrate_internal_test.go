package migrate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

const (
	driverName = "kubevirt.io.hostpath-provisioner"
	pvName     = "pvc-11111111-2222-3333-4444-555555555555"
)

// A harness is a node with real directories: the pool "local" of the driver, and beside it the directory of a provisioner.
// The API server is the client library's stand-in, which binds and deletes at once. What a real one does with
// finalizers and preconditions is asked in test/cluster.
type harness struct {
	*testing.T
	config Config
	client *fake.Clientset
	driver Driver
	output bytes.Buffer
}

// A driver has one pool.
type driver struct{ set *pool.Set }

func (driver) Name(context.Context) (string, error) { return driverName, nil }

func (d driver) Directory(ctx context.Context, parameters map[string]string) (dir.ID, error) {
	name, err := volume.ParsePoolName(parameters["storagePool"])
	if err != nil {
		return dir.ID{}, err
	}
	return d.set.Directory(ctx, name)
}

func (d driver) Volume(ctx context.Context, id volume.ID) (client.Volume, error) {
	v, err := d.set.Volume(ctx, id)
	return client.Volume{
		Context:  map[string]string{"storagePool": v.Pool.String()},
		Segments: []map[string]string{{"topology.hostpath.csi/node": "node-a"}},
	}, err
}

// serve starts a process that serves a pool until the test ends.
func serve(t *testing.T, name, path string) *pool.Set {
	t.Helper()
	n := pooltest.New(t, t.TempDir())
	set := n.Start(parsePools(t, name, path), n.Options("node-a"))
	must.Succeed(t, set.Wait(t.Context()))
	return set
}

func parsePools(t *testing.T, name, path string) []poolconfig.Config {
	t.Helper()
	configs, err := poolconfig.Parse(fmt.Sprintf(`[{"name":%q,"path":%q,"enforcement":"none"}]`, name, path), "/")
	must.Succeed(t, err)
	return configs
}

// newHarness has one volume of the provisioner, in the directory that is given, below root.
func newHarness(t *testing.T, directory string, changes ...func(*corev1.PersistentVolume, *corev1.PersistentVolumeClaim)) *harness {
	t.Helper()
	return newHarnessOn(t, t.TempDir(), directory, changes...)
}

// newHarnessOn has the root be another one.
func newHarnessOn(t *testing.T, root, directory string, changes ...func(*corev1.PersistentVolume, *corev1.PersistentVolumeClaim)) *harness {
	t.Helper()
	pools, from := filepath.Join(root, "pool"), filepath.Join(root, directory)
	h := &harness{T: t, driver: driver{serve(t, "local", pools)}, config: Config{
		Node: "node-a", Pools: parsePools(t, "local", pools), From: []string{filepath.Join(root, "old")}, Class: "hostpath-csi",
		Directory: filepath.Join(root, "saved"), HostRoot: "/", Chosen: Chosen{All: true}, Timeout: time.Minute,
	}}
	pv, claim := pair(filepath.Join(from, pvName))
	for _, change := range changes {
		change(pv, claim)
	}
	must.Succeed(t, os.MkdirAll(origin.Path(pv), 0o777))
	must.Succeed(t, os.WriteFile(filepath.Join(origin.Path(pv), "data"), []byte("kept"), 0o600))
	h.client = fake.NewClientset(pv, claim,
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a", Labels: map[string]string{corev1.LabelHostname: "host-a"}}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-b"}},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "hostpath-csi"}, Provisioner: driverName, Parameters: map[string]string{"storagePool": "local"}},
	)
	h.control()
	return h
}

// control has claims bound to the PersistentVolumes that are made for them, as the controllers do.
func (h *harness) control() {
	made := 0
	h.client.PrependReactor("create", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if isDryRun(action) {
			return true, action.(clienttesting.CreateAction).GetObject(), nil
		}
		made++
		action.(clienttesting.CreateAction).GetObject().(metav1.Object).SetUID(types.UID(fmt.Sprintf("uid-%d", made)))
		return false, nil, nil
	})
	volumes, claims := corev1.SchemeGroupVersion.WithResource("persistentvolumes"), corev1.SchemeGroupVersion.WithResource("persistentvolumeclaims")
	h.client.PrependReactor("get", "persistentvolumes", func(clienttesting.Action) (bool, runtime.Object, error) {
		v, errV := h.client.Tracker().Get(volumes, "", pvName)
		c, errC := h.client.Tracker().Get(claims, "space", "data")
		if errV != nil || errC != nil {
			return false, nil, nil //nolint:nilerr // there is nothing to bind
		}
		pv, claim := v.(*corev1.PersistentVolume), c.(*corev1.PersistentVolumeClaim)
		if ref := pv.Spec.ClaimRef; ref.UID == "" || ref.UID == claim.UID && claim.Status.Phase != corev1.ClaimBound {
			ref.UID, pv.Status.Phase, claim.Status.Phase = claim.UID, corev1.VolumeBound, corev1.ClaimBound
			err := errors.Join(h.client.Tracker().Update(volumes, pv, ""), h.client.Tracker().Update(claims, claim, "space"))
			return err != nil, nil, err
		}
		return false, nil, nil
	})
}

// isDryRun reports whether the API server is only asked what it would do.
func isDryRun(action clienttesting.Action) bool {
	create, is := action.(clienttesting.CreateActionImpl)
	return is && slices.Equal(create.CreateOptions.DryRun, []string{metav1.DryRunAll})
}

// wantNoChange expects that the cluster was only asked.
func (h *harness) wantNoChange() {
	h.Helper()
	for _, action := range h.client.Actions() {
		if verb := action.GetVerb(); verb != "get" && verb != "list" && !isDryRun(action) {
			h.Errorf("%s of %s", verb, action.GetResource().Resource)
		}
	}
}

// pair is what the provisioner makes.
func pair(path string) (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
	class, size := "hostpath-provisioner", corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1000001")}
	meta := func(name string, annotations map[string]string) metav1.ObjectMeta {
		annotations["example.com/note"] = "stays"
		return metav1.ObjectMeta{
			Name: name, UID: types.UID(name + "-uid"), Labels: map[string]string{"app": "db"}, Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "owner", UID: "owner-uid"}},
		}
	}
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: meta("data", map[string]string{bindCompleted: "yes", provisioner.StorageProvisioner: origin.PerNodeName}),
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}, StorageClassName: &class, VolumeName: pvName,
			Resources: corev1.VolumeResourceRequirements{Requests: size},
		},
		Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
	claim.Namespace = "space"
	pv := &corev1.PersistentVolume{
		ObjectMeta: meta(pvName, map[string]string{origin.ProvisionedBy: origin.PerNodeName, origin.Identity: origin.PerNodeName, origin.ProvisionOnNode: "node-a"}),
		Spec: corev1.PersistentVolumeSpec{
			// As the provisioner of KubeVirt says: that of the disk.
			Capacity:    corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Ti")},
			AccessModes: claim.Spec.AccessModes, PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete, StorageClassName: class,
			ClaimRef:               &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: "space", Name: "data", UID: claim.UID},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}},
			NodeAffinity:           affinity([]map[string]string{{corev1.LabelHostname: "host-a"}}),
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound},
	}
	pv.Finalizers = []string{volumeProtection, provisionerFinalizer}
	return pv, claim
}

// run runs the command once.
func (h *harness) run(change func(*Config)) error {
	c := h.config
	change(&c)
	return Run(h.Context(), c, h.client, h.driver, &h.output)
}

func apply(c *Config) { c.Apply = true }
func undo(c *Config)  { c.Apply, c.Undo = true, true }

func (h *harness) objects() (*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {
	h.Helper()
	pv, err := h.client.CoreV1().PersistentVolumes().Get(h.Context(), pvName, metav1.GetOptions{})
	must.Succeed(h.T, err)
	claim, err := h.client.CoreV1().PersistentVolumeClaims("space").Get(h.Context(), "data", metav1.GetOptions{})
	must.Succeed(h.T, err)
	return pv, claim
}

// wantCSI checks everything that a migration makes.
func (h *harness) wantCSI() {
	h.Helper()
	pv, claim := h.objects()
	if claim.Status.Phase != corev1.ClaimBound || *claim.Spec.StorageClassName != "hostpath-csi" || pv.Spec.StorageClassName != "hostpath-csi" {
		h.Errorf("claim %s, of classes %s and %s", claim.Status.Phase, *claim.Spec.StorageClassName, pv.Spec.StorageClassName)
	}
	if pv.Spec.CSI == nil || pv.Spec.CSI.Driver != driverName || pv.Spec.CSI.VolumeHandle != pvName || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		h.Errorf("PersistentVolume %+v", pv.Spec)
	}
	if pv.Annotations[origin.ProvisionedBy] != driverName || claim.Annotations[provisioner.StorageProvisioner] != "" {
		h.Errorf("annotations %v and %v", pv.Annotations, claim.Annotations)
	}
	if got := pv.Spec.AccessModes; len(got) != 1 || got[0] != corev1.ReadWriteMany {
		h.Errorf("access modes %v", got)
	}
	if pv.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key != "topology.hostpath.csi/node" {
		h.Errorf("affinity %v", pv.Spec.NodeAffinity)
	}
	for _, meta := range []metav1.ObjectMeta{pv.ObjectMeta, claim.ObjectMeta} {
		if meta.Labels["app"] != "db" || meta.Annotations["example.com/note"] != "stays" || len(meta.OwnerReferences) != 1 {
			h.Errorf("%s lost labels, annotations or owners: %+v", meta.Name, meta)
		}
	}
	h.wantData(filepath.Join(h.config.Pools[0].Path, pvName))
	id, err := volume.ParseID(pvName)
	must.Succeed(h.T, err)
	v, err := h.driver.(driver).set.Volume(h.Context(), id)
	if capacity := pv.Spec.Capacity.Storage().Value(); err != nil || v.Bytes != 1003520 || capacity != v.Bytes {
		h.Errorf("the driver reports %+v (%v), the PersistentVolume has %d", v, err, capacity)
	}
}

// changed is another client's update of both objects.
func (h *harness) changed(change func(*metav1.ObjectMeta)) {
	h.Helper()
	pv, claim := h.objects()
	change(&pv.ObjectMeta)
	change(&claim.ObjectMeta)
	_, err := h.client.CoreV1().PersistentVolumes().Update(h.Context(), pv, metav1.UpdateOptions{})
	must.Succeed(h.T, err)
	_, err = h.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(h.Context(), claim, metav1.UpdateOptions{})
	must.Succeed(h.T, err)
}

func (h *harness) wantData(directory string) {
	h.Helper()
	if data, err := os.ReadFile(filepath.Join(directory, "data")); err != nil || string(data) != "kept" {
		h.Errorf("data %q (%v)", data, err)
	}
}

// wantPlain checks that everything is as it was.
func (h *harness) wantPlain(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) {
	h.Helper()
	gotPV, gotClaim := h.objects()
	pv, claim = pv.DeepCopy(), claim.DeepCopy()
	delete(claim.Annotations, bindCompleted) // the controller's, which is not here
	claim.UID, pv.UID, pv.Spec.ClaimRef.UID, pv.Finalizers = gotClaim.UID, gotPV.UID, gotClaim.UID, nil
	claim.ResourceVersion, pv.ResourceVersion, gotPV.Finalizers = gotClaim.ResourceVersion, gotPV.ResourceVersion, nil
	delete(gotClaim.Annotations, bindCompleted)
	gotPV.Status, gotClaim.Status = pv.Status, claim.Status
	gotPV.TypeMeta, gotClaim.TypeMeta = pv.TypeMeta, claim.TypeMeta
	gotPV.ManagedFields, gotClaim.ManagedFields, pv.ManagedFields, claim.ManagedFields = nil, nil, nil, nil
	if diff := cmp.Diff(pv, gotPV) + cmp.Diff(claim, gotClaim); diff != "" {
		h.Error(diff)
	}
	h.wantData(origin.Path(pv))
	if left, err := filepath.Glob(filepath.Join(h.config.Directory, "*.json")); err != nil || len(left) > 0 {
		h.Errorf("left: %v (%v)", left, err)
	}
}

// records are those of a directory.
func records(directory string) []string {
	found, _ := filepath.Glob(filepath.Join(directory, ".hostpath-provisioner/volumes/*"))
	return found
}

// Each run is ended after some steps, and the next goes on, or back.
func TestStopAfterEachStep(t *testing.T) {
	for _, directory := range []string{"old", "pool"} {
		t.Run(directory, func(t *testing.T) {
			h := newHarness(t, directory)
			pv, claim := h.objects()
			for steps := 1; ; steps++ {
				h.output.Reset()
				must.Succeed(t, h.run(func(c *Config) { c.Apply, c.Steps = true, steps }))
				complete := !strings.Contains(h.output.String(), "stopped after")
				must.Succeed(t, h.run(undo))
				h.wantPlain(pv, claim)
				if left := records(h.config.Pools[0].Path); len(left) > 0 {
					t.Errorf("records %v", left)
				}
				must.Succeed(t, h.run(apply))
				h.wantCSI()
				must.Succeed(t, h.run(func(c *Config) { undo(c); c.Steps = steps }))
				must.Succeed(t, h.run(apply))
				h.wantCSI()
				must.Succeed(t, h.run(undo))
				if t.Failed() || steps > 20 {
					t.Fatalf("with %d steps a run:\n%s", steps, h.output.String())
				}
				if complete {
					return
				}
			}
		})
	}
}

// A step whose object has changed since it was read is done again, and counted once.
func TestChangedObjectDoesNotCountAsStep(t *testing.T) {
	h := newHarness(t, "old")
	changed := 0
	h.client.PrependReactor("delete", "persistentvolumes", func(clienttesting.Action) (bool, runtime.Object, error) {
		if changed++; changed > 1 {
			return false, nil, nil
		}
		return true, nil, apierrors.NewConflict(corev1.Resource("persistentvolumes"), pvName, errors.New("it was released"))
	})
	must.Succeed(t, h.run(func(c *Config) { c.Apply, c.Steps = true, 4 }))
	if _, err := h.client.CoreV1().PersistentVolumes().Get(t.Context(), pvName, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the PersistentVolume is not deleted (%v):\n%s", err, h.output.String())
	}
}

func TestDryRunChangesNothing(t *testing.T) {
	h := newHarness(t, "old")
	pv, claim := h.objects()
	must.Succeed(t, h.run(func(*Config) {}))
	for _, words := range []string{"space/data (PersistentVolume " + pvName, "save both objects", "Retain", "rename " + origin.Path(pv) + " to ",
		"(1003520 bytes)", "StorageClass hostpath-csi", "back to Delete", "1 claim on node node-a, 0 stopped", "nothing was changed"} {
		if !strings.Contains(h.output.String(), words) {
			t.Errorf("%q is missing in:\n%s", words, h.output.String())
		}
	}
	h.wantNoChange()
	h.wantPlain(pv, claim)
}

// A refusal is a volume that is not as it should be, or a harness, and words of what is said of it.
type refusal struct {
	objects func(*corev1.PersistentVolume, *corev1.PersistentVolumeClaim)
	harness func(*harness) error
	want    string
}

func TestRefusedByItsObjects(t *testing.T) {
	refused(t, map[string]refusal{
		"made by an unknown provisioner": {func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
			delete(pv.Annotations, origin.ProvisionedBy)
		}, choosing("data"), `made by ""`},
		"not bound": {func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
			pv.Status.Phase = corev1.VolumeReleased
		}, nil, "not bound to each other"},
		"a foreign finalizer": {func(_ *corev1.PersistentVolume, c *corev1.PersistentVolumeClaim) {
			c.Finalizers = []string{"example.com/backup"}
		}, nil, "finalizer example.com/backup"},
		"mount options": {func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
			pv.Spec.MountOptions = []string{"noatime"}
		}, nil, "mountOptions"},
		// Kubelet gives a CSI driver the first access mode, and asks for none of a hostPath volume.
		"read-only first": {func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce}
		}, nil, `{"spec":{"accessModes":["ReadWriteMany","ReadWriteOnce","ReadOnlyMany"]}}`},
		"read-only alone": {func(pv *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) {
			pv.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadOnlyMany}
			claim.Spec.AccessModes = pv.Spec.AccessModes
		}, nil, `{"spec":{"accessModes":["ReadWriteOnce","ReadOnlyMany"]}}`},
	})
}

func TestRefusedByTheCluster(t *testing.T) {
	refused(t, map[string]refusal{
		"a pod uses the claim":                       {nil, adding(podWith(corev1.PodRunning)), "in use by pod user"},
		"a pod waits for it":                         {nil, adding(podWith(corev1.PodPending)), "in use by pod user"},
		"another volume has the directory":           {nil, (*harness).twice, "PersistentVolume other has the directory"},
		"another volume, written in another way":     {nil, withVolume("//."), "PersistentVolume other has the directory"},
		"a volume of a directory in it":              {nil, withVolume("/sub/"), "PersistentVolume other has the directory"},
		"a pod has the directory":                    {nil, withHostPath(""), "pod other/plain has the directory"},
		"a pod has a directory in it":                {nil, withHostPath("/sub/../sub"), "pod other/plain has the directory"},
		"a pod has a link to it":                     {nil, withLink(pvName, "/sub"), "pod other/plain has the directory"},
		"a pod has a link to the directory above":    {nil, withLink("", "/"+pvName), "pod other/plain has the directory"},
		"a volume at a link to the pool":             {nil, (*harness).linkedTarget, "PersistentVolume other has the directory"},
		"a pod has a path that leads nowhere":        {nil, (*harness).loop, "too many levels of symbolic links"},
		"a pod has it as the subPath of a claim":     {nil, (*harness).subPathOfClaim, "pod other/plain has the directory"},
		"two programs in one pool":                   {nil, (*harness).served, "two programs serve this pool"},
		"two programs in one pool, by a link":        {nil, (*harness).servedByLink, "two programs serve this pool"},
		"a claim that is not here":                   {nil, choosing("else"), "claim space/else: no volume"},
		"a class that is not there":                  {nil, func(h *harness) error { h.config.Class = "none"; return nil }, `"none" not found`},
		"a quota that the new claim would exceed":    {nil, refusing("persistentvolumeclaims"), "would refuse the new claim, beside the old one: "},
		"a webhook that would refuse the new volume": {nil, refusing("persistentvolumes"), "would refuse the new PersistentVolume: "},
	})
}

func TestRefusedByTheNode(t *testing.T) {
	refused(t, map[string]refusal{
		"another directory":                     {nil, func(h *harness) error { h.config.From = nil; return nil }, "nor in one that --from-dir names"},
		"the directory is gone":                 {nil, func(h *harness) error { return os.RemoveAll(h.path()) }, "is not a directory"},
		"the name is taken":                     {nil, func(h *harness) error { return os.Mkdir(filepath.Join(h.config.Pools[0].Path, pvName), 0o700) }, "is there already"},
		"another pool has the name":             {nil, func(h *harness) error { h.driver = twoPools{h.driver}; return nil }, "the driver has a volume " + pvName + " already"},
		"the directory is immutable":            {nil, (*harness).immutable, "is immutable or append-only"},
		"a lost volume has the name":            {nil, (*harness).lost, "the driver has a volume " + pvName + " already"},
		"the node's files are not seen":         {nil, func(h *harness) error { h.config.HostRoot = h.TempDir(); return nil }, "is not the root directory of the node"},
		"the driver is away":                    {nil, func(h *harness) error { h.driver = away{}; return nil }, "ask the driver"},
		"a pool that the driver does not serve": {nil, func(h *harness) error { h.driver = hangs{h.driver}; return nil }, "pool hangs"},
	})
}

// refused expects of each that it is said, and that nothing has begun.
func refused(t *testing.T, refusals map[string]refusal) {
	t.Helper()
	for title, tt := range refusals {
		t.Run(title, func(t *testing.T) {
			if tt.objects == nil {
				tt.objects = func(*corev1.PersistentVolume, *corev1.PersistentVolumeClaim) {}
			}
			h := newHarness(t, "old", tt.objects)
			if tt.harness != nil {
				must.Succeed(t, tt.harness(h))
			}
			err := h.run(apply)
			if said := fmt.Sprint(h.output.String(), err); err == nil || !strings.Contains(said, tt.want) {
				t.Errorf("%v, without %q:\n%s", err, tt.want, h.output.String())
			}
			if left, _ := filepath.Glob(filepath.Join(h.config.Directory, "*.json")); len(left) > 0 {
				t.Errorf("it was begun: %v", left)
			}
			h.wantNoChange()
		})
	}
}

// podWith is one that has the claim.
func podWith(phase corev1.PodPhase) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: "user"}, Status: corev1.PodStatus{Phase: phase},
		Spec: corev1.PodSpec{NodeName: "node-a", Volumes: []corev1.Volume{{VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}}}
}

func adding(object runtime.Object) func(*harness) error {
	return func(h *harness) error { return h.client.Tracker().Add(object) }
}

// twice has another PersistentVolume of the same directory.
func (h *harness) twice() error {
	pv, _ := h.objects()
	pv.Name = "other"
	return h.client.Tracker().Add(pv)
}

// withVolume has a PersistentVolume that was made by hand, for any node.
func withVolume(suffix string) func(*harness) error {
	return func(h *harness) error {
		return h.client.Tracker().Add(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: h.path() + suffix}}}})
	}
}

// withHostPath has a pod without a claim.
func withHostPath(suffix string) func(*harness) error {
	return func(h *harness) error { return h.client.Tracker().Add(podAt(h.path()+suffix, "node-a")) }
}

// withLink has a pod with a path below a link to the directory of the provisioner, or to one in it.
func withLink(to, below string) func(*harness) error {
	return func(h *harness) error {
		link := filepath.Join(h.TempDir(), "link")
		return errors.Join(os.Symlink(filepath.Join(h.config.From[0], to), link), h.client.Tracker().Add(podAt(link+below, "node-a")))
	}
}

// subPathOfClaim has a PersistentVolume of the directory above, and a pod that has the directory by its claim.
func (h *harness) subPathOfClaim() error {
	pod := podAt("", "node-a")
	pod.Spec.Volumes[0] = corev1.Volume{Name: "above", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "all"}}}
	pod.Spec.Containers = []corev1.Container{{VolumeMounts: []corev1.VolumeMount{{Name: "above", SubPath: pvName}}}}
	return errors.Join(h.client.Tracker().Add(pod), h.client.Tracker().Add(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: corev1.PersistentVolumeSpec{
		ClaimRef:               &corev1.ObjectReference{Namespace: pod.Namespace, Name: "all"},
		PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: filepath.Dir(h.path())}}}}))
}

// linkedTarget has a PersistentVolume of where the directory goes.
func (h *harness) linkedTarget() error {
	link := filepath.Join(h.TempDir(), "link")
	return errors.Join(os.Symlink(h.config.Pools[0].Path, link), h.client.Tracker().Add(&corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: filepath.Join(link, pvName)}}}}))
}

// loop has a pod with a path of which it cannot be said where it leads.
func (h *harness) loop() error {
	link := filepath.Join(h.TempDir(), "link")
	return errors.Join(os.Symlink(link, link), h.client.Tracker().Add(podAt(link, "node-a")))
}

// servedByLink has a provisioner in the pool that knows it by another path.
func (h *harness) servedByLink() error {
	link := filepath.Join(h.TempDir(), "link")
	pod := podAt(link, "node-a")
	pod.Spec.Containers = []corev1.Container{{Args: []string{"--pv-dir=" + link}}}
	return errors.Join(os.Symlink(h.config.Pools[0].Path, link), h.client.Tracker().Add(pod))
}

func podAt(path, node string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "other", Name: "plain"}, Status: corev1.PodStatus{Phase: corev1.PodRunning},
		Spec: corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}}}}}
}

// The pods of other nodes have other directories, and those of the provisioner have all of them.
func TestMigrationBesidePodsWithOtherDirectories(t *testing.T) {
	h := newHarness(t, "old")
	elsewhere, above := podAt(h.path(), "node-b"), podAt(filepath.Dir(h.path()), "node-a")
	above.Name = "above"
	must.Succeed(t, h.client.Tracker().Add(elsewhere))
	must.Succeed(t, h.client.Tracker().Add(above))
	must.Succeed(t, h.run(apply))
	h.wantCSI()
}

// It came after the claim was found to be free.
func TestPodThatComesLater_stopsTheMove(t *testing.T) {
	h := newHarness(t, "old")
	path := h.path()
	must.Succeed(t, h.run(func(c *Config) { c.Apply, c.Steps = true, 4 })) // both objects are deleted
	must.Succeed(t, h.client.Tracker().Add(podAt(path, "node-a")))
	if err := h.run(apply); err == nil || !strings.Contains(h.output.String(), "pod other/plain has the directory") {
		t.Errorf("%v\n%s", err, h.output.String())
	}
	h.wantData(path)
	must.Succeed(t, h.client.CoreV1().Pods("other").Delete(t.Context(), "plain", metav1.DeleteOptions{}))
	must.Succeed(t, h.run(apply))
	h.wantCSI()
}

func TestUndoOfADirectoryThatAPodHas_changesNothing(t *testing.T) {
	h := newHarness(t, "old")
	must.Succeed(t, h.run(apply))
	must.Succeed(t, h.client.Tracker().Add(podAt(filepath.Join(h.config.Pools[0].Path, pvName, "sub"), "node-a")))
	if err := h.run(undo); err == nil || !strings.Contains(h.output.String(), "pod other/plain has the directory") {
		t.Errorf("%v\n%s", err, h.output.String())
	}
	h.wantCSI()
}

// All nodes have the directory.
func TestUndoInASharedPool_seesThePodsOfOtherNodes(t *testing.T) {
	h := newHarness(t, "old")
	h.config.Pools[0].Shared = true
	must.Succeed(t, h.run(apply))
	must.Succeed(t, h.client.Tracker().Add(podAt(filepath.Join(h.config.Pools[0].Path, pvName), "node-b")))
	if err := h.run(undo); err == nil || !strings.Contains(h.output.String(), "pod other/plain has the directory") {
		t.Errorf("%v\n%s", err, h.output.String())
	}
	h.wantCSI()
}

// served has a provisioner in the pool.
func (h *harness) served() error {
	return h.client.Tracker().Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: "provisioner"}, Spec: corev1.PodSpec{
		NodeName: "node-a", Containers: []corev1.Container{{Env: []corev1.EnvVar{{Name: "PV_DIR", Value: h.config.Pools[0].Path}}}}}})
}

// choosing names one claim.
func choosing(name string) func(*harness) error {
	return func(h *harness) error {
		h.config.Chosen = Chosen{Claims: []types.NamespacedName{{Namespace: "space", Name: name}}}
		return nil
	}
}

func (h *harness) path() string {
	pv, _ := h.objects()
	return origin.Path(pv)
}

// refusing has the API server refuse new objects of a kind.
func refusing(resource string) func(*harness) error {
	return func(h *harness) error {
		h.client.PrependReactor("create", resource, func(action clienttesting.Action) (bool, runtime.Object, error) {
			return isDryRun(action), nil, apierrors.NewForbidden(corev1.Resource(resource), "", errors.New("exceeded"))
		})
		return nil
	}
}

// hangs is a driver whose pool does not answer.
type hangs struct{ Driver }

func (hangs) Directory(context.Context, map[string]string) (dir.ID, error) {
	return dir.ID{}, fmt.Errorf("%w: pool hangs", volume.ErrUnavailable)
}

// immutable has a privileged pod have protected the directory from being renamed.
func (h *harness) immutable() error {
	path := h.path()
	h.Cleanup(func() { must.Succeed(h.T, exec.Command("chattr", "-i", path).Run()) })
	return exec.Command("chattr", "+i", path).Run()
}

// twoPools is a driver that has all volumes in another of its pools, too.
type twoPools struct{ Driver }

func (d twoPools) Volume(ctx context.Context, id volume.ID) (client.Volume, error) {
	if id.String() != pvName {
		return d.Driver.Volume(ctx, id)
	}
	if v, err := d.Driver.Volume(ctx, id); err == nil {
		return v, volume.ErrAmbiguous
	}
	return client.Volume{Context: map[string]string{"storagePool": "other"}}, nil
}

// lost has the pool have had a volume of the name, which is gone but for its record.
func (h *harness) lost() error {
	id, err := volume.ParseID(pvName)
	if err != nil {
		return err
	}
	_, err = h.driver.(driver).set.Create(h.Context(), pool.Request{ID: id, Range: volume.Range{Required: 1 << 20}})
	return errors.Join(err, os.Remove(filepath.Join(h.config.Pools[0].Path, pvName)))
}

// What is in the pool already, with its record, needs nothing more there. Without a record it is refused before its objects are deleted.
func TestMigrationOnAFullDisk(t *testing.T) {
	for recorded, want := range map[bool]string{true: "", false: "has no room for the record of " + pvName} {
		t.Run(fmt.Sprintf("recorded %t", recorded), func(t *testing.T) {
			disk := testenv.LoopFS(t, "ext4", 64<<20)
			h := newHarnessOn(t, disk, "pool")
			h.config.Directory = filepath.Join(t.TempDir(), "saved")
			if recorded {
				in := store.VolumePath{Directory: h.config.Pools[0].Path, Name: pvName}
				must.Succeed(t, store.Handover{From: in, To: in}.Record(1003520))
			}
			foreign := filepath.Join(disk, "foreign")
			must.Succeed(t, os.Mkdir(foreign, 0o700))
			fulldisk.Fill(t, foreign, fulldisk.Shortage{Bytes: true})
			h.client.ClearActions()
			if err := h.run(apply); (err == nil) != recorded || !strings.Contains(h.output.String(), want) {
				t.Errorf("%v\n%s", err, h.output.String())
			}
			if recorded {
				h.wantCSI()
				return
			}
			h.wantNoChange()
		})
	}
}

func TestServes(t *testing.T) {
	const pool = "/var/pool"
	mounted := []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: pool + "/"}}}}
	elsewhere := &corev1.EnvVarSource{}
	isPool := func(path string) bool { return filepath.Clean(path) == pool }
	ofMap := []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}}
	ofSecret := []corev1.EnvFromSource{{Prefix: "PV_", SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}}
	other := corev1.EnvVar{Name: "PV_DIR", Value: "/var/other"}
	tests := map[string]struct {
		container corev1.Container
		volumes   []corev1.Volume
		is        bool
		may       string
	}{
		"by its variable":                       {corev1.Container{Env: []corev1.EnvVar{{Name: "PV_DIR", Value: pool + "/"}}}, nil, true, ""},
		"by the last variable of the name":      {corev1.Container{Env: []corev1.EnvVar{other, {Name: "PV_DIR", Value: pool}}}, nil, true, ""},
		"by a variable from a ConfigMap":        {corev1.Container{Env: []corev1.EnvVar{{Name: "PV_DIR", ValueFrom: elsewhere}}}, mounted, false, "PV_DIR from elsewhere"},
		"by such a variable, of something else": {corev1.Container{Env: []corev1.EnvVar{{Name: "PV_DIR", ValueFrom: elsewhere}}}, nil, false, ""},
		"by all variables of a ConfigMap":       {corev1.Container{EnvFrom: ofMap}, mounted, false, "variables of the ConfigMap settings"},
		"by all variables of a Secret":          {corev1.Container{EnvFrom: ofSecret}, mounted, false, "variables of the Secret settings"},
		"by those, of something else":           {corev1.Container{EnvFrom: ofMap}, nil, false, ""},
		"by those, with another prefix":         {corev1.Container{EnvFrom: []corev1.EnvFromSource{{Prefix: "DB_", ConfigMapRef: ofMap[0].ConfigMapRef}}}, mounted, false, ""},
		"by those, and its variable is another": {corev1.Container{EnvFrom: ofMap, Env: []corev1.EnvVar{other}}, mounted, false, ""},
		"by those, and its flag is another":     {corev1.Container{EnvFrom: ofMap, Args: []string{"--pv-dir=/var/other"}}, mounted, false, ""},
		"by a flag":                             {corev1.Container{Args: []string{"--v=2", "--pv-dir=" + pool}}, nil, true, ""},
		"by a flag in two words":                {corev1.Container{Command: []string{"/hostpath-provisioner", "-pv-dir", pool}}, nil, true, ""},
		"by a flag that takes a variable":       {corev1.Container{Args: []string{"--pv-dir=$(DIR)"}}, mounted, false, "--pv-dir=$(DIR)"},
		"of another directory":                  {corev1.Container{Args: []string{"--pv-dir=/var/other", "--pv-dir"}, Env: []corev1.EnvVar{other}}, mounted, false, ""},
		"not a provisioner":                     {corev1.Container{Args: []string{pool}, Env: []corev1.EnvVar{{Name: "OTHER", Value: pool}}}, mounted, false, ""},
	}
	for title, tt := range tests {
		for _, first := range []bool{false, true} {
			t.Run(title, func(t *testing.T) {
				spec := corev1.PodSpec{Containers: []corev1.Container{tt.container}, Volumes: tt.volumes}
				if first { // as a sidecar
					spec.InitContainers, spec.Containers = spec.Containers, nil
				}
				if is, may := serves(&corev1.Pod{Spec: spec}, isPool); is != tt.is || may != tt.may {
					t.Errorf("got %t and %q", is, may)
				}
			})
		}
	}
}

// An administrator who knows that it is no provisioner can say so.
func TestPodThatMayBeAProvisioner(t *testing.T) {
	h := newHarness(t, "old")
	pod := podAt(h.config.Pools[0].Path, "node-a")
	pod.Spec.Containers = []corev1.Container{{EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "settings"}}}}}}
	must.Succeed(t, h.client.Tracker().Add(pod))
	h.client.ClearActions()
	if err := h.run(apply); err == nil || !strings.Contains(h.output.String(), "by variables of the ConfigMap settings") || !strings.Contains(h.output.String(), "--no-provisioner=other/plain") {
		t.Errorf("%v\n%s", err, h.output.String())
	}
	h.wantNoChange()
	h.config.NoProvisioners = []types.NamespacedName{{Namespace: "other", Name: "plain"}}
	must.Succeed(t, h.run(apply))
	h.wantCSI()
}

// Another client changes the PersistentVolume all the time.
func TestStepThatIsNeverDone_timesOut(t *testing.T) {
	h := newHarness(t, "old")
	h.config.Timeout = time.Millisecond
	h.client.PrependReactor("patch", "persistentvolumes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewConflict(corev1.Resource("persistentvolumes"), pvName, errors.New("changed"))
	})
	if err := h.run(apply); err == nil || !strings.Contains(h.output.String(), "to Retain: not within 1ms") {
		t.Errorf("%v\n%s", err, h.output.String())
	}
}

type away struct{ Driver }

func (away) Name(context.Context) (string, error) { return "", errors.New("no such file") }

// A local volume of rancher's provisioner has a name that is too long for the driver, <volume>_<namespace>_<claim> (provisionFor of
// provisioner.go in rancher/local-path-provisioner v0.0.36).
func TestLocalPath(t *testing.T) {
	long := pvName + "_space_" + strings.Repeat("n", 200)
	h := newHarness(t, "pool", func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
		path := filepath.Join(filepath.Dir(origin.Path(pv)), long)
		pv.Annotations[origin.ProvisionedBy] = "rancher.io/local-path"
		pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: path}}
	})
	pv, claim := h.objects()
	must.Succeed(t, h.run(apply))
	h.wantCSI()
	must.Succeed(t, h.run(undo))
	h.wantPlain(pv, claim)
}

// The record of the provisioner's own pool goes along, and comes back, with the size that it has by then.
func TestRecordIsMovedWithVolume(t *testing.T) {
	h := newHarness(t, "old")
	old := filepath.Dir(h.path())
	serve(t, "provisioner", old)
	over := store.Handover{From: store.VolumePath{Directory: old, Name: pvName}, To: store.VolumePath{Directory: old, Name: pvName}}
	must.Succeed(t, over.Record(1003520))
	written, err := os.ReadFile(records(old)[0])
	must.Succeed(t, err)
	must.Succeed(t, h.run(apply))
	h.wantCSI()
	if left := records(old); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	moved, err := os.ReadFile(records(h.config.Pools[0].Path)[0])
	if err != nil || !bytes.Equal(moved, written) {
		t.Errorf("%s (%v), was %s", moved, err, written)
	}
	must.Succeed(t, h.run(undo))
	if back, err := os.ReadFile(records(old)[0]); err != nil || !bytes.Equal(back, written) || len(records(h.config.Pools[0].Path)) > 0 {
		t.Errorf("%s (%v), was %s", back, err, written)
	}
}

// The provisioner, which may run on, removes empty directories whose records are provisional. It was killed before it
// had confirmed this one.
func TestTheRecordIsConfirmedBeforeObjectsAreDeleted(t *testing.T) {
	h := newHarness(t, "old")
	must.Succeed(t, os.RemoveAll(h.path()))
	old := filepath.Dir(h.path())
	set := serve(t, "provisioner", old)
	id, err := volume.ParseID(pvName)
	must.Succeed(t, err)
	_, err = set.Create(t.Context(), pool.Request{ID: id, Range: volume.Range{Required: 1000001}, Provisional: true})
	must.Succeed(t, err)
	over := store.Handover{From: store.VolumePath{Directory: old, Name: pvName}, To: store.VolumePath{Directory: old, Name: pvName}}
	for steps, want := range []bool{true, false} {
		if steps > 0 {
			must.Succeed(t, h.run(func(c *Config) { c.Apply, c.Steps = true, steps }))
		}
		if found, err := over.Find(); err != nil || found.From.Provisional != want {
			t.Errorf("after %d steps: %+v (%v)", steps, found, err)
		}
	}
	must.Succeed(t, h.run(apply))
	must.Succeed(t, os.WriteFile(filepath.Join(h.config.Pools[0].Path, pvName, "data"), []byte("kept"), 0o600))
	h.wantCSI()
}

func TestChosen(t *testing.T) {
	named := types.NamespacedName{Namespace: "space", Name: "data"}
	tests := map[string]struct {
		chosen Chosen
		want   bool
	}{
		"by name":                        {Chosen{Claims: []types.NamespacedName{named}}, true},
		"another name":                   {Chosen{Claims: []types.NamespacedName{{Namespace: "space", Name: "other"}}}, false},
		"by name, whatever else":         {Chosen{Claims: []types.NamespacedName{named}, Namespace: "other", Class: "other"}, true},
		"by namespace":                   {Chosen{Namespace: "space"}, true},
		"another namespace":              {Chosen{Namespace: "other"}, false},
		"by class":                       {Chosen{Class: "class"}, true},
		"another class":                  {Chosen{Class: "other"}, false},
		"by namespace and class":         {Chosen{Namespace: "space", Class: "class"}, true},
		"by namespace, of another class": {Chosen{Namespace: "space", Class: "other"}, false},
		"all":                            {Chosen{All: true}, true},
		"all of another namespace":       {Chosen{All: true, Namespace: "other"}, false},
		"none":                           {Chosen{}, false},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			if got := tt.chosen.includes(named, "class"); got != tt.want {
				t.Errorf("got %t", got)
			}
		})
	}
}

// As of a provisioner with PV_DIR_SHARED: any node has the directory, before and after.
func TestSharedPool_volumeHasNoNodeAffinity(t *testing.T) {
	h := newHarness(t, "old", func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
		pv.Annotations[origin.ProvisionedBy], pv.Annotations[origin.Identity] = origin.SingleNodeName, "node-a"
		delete(pv.Annotations, origin.ProvisionOnNode)
		pv.Spec.NodeAffinity = nil
	})
	h.config.Pools[0].Shared = true
	h.driver = ofNoNode{h.driver}
	pv, claim := h.objects()
	must.Succeed(t, h.run(apply))
	if now, _ := h.objects(); now.Spec.CSI == nil || now.Spec.NodeAffinity != nil {
		t.Errorf("PersistentVolume %+v", now.Spec)
	}
	h.wantData(filepath.Join(h.config.Pools[0].Path, pvName))
	must.Succeed(t, h.run(undo))
	h.wantPlain(pv, claim)
}

// ofNoNode is a driver whose pool is shared.
type ofNoNode struct{ Driver }

func (d ofNoNode) Volume(ctx context.Context, id volume.ID) (client.Volume, error) {
	v, err := d.Driver.Volume(ctx, id)
	v.Segments = nil
	return v, err
}

func TestProvisionerOnAnotherNode_stopsOnlySharedPools(t *testing.T) {
	for shared, want := range map[bool]string{true: "two programs serve this pool", false: ""} {
		h := newHarness(t, "old")
		h.config.Pools[0].Shared = shared
		must.Succeed(t, h.client.Tracker().Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "provisioner"}, Spec: corev1.PodSpec{
			NodeName: "node-b", Containers: []corev1.Container{{Env: []corev1.EnvVar{{Name: "PV_DIR", Value: h.config.Pools[0].Path}}}}}}))
		if err := h.run(apply); (err != nil) != shared || !strings.Contains(h.output.String(), want) {
			t.Errorf("shared %t: %v\n%s", shared, err, h.output.String())
		}
	}
}

func TestAnotherNodesVolumesAreNamed(t *testing.T) {
	h := newHarness(t, "old", func(pv *corev1.PersistentVolume, _ *corev1.PersistentVolumeClaim) {
		pv.Spec.NodeAffinity = affinity([]map[string]string{{corev1.LabelHostname: "host-b"}})
	})
	must.Succeed(t, h.run(apply))
	if !strings.Contains(h.output.String(), "1 claim on node host-b: run the command there") {
		t.Error(h.output.String())
	}
}

// A claim that another client makes meanwhile is not taken for one's own.
func TestClaimOfAnotherClientStopsMigration(t *testing.T) {
	h := newHarness(t, "old")
	must.Succeed(t, h.run(func(c *Config) { c.Apply, c.Steps = true, 4 })) // both objects are deleted
	_, claim := pair(h.config.From[0])
	claim.Spec.VolumeName = ""
	_, err := h.client.CoreV1().PersistentVolumeClaims("space").Create(t.Context(), claim, metav1.CreateOptions{})
	must.Succeed(t, err)
	if err := h.run(apply); err == nil || !strings.Contains(h.output.String(), "another client created it") {
		t.Errorf("%v\n%s", err, h.output.String())
	}
	must.Succeed(t, h.client.CoreV1().PersistentVolumeClaims("space").Delete(t.Context(), "data", metav1.DeleteOptions{}))
	must.Succeed(t, h.run(apply))
	h.wantCSI()
}

// Its volume, which has data, would go with it.
func TestClaimOfAnotherClientThatHasAVolume_isNotSaidToBeDeleted(t *testing.T) {
	h := newHarness(t, "old")
	must.Succeed(t, h.run(func(c *Config) { c.Apply, c.Steps = true, 4 }))
	_, claim := pair(h.config.From[0])
	claim.Spec.VolumeName = "pvc-other"
	_, err := h.client.CoreV1().PersistentVolumeClaims("space").Create(t.Context(), claim, metav1.CreateOptions{})
	must.Succeed(t, err)
	if err := h.run(apply); err == nil || !strings.Contains(h.output.String(), "the PersistentVolume pvc-other, which may have data: delete it only if that can go") {
		t.Errorf("%v\n%s", err, h.output.String())
	}
}

// A VolumeMove gives the volume another node, and leaves its names.
func TestUndoOfAVolumeThatIsOnAnotherNode_deletesNothing(t *testing.T) {
	for _, directory := range []string{"pool", "old"} {
		t.Run(directory, func(t *testing.T) {
			h := newHarness(t, directory)
			must.Succeed(t, h.run(apply))
			here, moved := filepath.Join(h.config.Pools[0].Path, pvName), filepath.Join(t.TempDir(), pvName)
			must.Succeed(t, os.Rename(here, moved))
			if err := h.run(undo); err == nil || !strings.Contains(h.output.String(), "move it back first") {
				t.Errorf("%v\n%s", err, h.output.String())
			}
			must.Succeed(t, os.Rename(moved, here))
			h.wantCSI()
		})
	}
}

func TestAVolumeThatWasDeletedAfterItsMigration(t *testing.T) {
	h := newHarness(t, "old")
	must.Succeed(t, h.run(apply))
	must.Succeed(t, h.client.CoreV1().PersistentVolumeClaims("space").Delete(t.Context(), "data", metav1.DeleteOptions{}))
	must.Succeed(t, h.client.CoreV1().PersistentVolumes().Delete(t.Context(), pvName, metav1.DeleteOptions{}))
	// And there is another claim of its name.
	_, claim := pair(h.config.From[0])
	claim.Spec.VolumeName = "pvc-other"
	_, err := h.client.CoreV1().PersistentVolumeClaims("space").Create(t.Context(), claim, metav1.CreateOptions{})
	must.Succeed(t, err)
	must.Succeed(t, h.run(apply))
	if !strings.Contains(h.output.String(), "migrated, and deleted since") {
		t.Error(h.output.String())
	}
	// The driver has removed the directory: there is nothing to go back to, and what comes after is not stopped by it.
	must.Succeed(t, os.RemoveAll(filepath.Join(h.config.Pools[0].Path, pvName)))
	for _, change := range []func(*Config){undo, apply} {
		h.output.Reset()
		if err := h.run(change); err != nil || !strings.Contains(h.output.String(), "migrated, and deleted since") {
			t.Errorf("%v\n%s", err, h.output.String())
		}
	}
}
