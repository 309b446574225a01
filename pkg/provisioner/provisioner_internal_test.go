package provisioner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/controller"

	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	uid  = "11111111-2222-3333-4444-555555555555"
	name = "pvc-" + uid
)

// A harness is a provisioner on a real pool. The API server is the client library's own stand-in: what it would decide
// is asked in test/cluster.
type harness struct {
	*testing.T
	*Provisioner
	instance *Instance
	client   *fake.Clientset
}

func newHarness(t *testing.T, config Config, objects ...runtime.Object) *harness {
	t.Helper()
	return newHarnessThatRemembers(t, t.TempDir(), config, objects...)
}

// newHarnessThatRemembers is one whose node keeps notes of its pools in a directory.
func newHarnessThatRemembers(t *testing.T, state string, config Config, objects ...runtime.Object) *harness {
	t.Helper()
	if config.Path == "" {
		config.Path = t.TempDir()
	}
	config.Node = "node-a"
	configs, err := poolconfig.Parse(fmt.Sprintf(`[{"name":"test","path":%q,"enforcement":"none"}]`, config.Path), "/")
	must.Succeed(t, err)
	configs[0].Except = CSIDirectory
	n := pooltest.New(t, t.TempDir())
	options := n.Options(config.Node)
	options.Served = served.ByHand(state)
	set := n.Start(configs, options)
	must.Succeed(t, set.Wait(t.Context()))
	objects = append(objects, nodeNamed("node-a", "host-a"))
	h := &harness{T: t, client: fake.NewClientset(objects...)}
	instance, err := New(t.Context(), config, set, h.client)
	must.Succeed(t, err)
	h.Provisioner, h.instance = instance.provisioner, instance
	must.Succeed(t, addAll(instance, objects))
	return h
}

// addAll gives the informers what the API server would.
func addAll(i *Instance, objects []runtime.Object) error {
	for _, o := range objects {
		var err error
		switch o := o.(type) {
		case *corev1.PersistentVolume:
			if !i.provisioner.config.keeps(o) {
				continue
			}
			err = i.volumes.GetIndexer().Add(o)
		case *corev1.PersistentVolumeClaim:
			err = i.factory.Core().V1().PersistentVolumeClaims().Informer().GetIndexer().Add(o)
		case *storagev1.StorageClass:
			err = i.factory.Storage().V1().StorageClasses().Informer().GetIndexer().Add(o)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func nodeNamed(name, hostname string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: hostname}}}
}

func (h *harness) events() (messages []string) {
	h.Helper()
	list, err := h.client.CoreV1().Events("").List(h.Context(), metav1.ListOptions{})
	must.Succeed(h.T, err)
	for _, e := range list.Items {
		messages = append(messages, e.Reason+": "+e.Message)
	}
	return messages
}

func (h *harness) directories() (names []string) {
	h.Helper()
	entries, err := os.ReadDir(h.config.Path)
	must.Succeed(h.T, err)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names
}

func request(changes ...func(*controller.ProvisionOptions)) controller.ProvisionOptions {
	late := storagev1.VolumeBindingWaitForFirstConsumer
	o := controller.ProvisionOptions{
		PVName:       name,
		StorageClass: &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "class"}, VolumeBindingMode: &late},
		PVC: &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "claim", Namespace: "space", UID: uid, Annotations: map[string]string{SelectedNode: "node-a"}},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1000001")}},
			},
		},
	}
	for _, change := range changes {
		change(&o)
	}
	return o
}

func TestProvision(t *testing.T) {
	tests := map[string]struct {
		config    Config
		directory string
	}{
		"per node":             {Config{Mode: PerNode}, name},
		"with a naming prefix": {Config{Mode: PerNode, NamePrefix: true}, "claim-" + name},
		"single node":          {Config{Mode: SingleNode, ReclaimPolicy: corev1.PersistentVolumeReclaimRetain}, "space-claim-" + name},
		"shared":               {Config{Mode: SingleNode, Shared: true}, "space-claim-" + name},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, tt.config)
			pv, _, err := h.Provision(t.Context(), request())
			must.Succeed(t, err)
			path := filepath.Join(h.config.Path, tt.directory)
			info, err := os.Stat(path)
			if err != nil || info.Mode().Perm() != 0o777 {
				t.Errorf("the directory: %v (%v)", info, err)
			}
			if diff := cmp.Diff(wanted(h.config, path), pv); diff != "" {
				t.Errorf("(- want, + got):\n%s", diff)
			}
			// The PersistentVolume could not be saved, and the controller asks again.
			again, _, err := h.Provision(t.Context(), request())
			if err != nil || again.Spec.HostPath.Path != path {
				t.Errorf("asked again: %+v, %v", again, err)
			}
			pv.Annotations[origin.ProvisionedBy], pv.Status.Phase = h.config.Name(), corev1.VolumeReleased
			must.Succeed(t, h.Delete(t.Context(), pv))
			must.Succeed(t, h.Delete(t.Context(), pv))
			if left := h.directories(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// wanted is the PersistentVolume of request.
func wanted(config Config, path string) *corev1.PersistentVolume {
	mode, isDirectory := corev1.PersistentVolumeFilesystem, corev1.HostPathDirectory
	pv := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{origin.Identity: "node-a"}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1000001")},
			AccessModes:                   []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			VolumeMode:                    &mode,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path, Type: &isDirectory}},
		},
	}
	if config.Mode == PerNode { // as the upstream provisioner
		pv.Annotations[origin.Identity], pv.Annotations[origin.ProvisionOnNode] = "kubevirt.io/hostpath-provisioner", "node-a"
	}
	if config.ReclaimPolicy != "" {
		pv.Spec.PersistentVolumeReclaimPolicy = config.ReclaimPolicy
	}
	if !config.Shared {
		pv.Spec.NodeAffinity = onHost("host-a")
	}
	return pv
}

func TestShouldProvision_annotationWinsOverScheduler(t *testing.T) {
	tests := map[string]struct {
		annotations map[string]string
		mode        Mode
		want        bool
	}{
		"the scheduler chose this node":             {map[string]string{SelectedNode: "node-a"}, PerNode, true},
		"the scheduler chose another":               {map[string]string{SelectedNode: "node-b"}, PerNode, false},
		"it names this node, whatever was chosen":   {map[string]string{SelectedNode: "node-b", origin.ProvisionOnNode: "node-a"}, PerNode, true},
		"it names another node, and this is chosen": {map[string]string{SelectedNode: "node-a", origin.ProvisionOnNode: "node-b"}, PerNode, false},
		"it names this node, of an immediate class": {map[string]string{origin.ProvisionOnNode: "node-a"}, PerNode, true},
		"no node":                   {nil, PerNode, false},
		"no node, on a single node": {nil, SingleNode, true},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			claim := request().PVC
			claim.Annotations = tt.annotations
			if got := newHarness(t, Config{Mode: tt.mode}).ShouldProvision(t.Context(), claim); got != tt.want {
				t.Errorf("got %t", got)
			}
		})
	}
}

func TestReclaimPolicyOfTheClass_isHonoured(t *testing.T) {
	retain := corev1.PersistentVolumeReclaimRetain
	pv, _, err := newHarness(t, Config{Mode: PerNode}).Provision(t.Context(), request(func(o *controller.ProvisionOptions) { o.StorageClass.ReclaimPolicy = &retain }))
	if err != nil || pv.Spec.PersistentVolumeReclaimPolicy != retain {
		t.Errorf("%+v, %v", pv, err)
	}
}

func TestProvisionRefuses(t *testing.T) {
	recycle := corev1.PersistentVolumeReclaimRecycle
	tests := map[string]struct {
		change func(*controller.ProvisionOptions)
		words  []string
		state  controller.ProvisioningState
	}{
		"what a class and a claim may not say, all at once": {func(o *controller.ProvisionOptions) {
			o.StorageClass.MountOptions = []string{"noatime"}
			o.StorageClass.ReclaimPolicy = &recycle
			o.PVC.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany}
			o.PVC.Spec.Selector = &metav1.LabelSelector{}
			o.PVC.Spec.DataSource = &corev1.TypedLocalObjectReference{}
			attributes := "gold"
			o.PVC.Spec.VolumeAttributesClassName = &attributes
		}, []string{"noatime", "Recycle", "ReadWriteMany", "selector", "data source", "spec.volumeAttributesClassName"}, controller.ProvisioningFinished},
		"another topology": {func(o *controller.ProvisionOptions) {
			o.StorageClass.AllowedTopologies = []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: "zone", Values: []string{"b"}}}}}
		}, []string{"node-a", "allowedTopologies"}, controller.ProvisioningFinished},
		"more than the pool has": {func(o *controller.ProvisionOptions) {
			o.PVC.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("1Pi")
		}, []string{"not enough space"}, controller.ProvisioningReschedule},
		"more than the pool has, where the claim names the node": {func(o *controller.ProvisionOptions) {
			o.PVC.Annotations[origin.ProvisionOnNode] = "node-a"
			o.PVC.Spec.Resources.Requests[corev1.ResourceStorage] = resource.MustParse("1Pi")
		}, []string{"not enough space"}, controller.ProvisioningFinished},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode})
			_, state, err := h.Provision(t.Context(), request(tt.change))
			for _, word := range tt.words {
				if err == nil || !strings.Contains(err.Error(), word) {
					t.Errorf("%v does not say %q", err, word)
				}
			}
			if state != tt.state {
				t.Errorf("the state is %s, want %s", state, tt.state)
			}
			if made := h.directories(); len(made) > 0 {
				t.Errorf("made: %v", made)
			}
		})
	}
}

func TestSingleNodeRefusesSeveralNodes(t *testing.T) {
	other := nodeNamed("node-b", "host-b")
	if _, _, err := newHarness(t, Config{Mode: SingleNode}, other).Provision(t.Context(), request()); err == nil || !strings.Contains(err.Error(), "node-a, node-b") {
		t.Errorf("with two nodes: %v", err)
	}
	if _, _, err := newHarness(t, Config{Mode: SingleNode, Shared: true}, other).Provision(t.Context(), request()); err != nil {
		t.Errorf("with two nodes and a shared directory: %v", err)
	}
	cordoned, control := other.DeepCopy(), nodeNamed("node-c", "host-c")
	cordoned.Spec.Unschedulable = true
	control.Spec.Taints = []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}
	if _, _, err := newHarness(t, Config{Mode: SingleNode}, cordoned, control).Provision(t.Context(), request()); err != nil {
		t.Errorf("with one node that takes pods: %v", err)
	}
}

// A directory whose claim is not read yet looks abandoned.
func TestSynced_notBeforeTheClaimsAreRead(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode})
	for _, kind := range []string{"persistentvolumeclaims", "storageclasses"} {
		var answers atomic.Bool
		client := fake.NewClientset(nodeNamed("node-a", "host-a"))
		client.PrependReactor("list", kind, func(clienttesting.Action) (bool, runtime.Object, error) {
			return !answers.Load(), nil, errors.New("not now")
		})
		i, err := New(t.Context(), h.config, h.pool, client)
		must.Succeed(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() { i.Run(ctx) })
		cache.WaitForCacheSync(ctx.Done(), i.volumes.HasSynced, i.controller.HasRun)
		if i.synced() {
			t.Errorf("synced without the %s", kind)
		}
		answers.Store(true)
		cache.WaitForCacheSync(ctx.Done(), i.synced)
		cancel()
		run.Wait()
	}
}

// Any pod can ask, and what the API server is asked for it holds up claims.
func TestReadiness_asksTheAPIServerNowAndThen(t *testing.T) {
	h := newHarness(t, Config{Mode: SingleNode})
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	must.Succeed(t, h.instance.nodes.ask(gone, h.refuseOtherNodes))
	for range 100 {
		must.Succeed(t, h.instance.nodes.ask(t.Context(), h.refuseOtherNodes))
	}
	lists := 0
	for _, action := range h.client.Actions() {
		if action.GetVerb() == "list" && action.GetResource().Resource == "nodes" {
			lists++
		}
	}
	if lists != 1 {
		t.Errorf("the nodes were listed %d times", lists)
	}
}

// own is a PersistentVolume whose directory is there, as kubevirt/hostpath-provisioner makes it in versions v0.1.1 to v0.25.2
// (Provision of cmd/provisioner/hostpath-provisioner.go, provisionClaimOperation of controller/controller.go), and this one, but
// for the affinity: the upstream one has the node's name there. In the identity is the provisioner, and the node only in the other annotation and in the affinity.
func own(t *testing.T, path string) *corev1.PersistentVolume {
	t.Helper()
	must.Succeed(t, os.MkdirAll(filepath.Join(path, name, "sub"), 0o777))
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{origin.Identity: origin.PerNodeName, origin.ProvisionOnNode: "node-a", origin.ProvisionedBy: origin.PerNodeName}},
		Spec: corev1.PersistentVolumeSpec{
			NodeAffinity:                  onHost("host-a"),
			ClaimRef:                      &corev1.ObjectReference{Namespace: "space", Name: "claim", UID: uid},
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: filepath.Join(path, name)}},
		},
		Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeReleased},
	}
}

// Delete has a PersistentVolume deleted that the API server has as the controller does.
func (h *harness) Delete(ctx context.Context, pv *corev1.PersistentVolume) error {
	h.Helper()
	pv.Status.Phase, pv.Spec.PersistentVolumeReclaimPolicy = corev1.VolumeReleased, corev1.PersistentVolumeReclaimDelete
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "space", Name: "claim", UID: uid} // which the controller's library adds
	_, err := h.client.CoreV1().PersistentVolumes().Create(ctx, pv, metav1.CreateOptions{})
	must.Succeed(h.T, err)
	defer func() {
		must.Succeed(h.T, h.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("persistentvolumes"), "", pv.Name))
	}()
	return h.Provisioner.Delete(ctx, pv)
}

// Its data is to be rescued, or was already: what the controller has of it is old.
func TestDeleteKeepsTheDirectoryOfAPersistentVolumeThatChangedMeanwhile(t *testing.T) {
	for title, change := range map[string]func(pv *corev1.PersistentVolume){
		"retained": func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		},
		"free":             func(pv *corev1.PersistentVolume) { pv.Status.Phase = corev1.VolumeAvailable },
		"of another claim": func(pv *corev1.PersistentVolume) { pv.Status.Phase = corev1.VolumeBound },
		"another":          func(pv *corev1.PersistentVolume) { pv.UID = "another" },
		// The persistent volume controller, which has not seen it yet, sets the phase.
		"free, but for the phase":  func(pv *corev1.PersistentVolume) { pv.Spec.ClaimRef = nil },
		"to be of another claim":   func(pv *corev1.PersistentVolume) { pv.Spec.ClaimRef.UID = "another" },
		"to be of a claim to come": func(pv *corev1.PersistentVolume) { pv.Spec.ClaimRef.UID = "" },
		"gone":                     nil,
		"of another source":        func(pv *corev1.PersistentVolume) { pv.Spec.HostPath = nil },
	} {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode}, &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: "claim", UID: "another"}})
			pv := own(t, h.config.Path)
			if change != nil {
				now := pv.DeepCopy()
				change(now)
				_, err := h.client.CoreV1().PersistentVolumes().Create(t.Context(), now, metav1.CreateOptions{})
				must.Succeed(t, err)
			}
			err := h.Provisioner.Delete(t.Context(), pv)
			if err == nil || len(h.directories()) != 1 {
				t.Errorf("%v, and left are %v", err, h.directories())
			}
		})
	}
}

// Both were restored from a backup: the PersistentVolume names the claim by the uid that it had.
func TestDeleteKeepsTheDirectoryThatAClaimNamesAnew(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode}, &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "space", Name: "claim", UID: "restored"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: name},
	})
	if err := h.Delete(t.Context(), own(t, h.config.Path)); err == nil || len(h.directories()) != 1 {
		t.Errorf("%v, and left are %v", err, h.directories())
	}
}

func TestDeleteRemovesItsOwn(t *testing.T) {
	rename := func(directory string) func(*corev1.PersistentVolume) {
		return func(pv *corev1.PersistentVolume) {
			at := pv.Spec.HostPath.Path
			pv.Spec.HostPath.Path = filepath.Join(filepath.Dir(at), directory)
			must.Succeed(t, os.Rename(at, pv.Spec.HostPath.Path))
		}
	}
	for title, change := range map[string]func(*corev1.PersistentVolume){
		"without a record":     func(*corev1.PersistentVolume) {},
		"with a naming prefix": rename("claim-" + name),
		"with a long name":     rename(strings.Repeat("x", 214) + "-" + name),
		// The upstream provisioner writes the node's name as that of the host.
		"of a node whose hostname is another":                  func(pv *corev1.PersistentVolume) { pv.Spec.NodeAffinity = onHost("node-a") },
		"with the node as identity, as this one once wrote it": func(pv *corev1.PersistentVolume) { pv.Annotations[origin.Identity] = "node-a" },
	} {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode})
			pv := own(t, h.config.Path)
			change(pv)
			must.Succeed(t, h.Delete(t.Context(), pv))
			if left := h.directories(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// The disk is not mounted after a boot. No note has the name of the directory, and it would count as removed.
func TestDeleteOfLongNameOnADiskThatIsNotMountedIsRefused(t *testing.T) {
	top, state := t.TempDir(), t.TempDir()
	config, disk := Config{Mode: PerNode, Path: filepath.Join(top, "pool")}, filepath.Join(top, "disk")
	must.Succeed(t, os.Mkdir(config.Path, 0o755))
	pv := own(t, config.Path)
	long := strings.Repeat("x", 214) + "-" + name
	must.Succeed(t, os.Rename(pv.Spec.HostPath.Path, filepath.Join(config.Path, long)))
	pv.Spec.HostPath.Path = filepath.Join(config.Path, long)
	const other = "pvc-99999999-2222-3333-4444-555555555555"
	must.Succeed(t, os.Mkdir(filepath.Join(config.Path, other), 0o755))
	run := func(do func(h *harness)) {
		t.Run("", func(t *testing.T) { do(newHarnessThatRemembers(t, state, config)) })
	}
	run(func(*harness) {})
	must.Succeed(t, os.Rename(config.Path, disk), os.Mkdir(config.Path, 0o755))
	run(func(h *harness) { must.ErrorIs(t, h.Delete(t.Context(), pv), volume.ErrPrecondition) })
	must.Succeed(t, os.RemoveAll(config.Path), os.Rename(disk, config.Path))
	run(func(h *harness) {
		for range 2 { // the second finds that it is gone
			must.Succeed(t, h.Delete(t.Context(), pv))
		}
		if left := h.directories(); !slices.Equal(left, []string{other}) {
			t.Errorf("left: %v", left)
		}
	})
}

func TestDeleteLeavesWhatIsNotItsOwn(t *testing.T) {
	at := func(path string) func(*corev1.PersistentVolume, string) {
		return func(pv *corev1.PersistentVolume, pool string) {
			pv.Spec.HostPath.Path = strings.NewReplacer("POOL", pool, "PARENT", filepath.Dir(pool), "BASE", filepath.Base(pool), "NAME", name).Replace(path)
		}
	}
	tests := map[string]func(pv *corev1.PersistentVolume, pool string){
		"without an identity": func(pv *corev1.PersistentVolume, _ string) { delete(pv.Annotations, origin.Identity) },
		"two nodes": func(pv *corev1.PersistentVolume, _ string) {
			pv.Annotations[origin.Identity], pv.Annotations[origin.ProvisionOnNode] = "node-a", "node-b"
		},
		"an identity and no node":    func(pv *corev1.PersistentVolume, _ string) { delete(pv.Annotations, origin.ProvisionOnNode) },
		"another program's identity": func(pv *corev1.PersistentVolume, _ string) { pv.Annotations[origin.Identity] = "example.com/hostpath" },
		"no affinity":                func(pv *corev1.PersistentVolume, _ string) { pv.Spec.NodeAffinity = nil },
		"affinity for another node too": func(pv *corev1.PersistentVolume, _ string) {
			terms := &pv.Spec.NodeAffinity.Required.NodeSelectorTerms
			*terms = append(*terms, onHost("host-b").Required.NodeSelectorTerms...)
		},
		"another node's affinity":   func(pv *corev1.PersistentVolume, _ string) { pv.Spec.NodeAffinity = onHost("host-b") },
		"no source":                 func(pv *corev1.PersistentVolume, _ string) { pv.Spec.HostPath = nil },
		"a name that a user chose":  func(pv *corev1.PersistentVolume, _ string) { pv.Name = "555555555555" },
		"another one's directory":   func(pv *corev1.PersistentVolume, _ string) { pv.Name = "pvc-99999999-2222-3333-4444-555555555555" },
		"the pool itself":           at("POOL"),
		"the pool's parent":         at("PARENT"),
		"a path that leads back in": at("POOL/../BASE/NAME"),
		"a relative path":           at("NAME"),
		"inside a volume":           at("POOL/NAME/sub"),
		"the pool of the driver":    at("POOL/" + CSIDirectory),
	}
	for title, change := range tests {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode})
			must.Succeed(t, os.Mkdir(filepath.Join(h.config.Path, CSIDirectory), 0o750))
			pv := own(t, h.config.Path)
			change(pv, h.config.Path)
			if err := h.Delete(t.Context(), pv); err == nil {
				t.Error("it is not refused")
			}
			if diff := cmp.Diff([]string{CSIDirectory, name}, h.directories()); diff != "" {
				t.Errorf("(- want, + got):\n%s", diff)
			}
		})
	}
}

// The others are made by hand: no provisioner has annotated them.
func TestDeleteRefusesADirectoryOfTwoPersistentVolumes(t *testing.T) {
	byHand := func(source corev1.PersistentVolumeSource) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "by-hand"}, Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: source}}
	}
	hostPath := func(path string) *corev1.PersistentVolume {
		return byHand(corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}})
	}
	tests := map[string]struct {
		other   func(path string) *corev1.PersistentVolume
		removed bool
	}{
		"the same path":        {hostPath, false},
		"written in other way": {func(path string) *corev1.PersistentVolume { return hostPath(path + "/") }, false},
		"inside of it":         {func(path string) *corev1.PersistentVolume { return hostPath(path + "/sub") }, false},
		"as a local volume": {func(path string) *corev1.PersistentVolume {
			return byHand(corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: path}})
		}, false},
		"on another node": {func(path string) *corev1.PersistentVolume {
			pv := hostPath(path)
			pv.Spec.NodeAffinity = onHost("host-b")
			return pv
		}, true},
		"on several nodes": {func(path string) *corev1.PersistentVolume {
			pv := hostPath(path)
			pv.Spec.NodeAffinity = onHost("host-b")
			terms := &pv.Spec.NodeAffinity.Required.NodeSelectorTerms
			*terms = append(*terms, onHost("host-a").Required.NodeSelectorTerms...)
			return pv
		}, false},
		"a longer name": {func(path string) *corev1.PersistentVolume { return hostPath(path + "-2") }, true},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			pool := t.TempDir()
			pv := own(t, pool)
			h := newHarness(t, Config{Mode: PerNode, Path: pool}, tt.other(filepath.Join(pool, name)))
			err := h.Delete(t.Context(), pv)
			if removed := len(h.directories()) == 0; removed != tt.removed || (err == nil) != tt.removed || err != nil && !strings.Contains(err.Error(), "by-hand") {
				t.Errorf("removed: %t (%v)", removed, err)
			}
			// With a hundred thousand of them in the cluster, each retry of each node would read all.
			for _, action := range h.client.Actions() {
				if action.GetVerb() == "list" && action.GetResource().Resource == "persistentvolumes" {
					t.Error("all PersistentVolumes were listed")
				}
			}
		})
	}
}

// The earlier single-node provisioner said neither a type nor a node affinity (Provision of hostpath-provisioner.go in
// MaZderMind/hostpath-provisioner, 75a4f2d).
func TestDeleteOnSingleNode(t *testing.T) {
	tests := map[string]struct {
		config   Config
		identity string
		removed  bool
	}{
		"of the earlier provisioner":          {Config{Mode: SingleNode}, "node-a", true},
		"of another node":                     {Config{Mode: SingleNode}, "node-b", false},
		"of another node, in a shared PV_DIR": {Config{Mode: SingleNode, Shared: true}, "node-b", true},
		"of no node, in a shared PV_DIR":      {Config{Mode: SingleNode, Shared: true}, "", false},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			h := newHarness(t, tt.config)
			directory := filepath.Join(h.config.Path, "space-claim-"+name)
			must.Succeed(t, os.MkdirAll(filepath.Join(directory, "sub"), 0o777))
			err := h.Delete(t.Context(), &corev1.PersistentVolume{
				ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{origin.Identity: tt.identity, origin.ProvisionedBy: origin.SingleNodeName}},
				Spec:       corev1.PersistentVolumeSpec{PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: directory}}},
			})
			if removed := len(h.directories()) == 0; removed != tt.removed || (err == nil) != tt.removed {
				t.Errorf("removed: %t (%v)", removed, err)
			}
		})
	}
}

// The nodes that a PersistentVolume is for may all be others: they have the same directory.
func TestDeleteInASharedDirectory_refusesThatOfAnotherPersistentVolume(t *testing.T) {
	pool := t.TempDir()
	directory := filepath.Join(pool, "space-claim-"+name)
	must.Succeed(t, os.Mkdir(directory, 0o777))
	source := corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: directory}}
	h := newHarness(t, Config{Mode: SingleNode, Shared: true, Path: pool}, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "by-hand"},
		Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: source, NodeAffinity: onHost("host-b")}})
	err := h.Delete(t.Context(), &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{origin.Identity: "node-a", origin.ProvisionedBy: origin.SingleNodeName}},
		Spec:       corev1.PersistentVolumeSpec{PersistentVolumeSource: source},
	})
	if len(h.directories()) != 1 || err == nil || !strings.Contains(err.Error(), "by-hand") {
		t.Errorf("%v, and left are %v", err, h.directories())
	}
}

func TestDeleteLeavesOtherNodesAlone(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode})
	pv := own(t, h.config.Path)
	pv.Annotations[origin.ProvisionOnNode] = "node-b"
	var ignored *controller.IgnoredError
	if err := h.Delete(t.Context(), pv); !errors.As(err, &ignored) {
		t.Errorf("not ignored: %v", err)
	}
}

func TestShouldDelete(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode})
	pv := own(t, h.config.Path)
	if !h.ShouldDelete(t.Context(), pv) {
		t.Error("a released volume is not deleted")
	}
	pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
	for range 2 {
		if h.ShouldDelete(t.Context(), pv) {
			t.Error("a retained volume is deleted")
		}
	}
	if events := h.events(); len(events) != 1 || !strings.Contains(events[0], filepath.Join(h.config.Path, name)) {
		t.Errorf("the events are %q, want one that says where the data is", events)
	}
	pv = own(t, h.config.Path)
	delete(pv.Annotations, origin.Identity)
	if h.ShouldDelete(t.Context(), pv) {
		t.Error("a volume of no provisioner is deleted")
	}
	if events := h.events(); !slices.ContainsFunc(events, func(e string) bool {
		return strings.Contains(e, "VolumeFailedDelete") && strings.Contains(e, origin.Identity+" is missing")
	}) {
		t.Errorf("the events are %q, want one that says why it is not deleted", events)
	}
}

func TestStraysAreReportedOnce(t *testing.T) {
	now := time.Now()
	immediate := storagev1.VolumeBindingImmediate
	claim := func(name string, annotations map[string]string) *corev1.PersistentVolumeClaim {
		c := request().PVC
		c.Name, c.UID, c.Annotations = name, types.UID("uid-"+name), annotations
		c.Annotations[StorageProvisioner] = origin.PerNodeName
		c.CreationTimestamp = metav1.NewTime(now.Add(-time.Minute))
		class := "immediate"
		c.Spec.StorageClassName = &class
		return c
	}
	// The scheduler has not annotated it, because there is no pod yet.
	early, late := claim("early", map[string]string{origin.ProvisionOnNode: "node-y"}), storagev1.VolumeBindingWaitForFirstConsumer
	delete(early.Annotations, StorageProvisioner)
	*early.Spec.StorageClassName = "late"
	h := newHarness(t, Config{Mode: PerNode}, nodeNamed("node-b", "host-b"),
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "immediate"}, VolumeBindingMode: &immediate},
		claim("nowhere", map[string]string{origin.ProvisionOnNode: "node-z"}),
		claim("other", map[string]string{origin.ProvisionOnNode: "node-b"}),
		claim("mine", map[string]string{origin.ProvisionOnNode: "node-a"}),
		claim("unnamed", map[string]string{}),
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "late"}, Provisioner: origin.PerNodeName, VolumeBindingMode: &late}, early)
	for range 2 { // instances on two nodes
		s := &strays{Provisioner: h.Provisioner, checked: make(map[types.UID]time.Time)}
		s.check(t.Context(), now)
		s.check(t.Context(), now)
	}
	events := strings.Join(h.events(), "\n")
	if strings.Count(events, "\n") != 2 || !strings.Contains(events, `"node-y", which does not exist`) || !strings.Contains(events, `"node-z", which does not exist`) || !strings.Contains(events, "binds immediately") {
		t.Errorf("the events are\n%s", events)
	}
}

func TestVolumeOfANodeThatIsGone_isReportedOnce(t *testing.T) {
	volume := func(name, node string, change func(*corev1.PersistentVolume)) *corev1.PersistentVolume {
		pv := own(t, t.TempDir())
		pv.Name, pv.UID, pv.Annotations[origin.ProvisionOnNode] = name, types.UID("uid-"+name), node
		pv.Spec.NodeAffinity = onHost(node)
		change(pv)
		return pv
	}
	as := func(*corev1.PersistentVolume) {}
	h := newHarness(t, Config{Mode: PerNode}, nodeNamed("node-b", "host-b"),
		volume("gone", "node-z", as),
		volume("elsewhere", "node-z", func(pv *corev1.PersistentVolume) { pv.Spec.NodeAffinity = onHost("host-b") }),
		volume("mine", "node-a", as),
		volume("other", "node-b", as),
		volume("bound", "node-z", func(pv *corev1.PersistentVolume) { pv.Status.Phase = corev1.VolumeBound }),
		volume("retained", "node-z", func(pv *corev1.PersistentVolume) {
			pv.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimRetain
		}),
		volume("contradictory", "node-z", func(pv *corev1.PersistentVolume) { pv.Annotations[origin.Identity] = "node-y" }),
		volume("foreign", "node-z", func(pv *corev1.PersistentVolume) { pv.Annotations[origin.ProvisionedBy] = "example.com/other" }))
	one, other, now := &orphans{Provisioner: h.Provisioner}, &orphans{Provisioner: h.Provisioner}, time.Now() // instances on two nodes
	for _, o := range []*orphans{one, other} {
		o.check(t.Context(), now)
	}
	if said := h.events(); len(said) > 0 {
		t.Errorf("of nodes that may be made anew it says %q", said)
	}
	for _, o := range []*orphans{one, other} {
		o.check(t.Context(), now.Add(strayAgain))
	}
	const gone, remove = "VolumeFailedDelete: node node-z, which had its directory /", "remove its finalizers"
	events := strings.Join(h.events(), "\n")
	if strings.Count(events, gone) != 2 || strings.Count(events, remove) != 1 || !strings.Contains(events, `in ["host-b"] before you delete it`) {
		t.Errorf("the events are\n%s", events)
	}
}

// The annotation of the claim wins over the scheduler, which chose for its pod.
func TestClaimThatNamesAnotherNodeThanItsPod_isReported(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode})
	_, _, err := h.Provision(t.Context(), request(func(o *controller.ProvisionOptions) {
		o.PVC.Annotations = map[string]string{origin.ProvisionOnNode: "node-a", SelectedNode: "node-b"}
	}))
	must.Succeed(t, err)
	if events := h.events(); len(events) != 1 || !strings.Contains(events[0], "NodesDiffer: annotation kubevirt.io/provisionOnNode=node-a takes precedence over node node-b") {
		t.Errorf("the events are %q", events)
	}
}

// mayMakeVolumes has the API server let these accounts, NAMESPACE:NAME, make PersistentVolumes, and no others.
func (h *harness) mayMakeVolumes(accounts ...string) {
	h.client.PrependReactor("create", "subjectaccessreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		review, ok := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		if !ok || review.Spec.ResourceAttributes == nil || *review.Spec.ResourceAttributes != (authorizationv1.ResourceAttributes{Verb: "create", Resource: "persistentvolumes"}) {
			h.Errorf("the API server is asked for %v", review)
			return true, nil, errors.New("this is another question")
		}
		answer := review.DeepCopy()
		answer.Status.Allowed = slices.ContainsFunc(accounts, func(account string) bool { return review.Spec.User == "system:serviceaccount:"+account })
		return true, answer, nil
	})
}

// serving is a DaemonSet whose pods are to have a directory.
func serving(namespace, name, account, directory string) *appsv1.DaemonSet {
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	set.Spec.Template.Spec.ServiceAccountName = account
	set.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "pv-volume", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: directory}}}}
	return set
}

// As deploy/kubevirt-hostpath-provisioner.yaml of kubevirt/hostpath-provisioner v0.25.2 has it. What is applied over it takes only its
// rights, and its pods go on for a while. Where it is updated, none of its pods are as it wants them at first, or for long.
func TestUpstreamProvisionerOfTheSameName_stopsProvisioning(t *testing.T) {
	const name = "kubevirt-hostpath-provisioner"
	for test, c := range map[string]struct {
		namespace, path string
		account         []string // that may make PersistentVolumes
		refused         bool
	}{
		"with its rights":                        {name, "POOL/", []string{name + ":kubevirt-hostpath-provisioner-admin"}, true},
		"in another namespace":                   {"elsewhere", "POOL", []string{"elsewhere:kubevirt-hostpath-provisioner-admin"}, true},
		"whose rights this one has taken over":   {"storage", "POOL", nil, true},
		"with another directory":                 {name, "/var/other", []string{name + ":kubevirt-hostpath-provisioner-admin"}, true},
		"which has no more than the name of one": {name, "POOL", []string{name + ":another"}, false},
	} {
		t.Run(test, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode, Namespace: "storage"})
			h.mayMakeVolumes(c.account...)
			set := serving(c.namespace, name, "kubevirt-hostpath-provisioner-admin", strings.Replace(c.path, "POOL", h.config.Path, 1))
			set.Generation = 2
			set.Status = appsv1.DaemonSetStatus{ObservedGeneration: 2, DesiredNumberScheduled: 3, CurrentNumberScheduled: 3, NumberReady: 3}
			must.Succeed(t, h.client.Tracker().Add(set))
			_, _, err := h.Provision(t.Context(), request())
			if (err != nil) != c.refused || c.refused && !strings.Contains(err.Error(), "delete daemonset kubevirt-hostpath-provisioner") {
				t.Error(err)
			}
			must.Succeed(t, h.client.AppsV1().DaemonSets(set.Namespace).Delete(t.Context(), set.Name, metav1.DeleteOptions{}))
			_, _, err = h.Provision(t.Context(), request())
			must.Succeed(t, err)
		})
	}
}

// Each user of a namespace can make a DaemonSet of any name, of whose pods the API server then refuses those with a hostPath. Its controller does not
// look at one any more that is deleted and that a finalizer keeps, so that nothing is known of its pods for ever, and it counts pods without an owner
// that have the labels of its own (syncDaemonSet and updateDaemonSetStatus of pkg/controller/daemon/daemon_controller.go, Kubernetes 1.37).
func TestDaemonSetOfAUser_stopsNoProvisioning(t *testing.T) {
	for name, status := range map[string]appsv1.DaemonSetStatus{
		"no pod may run":                              {ObservedGeneration: 2, DesiredNumberScheduled: 3},
		"it is deleted, and kept by a finalizer":      {ObservedGeneration: 1, DesiredNumberScheduled: 3},
		"it has other pods, with the labels of its":   {ObservedGeneration: 2, DesiredNumberScheduled: 3, CurrentNumberScheduled: 3, UpdatedNumberScheduled: 3, NumberReady: 3},
		"its pods are of before it had the directory": {ObservedGeneration: 2, DesiredNumberScheduled: 3, CurrentNumberScheduled: 3, NumberReady: 3},
	} {
		for _, of := range []string{upstreamName, operatedName} {
			t.Run(of+" "+name, func(t *testing.T) {
				h := newHarness(t, Config{Mode: PerNode, Namespace: "storage"})
				h.mayMakeVolumes("storage:default", "other:tenant")
				set := serving("tenant", of, "", h.config.Path)
				set.Annotations, set.Generation, set.Status = map[string]string{operatedAnnotation: "{}"}, 2, status
				if status.ObservedGeneration == 1 {
					now := metav1.Now()
					set.DeletionTimestamp, set.Finalizers = &now, []string{"example.com/kept"}
				}
				must.Succeed(t, h.client.Tracker().Add(set))
				if _, _, err := h.Provision(t.Context(), request()); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// While it cannot be asked who may make PersistentVolumes, as where this one lacks the right to, a DaemonSet counts. One that is not of the upstream
// provisioner is forgotten with the first answer.
func TestDaemonSetOfUnknownRights_stopsProvisioning(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode, Namespace: "storage"})
	h.mayMakeVolumes()
	asked := errors.New("not now")
	h.client.PrependReactor("create", "subjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
		return asked != nil, nil, asked
	})
	must.Succeed(t, h.client.Tracker().Add(serving("tenant", upstreamName, "", h.config.Path)))
	if _, _, err := h.Provision(t.Context(), request()); err == nil {
		t.Error("a claim is provisioned beside a DaemonSet of which nothing is known")
	}
	asked = nil
	_, _, err := h.Provision(t.Context(), request())
	must.Succeed(t, err)
}

// A DaemonSet that served the directory does so also when it may not make PersistentVolumes any more: a pod goes on with what it has begun, and
// removes the directory of a claim whose PersistentVolume it cannot make, as its library does, also if another one has made it too.
func TestUpstreamProvisionerThatLosesItsRights_stopsProvisioning(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode, Namespace: "storage"})
	h.mayMakeVolumes("elsewhere:admin")
	set := serving("elsewhere", upstreamName, "admin", h.config.Path)
	set.UID = "uid"
	must.Succeed(t, h.client.Tracker().Add(set))
	if h.findUpstream(t.Context()) == nil {
		t.Error("it was not found")
	}
	for what, answer := range map[string]error{"the API server does not answer": errors.New("not now"), "it has no rights": nil} {
		h.client.PrependReactor("create", "subjectaccessreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, &authorizationv1.SubjectAccessReview{}, answer
		})
		for range 2 {
			if _, _, err := h.Provision(t.Context(), request()); err == nil {
				t.Errorf("%s, and a claim is provisioned", what)
			}
		}
	}
}

// Whether there is one is unknown while the API server cannot be asked, as when it starts, and known anew for each claim: a GitOps tool makes what
// was deleted again.
func TestUpstreamProvisionerThatCannotBeLookedFor_stopsProvisioning(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode, Namespace: "storage"})
	h.mayMakeVolumes("elsewhere:admin")
	unanswered := ""
	h.client.PrependReactor("list", "daemonsets", func(action clienttesting.Action) (bool, runtime.Object, error) {
		of := action.(clienttesting.ListAction).GetListRestrictions().Fields.String()
		return of == "metadata.name="+unanswered, nil, errors.New("etcdserver: request timed out")
	})
	refused := func(want bool) {
		t.Helper()
		if _, _, err := h.Provision(t.Context(), request()); (err != nil) != want {
			t.Errorf("while %q is not answered: %v", unanswered, err)
		}
		if (h.refuseUpstream() != nil) != want {
			t.Errorf("while %q is not answered, ready: %v", unanswered, h.refuseUpstream())
		}
	}
	for _, unanswered = range []string{upstreamName, operatedName} {
		refused(true)
	}
	unanswered = ""
	refused(false)
	must.Succeed(t, h.client.Tracker().Add(serving("elsewhere", upstreamName, "admin", h.config.Path)))
	for _, unanswered = range []string{"", operatedName} {
		refused(true)
	}
}

// The operator of KubeVirt has the same name for its DaemonSet as ours, in a namespace of its own. It is known by what only that operator
// writes.
func TestProvisionerOfUpstreamOperator_stopsProvisioning(t *testing.T) {
	for name, test := range map[string]struct {
		namespace, annotation, path string
		refused                     bool
	}{
		"in another namespace":                 {"kubevirt-hyperconverged", operatedAnnotation, "POOL", true},
		"with another directory":               {"kubevirt-hyperconverged", operatedAnnotation, "/var/other", true},
		"that another operator has made":       {"kubevirt-hyperconverged", "applied", "POOL", false},
		"that was, and is this instance's own": {"storage", operatedAnnotation, "POOL", false},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode, Namespace: "storage"})
			// As createDaemonSetObject of its pkg/controller/hostpathprovisioner/daemonset.go has it (v0.25.2).
			set := serving(test.namespace, "hostpath-provisioner", "hostpath-provisioner-admin", strings.Replace(test.path, "POOL", h.config.Path, 1))
			set.Labels, set.Annotations = map[string]string{"k8s-app": "hostpath-provisioner"}, map[string]string{test.annotation: "{}"}
			h.mayMakeVolumes(test.namespace + ":hostpath-provisioner-admin")
			must.Succeed(t, h.client.Tracker().Add(set))
			_, _, err := h.Provision(t.Context(), request())
			if (err != nil) != test.refused || test.refused && !strings.Contains(err.Error(), "the operator in the namespace kubevirt-hyperconverged") {
				t.Error(err)
			}
		})
	}
}

// The scheduler is asked only when there is a pod, and not for a claim without one.
func TestClaimThatNamesItsNode_isProvisionedWithoutAPod(t *testing.T) {
	late := storagev1.VolumeBindingWaitForFirstConsumer
	claim := func(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		c := request().PVC
		class := "late"
		c.Name, c.UID, c.Annotations, c.Spec.StorageClassName = name, types.UID("uid-"+name), map[string]string{origin.ProvisionOnNode: "node-a"}, &class
		change(c)
		return c
	}
	as := func(*corev1.PersistentVolumeClaim) {}
	foreign := "foreign"
	h := newHarness(t, Config{Mode: PerNode},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "late"}, Provisioner: origin.PerNodeName, VolumeBindingMode: &late},
		&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "foreign"}, Provisioner: "example.com/other", VolumeBindingMode: &late},
		claim("named", as),
		claim("elsewhere", func(c *corev1.PersistentVolumeClaim) { c.Annotations[origin.ProvisionOnNode] = "node-b" }),
		claim("of-a-pod", func(c *corev1.PersistentVolumeClaim) { c.Annotations[SelectedNode] = "node-b" }),
		claim("bound", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "pvc" }),
		claim("foreign", func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = &foreign }),
		claim("unnamed", func(c *corev1.PersistentVolumeClaim) { c.Annotations = nil }))
	h.selectNamedNode(t.Context())
	list, err := h.client.CoreV1().PersistentVolumeClaims("space").List(t.Context(), metav1.ListOptions{})
	must.Succeed(t, err)
	got := map[string]string{}
	for _, c := range list.Items {
		if node := c.Annotations[SelectedNode]; node != "" {
			got[c.Name] = node
		}
	}
	if diff := cmp.Diff(map[string]string{"named": "node-a", "of-a-pod": "node-b"}, got); diff != "" {
		t.Errorf("the selected nodes (- want, + got):\n%s", diff)
	}
}

// As after a kill between the directory and its PersistentVolume.
func TestAbandonedDirectory_isRemovedIfItIsEmptyAndOurs(t *testing.T) {
	uids := map[string]string{ // by what there is besides the directory, or was
		"nothing": "00000000-2222-3333-4444-555555555555", "content": "11111111-2222-3333-4444-555555555555", "claim": "22222222-2222-3333-4444-555555555555",
		"volume": "33333333-2222-3333-4444-555555555555", "no record": "44444444-2222-3333-4444-555555555555",
		"volume of another name": "55555555-2222-3333-4444-555555555555", "volume, once": "66666666-2222-3333-4444-555555555555",
	}
	claim := request().PVC
	claim.UID = types.UID(uids["claim"])
	h := newHarness(t, Config{Mode: PerNode, NamePrefix: true}, claim)
	want := h.abandon(uids)
	slices.Sort(want)
	must.Succeed(t, os.WriteFile(filepath.Join(h.config.Path, "claim-pvc-"+uids["content"], "file"), nil, 0o600))
	byHand := corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: filepath.Join(h.config.Path, "claim-pvc-"+uids["volume of another name"])}}
	// One that the informer does not have yet, and one that it keeps although no provisioner made it.
	_, err := h.client.CoreV1().PersistentVolumes().Create(t.Context(), &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-" + uids["volume"]}}, metav1.CreateOptions{})
	must.Succeed(t, err)
	must.Succeed(t, h.instance.volumes.GetIndexer().Add(&corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "by-hand"}, Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: byHand}}))
	once := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-" + uids["volume, once"]}}
	must.Succeed(t, h.instance.volumes.GetIndexer().Add(once))
	h.checkTwice()
	// It was retained, and deleted by hand, or is being migrated. Then the provisioner is restarted.
	must.Succeed(t, h.instance.volumes.GetIndexer().Delete(once))
	h.checkTwice()
	if diff := cmp.Diff(want, h.directories()); diff != "" {
		t.Errorf("(- want, + got):\n%s", diff)
	}
}

// abandon makes directories without PersistentVolumes, and returns those that have to stay.
func (h *harness) abandon(uids map[string]string) (staying []string) {
	h.Helper()
	for what, uid := range uids {
		name := "claim-pvc-" + uid
		if what == "no record" {
			must.Succeed(h.T, os.Mkdir(filepath.Join(h.config.Path, name), 0o777))
		} else {
			_, _, err := h.Provision(h.Context(), request(func(o *controller.ProvisionOptions) { o.PVName = "pvc-" + uid }))
			must.Succeed(h.T, err)
		}
		if what != "nothing" {
			staying = append(staying, name)
		}
	}
	return staying
}

// checkTwice looks for what is abandoned, as a new process does.
func (h *harness) checkTwice() {
	a := &abandoned{Provisioner: h.Provisioner, settled: make(map[volume.ID]types.UID)}
	for range 2 {
		a.remove(h.Context())
	}
}

// Another provisioner of the name was first on the node, with a directory of its own: the PersistentVolume of the name is that, and no one's here.
func TestAbandonedDirectories_ofPersistentVolumesElsewhere(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode})
	o := request()
	_, _, err := h.Provision(t.Context(), o)
	must.Succeed(t, err)
	pv := own(t, t.TempDir())
	pv.Name, pv.UID, pv.Status.Phase = o.PVName, "first", corev1.VolumeBound
	pv.Spec.HostPath.Path = filepath.Join("/var/other", o.PVName)
	_, err = h.client.CoreV1().PersistentVolumes().Create(t.Context(), pv, metav1.CreateOptions{})
	must.Succeed(t, err)
	h.looked(pv)
	if left := h.directories(); len(left) > 0 {
		t.Errorf("left with their promises: %v", left)
	}
}

// The node was down while its claim was given to another, whose directory has the same path. What pods of this node may use stays, and is looked at
// again once that is gone.
func TestAbandonedDirectories_ofClaimThatAnotherNodeGot(t *testing.T) {
	for name, tt := range map[string]struct {
		affinity *corev1.VolumeNodeAffinity
		kept     bool
	}{
		"for the other node": {onHost("host-b"), false},
		"for any node":       {nil, true},
		"for this node too":  {onHost("host-a"), true},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, Config{Mode: PerNode})
			o := request()
			_, _, err := h.Provision(t.Context(), o)
			must.Succeed(t, err)
			pv := own(t, t.TempDir())
			pv.Name, pv.UID, pv.Status.Phase = o.PVName, "first", corev1.VolumeBound
			pv.Spec.HostPath.Path = filepath.Join(h.config.Path, o.PVName)
			pv.Annotations[origin.ProvisionOnNode] = "node-b"
			pv.Spec.NodeAffinity = tt.affinity
			volumes := h.client.CoreV1().PersistentVolumes()
			_, err = volumes.Create(t.Context(), pv, metav1.CreateOptions{})
			must.Succeed(t, err)
			a := &abandoned{Provisioner: h.Provisioner, settled: make(map[volume.ID]types.UID)}
			a.remove(t.Context())
			if left := h.directories(); len(left) > 0 != tt.kept {
				t.Fatalf("left with their promises: %v", left)
			}
			if !tt.kept {
				return
			}
			must.Succeed(t, volumes.Delete(t.Context(), pv.Name, metav1.DeleteOptions{}))
			a.remove(t.Context())
			if left := h.directories(); len(left) > 0 {
				t.Errorf("left with their promises when no PersistentVolume is there any more: %v", left)
			}
		})
	}
}

// What names a directory stays what it is for pods of this node, if its affinity is for it, whatever node its annotation names.
func TestDelete_directoryOfAnotherThatIsAnnotatedOtherwise(t *testing.T) {
	for name, tt := range map[string]struct {
		affinity *corev1.VolumeNodeAffinity
		kept     bool
	}{
		"for this node":         {onHost("host-a"), true},
		"for any node":          {nil, true},
		"for the annotated one": {onHost("node-b"), false},
	} {
		t.Run(name, func(t *testing.T) {
			pool := t.TempDir()
			pv := own(t, pool)
			other := pv.DeepCopy()
			other.Name, other.UID, other.Status.Phase = "pvc-99999999-2222-3333-4444-555555555555", "other", corev1.VolumeBound
			other.Annotations[origin.ProvisionOnNode] = "node-b"
			other.Spec.NodeAffinity = tt.affinity
			h := newHarness(t, Config{Mode: PerNode, Path: pool})
			if h.config.keeps(other) {
				must.Succeed(t, h.instance.volumes.GetIndexer().Add(other))
			}
			err := h.Delete(t.Context(), pv)
			if left := len(h.directories()) > 0; left != tt.kept || (err != nil) != tt.kept {
				t.Errorf("the directory is kept: %v, want %v: %v", left, tt.kept, err)
			}
		})
	}
}

// A provisioner runs for months, while volumes come and go.
func TestAbandonedDirectories_areForgottenWithTheirVolumes(t *testing.T) {
	h := newHarness(t, Config{Mode: PerNode})
	_, _, err := h.Provision(t.Context(), request())
	must.Succeed(t, err)
	must.Succeed(t, h.instance.volumes.GetIndexer().Add(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	a := &abandoned{Provisioner: h.Provisioner, settled: make(map[volume.ID]types.UID)}
	a.remove(t.Context())
	before := len(a.settled)
	must.Succeed(t, h.pool.Delete(t.Context(), must.Value(volume.ParseID(name))(t)))
	a.remove(t.Context())
	if before != 1 || len(a.settled) != 0 {
		t.Errorf("it remembers %d volumes, and %d once they are gone", before, len(a.settled))
	}
}

// The API server takes no event whose name has a part that ends with a dash.
func TestEventAboutAnObjectWithALongName(t *testing.T) {
	for _, end := range []string{"-b", ".b", "bb"} {
		e := newEvent(&corev1.ObjectReference{Name: strings.Repeat("a", 199) + end}, corev1.EventTypeWarning, "Reason", "message")
		if wrong := validation.IsDNS1123Subdomain(e.Name); wrong != nil {
			t.Errorf("%s: %v", e.Name, wrong)
		}
	}
}

func TestJoinName(t *testing.T) {
	long := strings.Repeat("x", 253)
	tests := map[string]struct{ prefix, want string }{
		"short": {"space-claim", "space-claim-" + name},
		"long":  {long, strings.Repeat("x", 146) + "-"},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			got := joinName(tt.prefix, name)
			if _, err := volume.ParseID(got); err != nil {
				t.Error(err)
			}
			if !strings.HasPrefix(got, tt.want) || !strings.HasSuffix(got, "-"+name) {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
	if joinName(long+"a", name) == joinName(long+"b", name) {
		t.Error("two long names are the same")
	}
}

// A PersistentVolume that becomes another node's has to leave the informer.
func TestFilterEvent(t *testing.T) {
	config := Config{Mode: PerNode, Node: "node-a"}
	pv := own(t, t.TempDir())
	if out, _ := config.filterEvent(watch.Event{Type: watch.Modified, Object: pv}); out.Type != watch.Modified {
		t.Errorf("its own is %s", out.Type)
	}
	pv.Annotations[origin.ProvisionOnNode] = "node-b"
	if out, _ := config.filterEvent(watch.Event{Type: watch.Modified, Object: pv}); out.Type != watch.Deleted {
		t.Errorf("another node's is %s", out.Type)
	}
	// What was made by hand may be of the same directory.
	config.Path = "/pool"
	for path, want := range map[string]watch.EventType{"/pool/volume/": watch.Modified, "/pool/volume/sub": watch.Modified, "/pool": watch.Deleted, "/else": watch.Deleted} {
		byHand := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: path}}}}
		if out, _ := config.filterEvent(watch.Event{Type: watch.Modified, Object: byHand}); out.Type != want {
			t.Errorf("one of %s is %s, want %s", path, out.Type, want)
		}
	}
}
