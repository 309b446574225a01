// Package webhook checks HostPathProvisioner objects against other objects of the cluster, which the rules of their
// definition cannot, and chooses the node of claims that are made from something. It is optional: what it finds is found by
// the reconciler too, or is a mistake that the user may make, and claims find their node by themselves in the end.
package webhook

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/place"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

// A Validator is what the API server asks about objects that are created or changed.
type Validator struct {
	// Reader reads from the API server.
	Reader client.Reader
}

// Handler answers the calls of the API server.
func (v *Validator) Handler(scheme *runtime.Scheme) *admission.Webhook {
	return admission.WithValidator(scheme, v)
}

// A refusal is an error of the object. Any other error is one of the operator, as of a read that is cut short because it ends.
type refusal struct{ error }

func refuse(format string, args ...any) error { return refusal{fmt.Errorf(format, args...)} }

// answer has an error of the operator be one of the server, which clients repeat. As a denial it would be read as a judgement of the object.
func answer(warnings admission.Warnings, err error) (admission.Warnings, error) {
	var refused refusal
	switch {
	case err == nil:
		return warnings, nil
	case errors.As(err, &refused):
		return warnings, errors.New(err.Error()) // an error of the API server beside it would give its code
	}
	return nil, apierrors.NewServiceUnavailable("the object could not be checked, try again: " + err.Error())
}

// ValidateCreate refuses an object beside another one, and pools that cannot work.
func (v *Validator) ValidateCreate(ctx context.Context, object *hppv1.HostPathProvisioner) (admission.Warnings, error) {
	return answer(v.created(ctx, object))
}

func (v *Validator) created(ctx context.Context, object *hppv1.HostPathProvisioner) (admission.Warnings, error) {
	all := &hppv1.HostPathProvisionerList{}
	if err := v.Reader.List(ctx, all); err != nil {
		return nil, err
	}
	for _, other := range all.Items {
		if other.Name != object.Name && other.DeletionTimestamp == nil {
			return nil, refuse("there can be only one HostPathProvisioner, and there is %s", other.Name)
		}
	}
	return v.check(ctx, object, render.Pools(object))
}

// ValidateUpdate refuses to remove pools with volumes, and to add such that cannot work. Everything else about an object that
// is there was accepted once, and stays so.
func (v *Validator) ValidateUpdate(ctx context.Context, before, after *hppv1.HostPathProvisioner) (admission.Warnings, error) {
	return answer(v.updated(ctx, before, after))
}

func (v *Validator) updated(ctx context.Context, before, after *hppv1.HostPathProvisioner) (admission.Warnings, error) {
	// Finalizers and labels of an object that is being deleted, or with a spec as it was, are not checked.
	if after.DeletionTimestamp != nil || equality.Semantic.DeepEqual(before.Spec, after.Spec) {
		return nil, nil
	}
	had, has := render.Pools(before), render.Pools(after)
	if removed := without(had, has); len(removed) > 0 {
		if err := v.unused(ctx, removed); err != nil {
			return nil, err
		}
	}
	warnings, err := v.check(ctx, after, without(has, had))
	if before.Spec.PathConfig == nil || after.Spec.PathConfig != nil || err != nil {
		return warnings, err
	}
	left, err := v.leftByProvisioner(ctx)
	return append(left, warnings...), err
}

// ValidateDelete is not called: an object can always be deleted.
func (v *Validator) ValidateDelete(context.Context, *hppv1.HostPathProvisioner) (admission.Warnings, error) {
	return nil, nil
}

// without are the pools that have no namesake among others.
func without(pools, others []hppv1.StoragePool) []hppv1.StoragePool {
	return slices.DeleteFunc(slices.Clone(pools), func(p hppv1.StoragePool) bool {
		return slices.ContainsFunc(others, func(o hppv1.StoragePool) bool { return o.Name == p.Name })
	})
}

func (v *Validator) check(ctx context.Context, object *hppv1.HostPathProvisioner, added []hppv1.StoragePool) (admission.Warnings, error) {
	warnings := append(deprecations(object), render.Notices(object)...)
	var problems []error
	for _, pool := range added {
		warning, err := v.checkClass(ctx, pool, len(render.Pools(object)) == 1)
		problems = append(problems, err)
		if warning != "" {
			warnings = append(warnings, warning)
		}
	}
	if len(added) > 0 {
		around, err := v.checkPaths(ctx, added)
		warnings, problems = append(warnings, around...), append(problems, err)
	}
	return warnings, errors.Join(problems...)
}

func deprecations(object *hppv1.HostPathProvisioner) admission.Warnings {
	var warnings admission.Warnings
	if config := object.Spec.PathConfig; config != nil {
		warnings = append(warnings, fmt.Sprintf("spec.pathConfig is deprecated: a storagePool with the name %s and the path %s has the same volumes of the CSI driver",
			hppv1.LegacyPool, config.Path))
	}
	for _, pool := range object.Spec.StoragePools {
		template := pool.PVCTemplate
		switch {
		case template == nil && (pool.FSType != "" || len(pool.MountOptions) > 0):
			warnings = append(warnings, fmt.Sprintf("pool %s: fsType and mountOptions have no effect without a pvcTemplate", pool.Name))
		case template != nil && template.VolumeMode == nil:
			warnings = append(warnings, fmt.Sprintf("pool %s: pvcTemplate has no volumeMode, which means Filesystem; Block is formatted and mounted by the operator", pool.Name))
		case template != nil && *template.VolumeMode == corev1.PersistentVolumeFilesystem && (pool.FSType != "" || len(pool.MountOptions) > 0):
			warnings = append(warnings, fmt.Sprintf("pool %s: fsType and mountOptions have no effect with the volumeMode Filesystem", pool.Name))
		}
	}
	return warnings
}

// checkClass refuses a template whose claims would be volumes of their own pool, which of a class without a pool is the only one.
func (v *Validator) checkClass(ctx context.Context, pool hppv1.StoragePool, only bool) (warning string, err error) {
	if pool.PVCTemplate == nil || pool.PVCTemplate.StorageClassName == nil || *pool.PVCTemplate.StorageClassName == "" {
		return "", nil
	}
	name := *pool.PVCTemplate.StorageClassName
	class := &storagev1.StorageClass{}
	if err := v.Reader.Get(ctx, client.ObjectKey{Name: name}, class); apierrors.IsNotFound(err) {
		return fmt.Sprintf("pool %s: there is no StorageClass %s yet", pool.Name, name), nil
	} else if err != nil {
		return "", err
	}
	of := class.Parameters[render.PoolParameter]
	if class.Provisioner == render.DriverName && (of == pool.Name || of == "" && (only || pool.Name == hppv1.LegacyPool)) {
		return "", refuse("pool %s: the volumes of the StorageClass %s lie in this pool, which cannot lie on one of them", pool.Name, name)
	}
	return "", nil
}

// unused refuses if PersistentVolumes name pools that are to be removed. It says no more than where they were made.
func (v *Validator) unused(ctx context.Context, removed []hppv1.StoragePool) error {
	volumes := map[string][]string{}
	err := place.EachVolume(ctx, v.Reader, func(volume *corev1.PersistentVolume) {
		if place.OfDriver(volume) {
			pool := cmp.Or(volume.Spec.CSI.VolumeAttributes[render.PoolParameter], hppv1.LegacyPool)
			volumes[pool] = append(volumes[pool], volume.Name)
		}
	})
	if err != nil {
		return err
	}
	var problems []error
	for _, pool := range removed {
		if left := volumes[pool.Name]; len(left) > 0 {
			problems = append(problems, refuse("pool %s may have %s, such as %s, which name it: delete their claims before the pool", pool.Name, place.Count(len(left)), slices.Min(left)))
		}
	}
	return errors.Join(problems...)
}

// leftByProvisioner warns of volumes that the pre-CSI provisioner has made, and that no controller deletes once it is gone.
func (v *Validator) leftByProvisioner(ctx context.Context) (admission.Warnings, error) {
	var left []string
	err := place.EachVolume(ctx, v.Reader, func(volume *corev1.PersistentVolume) {
		if place.OfLegacyProvisioner(volume) {
			left = append(left, volume.Name)
		}
	})
	if len(left) == 0 || err != nil {
		return nil, err
	}
	return admission.Warnings{fmt.Sprintf("without spec.pathConfig nothing deletes %s of the pre-CSI provisioner, such as %s. Pods can still use such volumes",
		place.Count(len(left)), slices.Min(left))}, nil
}

// checkPaths refuses pools in directories that have volumes of other provisioners, and warns of those that are in such a volume.
func (v *Validator) checkPaths(ctx context.Context, added []hppv1.StoragePool) (warnings admission.Warnings, err error) {
	const most = 5
	var problems []error
	err = place.EachVolume(ctx, v.Reader, func(volume *corev1.PersistentVolume) {
		directory := origin.Path(volume)
		if directory == "" {
			return
		}
		for _, pool := range added {
			switch data := render.DataDirectory(pool); {
			case origin.Inside(directory, data) && len(problems) < most:
				problems = append(problems, refuse("pool %s: the PersistentVolume %s is %s, which lies in the pool's directory %s", pool.Name, volume.Name, directory, data))
			case origin.Inside(data, directory) && len(warnings) < most:
				warnings = append(warnings, fmt.Sprintf("pool %s: its directory %s lies in the PersistentVolume %s, which is %s", pool.Name, data, volume.Name, directory))
			}
		}
	})
	return warnings, errors.Join(append(problems, err)...)
}
