package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A checker finds what would stop a migration, before anything is changed.
type checker struct {
	Config
	client kubernetes.Interface
	driver Driver
	host   *dir.Dir
	target target
}

// check finds all that would stop a migration that has not begun, and completes what is to be saved.
func (c checker) check(ctx context.Context, s *saved) error {
	if s.missing != nil {
		return fmt.Errorf("the claim of the PersistentVolume is gone: %w", s.missing)
	}
	problems := append(s.checkObjects(), c.checkOwner(s), c.checkOthers(ctx, s), c.checkServed(ctx, s))
	h := s.handover(csi)
	err := errors.Join(h.Check(), c.checkHandle(ctx, s))
	problems = append(problems, err)
	if err != nil {
		return errors.Join(problems...)
	}
	where, err := h.Find()
	if err != nil {
		return errors.Join(append(problems, err)...)
	}
	request := s.Claim.Spec.Resources.Requests[corev1.ResourceStorage]
	promised, err := h.Promise(request.Value())
	s.Recorded, s.Bytes = where.From.Recorded, max(where.From.Bytes, promised)
	if err := errors.Join(append(problems, err)...); err != nil {
		return err
	}
	return c.tryCreate(ctx, s)
}

// checkHandle refuses a name that the driver has a volume of, in any pool, unless that is the directory itself: it would take the
// record of one that was lost, or serve neither of two.
func (c checker) checkHandle(ctx context.Context, s *saved) error {
	id, err := volume.ParseID(s.To.Name)
	if err != nil {
		return err
	}
	has, err := c.driver.Volume(ctx, id)
	if errors.Is(err, volume.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ask the driver whether it has a volume %s: %w", id, err)
	}
	in, err := poolOf(c.Pools, has.Context["storagePool"])
	if err != nil || in.Path != s.From.Directory {
		return fmt.Errorf("the driver has a volume %s already, in its pool %s: see what inspect says of it there", id, has.Context["storagePool"])
	}
	return nil
}

// tryCreate asks the API server, which then creates nothing, whether it would take the new objects: a quota, a webhook or a
// right that is missing would otherwise be met after the old ones are deleted. Their names are still taken.
func (c checker) tryCreate(ctx context.Context, s *saved) error {
	const prefix = "migrate-check-"
	try := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	pv, claim := s.volume(csi, client.Volume{}), s.claim(csi)
	pv.Name, pv.GenerateName, claim.Name, claim.GenerateName = "", prefix, "", prefix
	_, volumeErr := c.client.CoreV1().PersistentVolumes().Create(ctx, pv, try)
	_, claimErr := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Create(ctx, claim, try)
	if volumeErr != nil {
		volumeErr = fmt.Errorf("the API server would refuse the new PersistentVolume: %w", volumeErr)
	}
	if claimErr != nil {
		claimErr = fmt.Errorf("the API server would refuse the new claim, beside the old one: %w", claimErr)
	}
	return errors.Join(volumeErr, claimErr)
}

// checkOwner refuses what no known provisioner made, and paths that the administrator has not said may be moved.
func (c checker) checkOwner(s *saved) error {
	by := s.Volume.Annotations[origin.ProvisionedBy]
	if !slices.Contains(provisioners, by) {
		return fmt.Errorf("it was made by %q, and can be migrated only if it is of one of %s", by, strings.Join(provisioners, ", "))
	}
	path := origin.Path(s.Volume)
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return fmt.Errorf("path %q of the PersistentVolume has empty parts, . or ..: make a PersistentVolume by hand that names %s", path, filepath.Clean(path))
	}
	if s.From.Directory != s.To.Directory && !slices.Contains(c.From, s.From.Directory) {
		return fmt.Errorf("path %s is not a directory in the pool %s, nor in one that --from-dir names", path, s.To.Directory)
	}
	return nil
}

// checkObjects finds in the objects what would stop the migration, or would not be the same after it.
func (s *saved) checkObjects() (problems []error) {
	refuse := func(is bool, format string, args ...any) {
		if is {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	pv, claim := s.Volume, s.Claim
	refuse(pv.Status.Phase != corev1.VolumeBound || claim.Status.Phase != corev1.ClaimBound || pv.Spec.ClaimRef.UID != claim.UID || claim.Spec.VolumeName != pv.Name,
		"the claim and the PersistentVolume are not bound to each other (%s, %s): only data that a claim has can be migrated", claim.Status.Phase, pv.Status.Phase)
	refuse(pv.DeletionTimestamp != nil || claim.DeletionTimestamp != nil, "it is being deleted")
	refuse(pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode != corev1.PersistentVolumeFilesystem, "it is a block volume, which cannot be migrated: copy its content")
	refuse(len(pv.Spec.MountOptions) > 0, "the PersistentVolume has mountOptions %q, which have no effect on a hostPath volume and would have one on a CSI volume", pv.Spec.MountOptions)
	refuse(len(pv.Spec.AccessModes) > 0 && pv.Spec.AccessModes[0] == corev1.ReadOnlyMany,
		"its first access mode is ReadOnlyMany, which has no effect on a hostPath volume, and with which pods could not write to a CSI volume: put another one first, by kubectl patch pv %s -p '%s'",
		pv.Name, modesPatch(pv.Spec.AccessModes))
	for _, finalizer := range slices.Concat(pv.Finalizers, claim.Finalizers) {
		refuse(!slices.Contains(ours, finalizer), "it has the finalizer %s, whose owner has to remove it first", finalizer)
	}
	return problems
}

// modesPatch has a PersistentVolume have the same access modes, and first one by which pods can write: kubelet mounts a CSI volume by the first.
func modesPatch(modes []corev1.PersistentVolumeAccessMode) string {
	first := slices.DeleteFunc(slices.Clone(modes), func(mode corev1.PersistentVolumeAccessMode) bool { return mode == corev1.ReadOnlyMany })
	if len(first) == 0 {
		first = append(first, corev1.ReadWriteOnce)
	}
	var quoted []string
	for _, mode := range append(first, corev1.ReadOnlyMany) {
		quoted = append(quoted, strconv.Quote(string(mode)))
	}
	return fmt.Sprintf(`{"spec":{"accessModes":[%s]}}`, strings.Join(quoted, ","))
}

// checkServed refuses a pool that a provisioner from before CSI serves too, of a shared pool on any node: each would
// clean up what the other makes.
func (c checker) checkServed(ctx context.Context, s *saved) error {
	var on metav1.ListOptions
	if !c.target.pool.Shared {
		on.FieldSelector = "spec.nodeName=" + c.Node
	}
	pods, err := c.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, on)
	if err != nil {
		return err
	}
	var problems []error
	isPool := func(path string) bool {
		is, err := c.isDirectory(path, s.To.Directory)
		problems = append(problems, err)
		return is
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
		if !c.target.pool.Shared && pod.Spec.NodeName != c.Node || slices.Contains(c.NoProvisioners, name) {
			continue
		}
		is, may := serves(pod, isPool)
		if is {
			return fmt.Errorf("pod %s is a provisioner with PV_DIR=%s, so that two programs serve this pool: delete its DaemonSet or Deployment first", name, s.To.Directory)
		}
		if may != "" {
			return fmt.Errorf("pod %s has %s mounted, and may be a provisioner that serves it, by %s: if it is, delete its DaemonSet or Deployment first; if not, give --no-provisioner=%s",
				name, s.To.Directory, may, name)
		}
	}
	return errors.Join(problems...)
}

// serves reports whether a pod is a provisioner from before CSI whose directory is the pool. Where its configuration is not in the pod, a pod that
// has the directory mounted may be one, by what is returned.
func serves(pod *corev1.Pod, isPool func(path string) bool) (is bool, may string) {
	mounts := slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && isPool(v.HostPath.Path)
	})
	for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, d := range directories(&container) {
			switch {
			case d.unknown != "" && mounts:
				may = cmp.Or(may, d.unknown)
			case d.unknown == "" && isPool(d.path):
				return true, ""
			}
		}
	}
	return false, may
}

// A pvDir is a directory that a container may have as PV_DIR, or where the Pod has that from.
type pvDir struct{ path, unknown string }

const pvDirVariable = "PV_DIR"

// directories are what a container is given as PV_DIR, by its flags and its variables.
func directories(c *corev1.Container) (found []pvDir) {
	words := append(slices.Clone(c.Command), c.Args...)
	for i, word := range words {
		name, path, given := strings.Cut(word, "=")
		if name != "--pv-dir" && name != "-pv-dir" {
			continue
		}
		if !given && i+1 < len(words) {
			path = words[i+1]
		}
		found = append(found, pathOr(path, word))
	}
	if len(found) > 0 {
		return found // which go before variables
	}
	// The last of a name counts, and goes before those from elsewhere.
	for _, e := range slices.Backward(c.Env) {
		if e.Name != pvDirVariable {
			continue
		}
		if e.ValueFrom != nil {
			return append(found, pvDir{unknown: pvDirVariable + " from elsewhere"})
		}
		return append(found, pathOr(e.Value, pvDirVariable+"="+e.Value))
	}
	for _, from := range c.EnvFrom {
		if !strings.HasPrefix(pvDirVariable, from.Prefix) {
			continue
		}
		switch {
		case from.ConfigMapRef != nil:
			found = append(found, pvDir{unknown: "variables of the ConfigMap " + from.ConfigMapRef.Name})
		case from.SecretRef != nil:
			found = append(found, pvDir{unknown: "variables of the Secret " + from.SecretRef.Name})
		}
	}
	return found
}

// pathOr is a path, unless it takes a variable.
func pathOr(path, otherwise string) pvDir {
	if strings.Contains(path, "$(") {
		return pvDir{unknown: otherwise}
	}
	return pvDir{path: path}
}
