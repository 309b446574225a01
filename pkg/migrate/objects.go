package migrate

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

const (
	// provisionerFinalizer is what provisioners put on PersistentVolumes of which they are to remove the directory.
	provisionerFinalizer = "external-provisioner.volume.kubernetes.io/finalizer"
	volumeProtection     = "kubernetes.io/pv-protection"
	claimProtection      = "kubernetes.io/pvc-protection"
	// bindCompleted and boundByController are the PV controller's, about one pair of objects.
	bindCompleted     = "pv.kubernetes.io/bind-completed"
	boundByController = "pv.kubernetes.io/bound-by-controller"
	// betaClass and betaProvisioner are older names of fields and annotations.
	betaClass       = "volume.beta.kubernetes.io/storage-class"
	betaProvisioner = "volume.beta.kubernetes.io/storage-provisioner"
)

// ours are the finalizers whose owners this program knows.
var ours = []string{provisionerFinalizer, volumeProtection, claimProtection}

// meta is what is kept of the metadata of an object that is replaced.
func meta(old metav1.ObjectMeta, without ...string) metav1.ObjectMeta {
	annotations := maps.Clone(old.Annotations)
	for _, key := range append(without, bindCompleted, boundByController) {
		delete(annotations, key)
	}
	return metav1.ObjectMeta{
		Name: old.Name, Namespace: old.Namespace,
		Labels: maps.Clone(old.Labels), Annotations: annotations, OwnerReferences: slices.Clone(old.OwnerReferences),
	}
}

// keepVolume and keepClaim have the objects that are made from now on have what others have changed of the present ones.
func (s *saved) keepVolume(now *corev1.PersistentVolume, is form) {
	s.kept = keep(&s.Volume.ObjectMeta, s.volume(is, client.Volume{}).ObjectMeta, now.ObjectMeta) || s.kept
}

func (s *saved) keepClaim(now *corev1.PersistentVolumeClaim, is form) {
	s.kept = keep(&s.Claim.ObjectMeta, s.claim(is).ObjectMeta, now.ObjectMeta) || s.kept
}

// keep takes over how an object differs from what it was made as: its labels, annotations and owners.
func keep(kept *metav1.ObjectMeta, made, now metav1.ObjectMeta) (changed bool) {
	labels, annotations := keepIn(&kept.Labels, made.Labels, now.Labels), keepIn(&kept.Annotations, made.Annotations, now.Annotations)
	if equality.Semantic.DeepEqual(made.OwnerReferences, now.OwnerReferences) {
		return labels || annotations
	}
	kept.OwnerReferences = slices.Clone(now.OwnerReferences)
	return true
}

// controllers are the domains of what Kubernetes' controllers note about a claim and its volume, which is not true of those that are made anew.
var controllers = []string{"pv.kubernetes.io", "volume.kubernetes.io", "volume.beta.kubernetes.io"}

func keepIn(kept *map[string]string, made, now map[string]string) (changed bool) {
	all := maps.Clone(made)
	if all == nil {
		all = make(map[string]string)
	}
	maps.Copy(all, now)
	for key := range all {
		before, had := made[key]
		value, has := now[key]
		if domain, _, _ := strings.Cut(key, "/"); had == has && before == value || slices.Contains(controllers, domain) {
			continue
		}
		changed = true
		if !has {
			delete(*kept, key)
			continue
		}
		if *kept == nil {
			*kept = make(map[string]string)
		}
		(*kept)[key] = value
	}
	return changed
}

// claimRef lets the claim of that name be bound, and no other. Its uid is filled in when that has happened.
func (s *saved) claimRef() *corev1.ObjectReference {
	ref := s.Volume.Spec.ClaimRef
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: ref.Namespace, Name: ref.Name}
}

// volume is the PersistentVolume of a form. It is Retain until everything is done.
func (s *saved) volume(want form, reported client.Volume) *corev1.PersistentVolume {
	if want == plain {
		pv := &corev1.PersistentVolume{ObjectMeta: meta(s.Volume.ObjectMeta), Spec: *s.Volume.Spec.DeepCopy()}
		pv.Spec.ClaimRef, pv.Spec.PersistentVolumeReclaimPolicy = s.claimRef(), corev1.PersistentVolumeReclaimRetain
		return pv
	}
	pv := &corev1.PersistentVolume{
		ObjectMeta: meta(s.Volume.ObjectMeta, betaClass),
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(s.Bytes, resource.BinarySI)},
			AccessModes:                   slices.Clone(s.Volume.Spec.AccessModes),
			PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimRetain,
			StorageClassName:              s.Class,
			VolumeMode:                    s.Volume.Spec.VolumeMode,
			ClaimRef:                      s.claimRef(),
			NodeAffinity:                  affinity(reported.Segments),
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{
				Driver: s.Driver, VolumeHandle: s.To.Name, VolumeAttributes: reported.Context,
			}},
		},
	}
	if pv.Annotations == nil {
		pv.Annotations = make(map[string]string)
	}
	// By this the driver's provisioner knows that it is to delete the volume.
	pv.Annotations[origin.ProvisionedBy] = s.Driver
	return pv
}

// affinity is for nodes that have one of the segments; nil for all nodes.
func affinity(segments []map[string]string) *corev1.VolumeNodeAffinity {
	if len(segments) == 0 {
		return nil
	}
	var selector corev1.NodeSelector
	for _, segment := range segments {
		var term corev1.NodeSelectorTerm
		for _, key := range slices.Sorted(maps.Keys(segment)) {
			term.MatchExpressions = append(term.MatchExpressions, corev1.NodeSelectorRequirement{
				Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{segment[key]},
			})
		}
		selector.NodeSelectorTerms = append(selector.NodeSelectorTerms, term)
	}
	return &corev1.VolumeNodeAffinity{Required: &selector}
}

// claim is the claim of a form. It names its volume, so that no provisioner makes another.
func (s *saved) claim(want form) *corev1.PersistentVolumeClaim {
	claim := &corev1.PersistentVolumeClaim{Spec: *s.Claim.Spec.DeepCopy()}
	// A populator would fill the volume from the source again.
	claim.Spec.DataSource, claim.Spec.DataSourceRef = nil, nil
	claim.Spec.VolumeName = s.Volume.Name
	if want == plain {
		claim.ObjectMeta = meta(s.Claim.ObjectMeta)
		return claim
	}
	claim.ObjectMeta = meta(s.Claim.ObjectMeta, betaClass, betaProvisioner, provisioner.StorageProvisioner, provisioner.SelectedNode)
	claim.Spec.StorageClassName = &s.Class
	claim.Spec.Selector, claim.Spec.VolumeAttributesClassName = nil, nil
	return claim
}

// users are the pods that use a claim, or will: those that have not ended.
func users(pods []corev1.Pod, claim string) (names []string) {
	for _, pod := range pods {
		if ended(&pod) {
			continue
		}
		uses := func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == claim || v.Ephemeral != nil && pod.Name+"-"+v.Name == claim
		}
		if slices.ContainsFunc(pod.Spec.Volumes, uses) {
			names = append(names, pod.Name)
		}
	}
	return names
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
