package migrate

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Chosen selects claims of this node: those that are named, and those that have all of the rest.
type Chosen struct {
	Claims    []types.NamespacedName
	Namespace string
	Class     string // of the old objects
	All       bool
}

// Empty reports whether nothing is chosen.
func (c Chosen) Empty() bool {
	return len(c.Claims) == 0 && c.Namespace == "" && c.Class == "" && !c.All
}

func (c Chosen) named(claim types.NamespacedName) bool { return slices.Contains(c.Claims, claim) }

func (c Chosen) includes(claim types.NamespacedName, class string) bool {
	return c.named(claim) || (c.All || c.Namespace != "" || c.Class != "") && (c.Namespace == "" || c.Namespace == claim.Namespace) && (c.Class == "" || c.Class == class)
}

const localPath = "rancher.io/local-path"

// provisioners are those whose PersistentVolumes can be migrated.
var provisioners = []string{origin.PerNodeName, origin.SingleNodeName, localPath}

type choice struct {
	here      []*saved
	elsewhere map[string]int // by node
	missing   []types.NamespacedName
}

type target struct {
	driver     string
	pool       poolconfig.Pool
	parameters map[string]string
}

// findTarget finds the driver, the class and the pool, and all that is wrong with them. An undo needs none.
func (m *migration) findTarget(ctx context.Context) (t target, err error) {
	if m.Undo {
		return t, nil
	}
	if t.driver, err = m.driver.Name(ctx); err != nil {
		return t, fmt.Errorf("ask the driver on this node, whose socket --socket names: %w", err)
	}
	class, err := m.client.StorageV1().StorageClasses().Get(ctx, m.Class, metav1.GetOptions{})
	if err != nil {
		return t, fmt.Errorf("read the StorageClass of the new volumes: %w", err)
	}
	if class.Provisioner != t.driver {
		return t, fmt.Errorf("StorageClass %s is of %s, and the driver on this node is %s", class.Name, class.Provisioner, t.driver)
	}
	if t.pool, err = m.poolOf(class.Parameters["storagePool"]); err != nil {
		return t, fmt.Errorf("StorageClass %s: %w", class.Name, err)
	}
	if err := m.checkServes(ctx, class.Parameters); err != nil {
		return t, fmt.Errorf("StorageClass %s: the driver on this node answers: %w", class.Name, err)
	}
	t.parameters = class.Parameters
	return t, nil
}

// checkServes refuses a pool that the driver does not serve, for which it reports the capacity 0: the old objects would be
// deleted, and the driver would not report the volume. A full pool, which has that capacity too, can take a directory that is
// there already. Then a driver that serves its pools knows of a volume that it is not there.
func (m *migration) checkServes(ctx context.Context, parameters map[string]string) error {
	available, err := m.driver.Available(ctx, parameters)
	if err != nil || available > 0 {
		return err
	}
	id, err := volume.ParseID("migrate-" + rand.Text())
	if err != nil {
		return err
	}
	if _, err = m.driver.Volume(ctx, id); errors.Is(err, volume.ErrNotFound) {
		return nil
	}
	return fmt.Errorf("a pool does not serve: %w", err)
}

func (m *migration) poolOf(name string) (poolconfig.Pool, error) {
	if name == "" && len(m.Pools) == 1 {
		return m.Pools[0], nil
	}
	var names []string
	for _, p := range m.Pools {
		if p.Name.String() == name {
			return p, nil
		}
		names = append(names, p.Name.String())
	}
	return poolconfig.Pool{}, fmt.Errorf("its storagePool is %q, and --datadir (DATADIR) has the pools %q: give both the same", name, names)
}

// choose finds the volumes that were chosen: for an undo, those that have a file.
func (m *migration) choose(ctx context.Context) (found choice, err error) {
	found.elsewhere = make(map[string]int)
	files, err := m.load()
	if err != nil {
		return found, err
	}
	begun := make(map[string]bool) // by the name of the PersistentVolume, which stays
	for _, s := range files {
		begun[s.Volume.Name] = true
		if m.Chosen.includes(s.claimName(), s.Volume.Spec.StorageClassName) {
			found.here = append(found.here, s)
		}
	}
	if !m.Undo {
		if err := m.chooseNew(ctx, begun, &found); err != nil {
			return found, err
		}
	}
	for _, name := range m.Chosen.Claims {
		if !slices.ContainsFunc(found.here, func(s *saved) bool { return s.claimName() == name }) {
			found.missing = append(found.missing, name)
		}
	}
	return found, nil
}

func (m *migration) chooseNew(ctx context.Context, begun map[string]bool, found *choice) error {
	volumes, err := m.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	here, only, err := m.node(ctx)
	if err != nil {
		return err
	}
	for i := range volumes.Items {
		pv := &volumes.Items[i]
		if begun[pv.Name] || origin.Path(pv) == "" || pv.Spec.ClaimRef == nil {
			continue
		}
		name := types.NamespacedName{Namespace: pv.Spec.ClaimRef.Namespace, Name: pv.Spec.ClaimRef.Name}
		known := slices.Contains(provisioners, pv.Annotations[origin.ProvisionedBy])
		if !m.Chosen.includes(name, pv.Spec.StorageClassName) || !known && !m.Chosen.named(name) {
			continue
		}
		if is, node := isOn(pv, here, only); !is {
			found.elsewhere[node]++
			continue
		}
		claim, err := m.client.CoreV1().PersistentVolumeClaims(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		s := m.newSaved(pv, claim)
		s.missing = err
		found.here = append(found.here, s)
	}
	return nil
}

// node is this process's, and whether it is the only one.
func (m *migration) node(ctx context.Context) (here *corev1.Node, only bool, err error) {
	nodes, err := m.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, false, err
	}
	i := slices.IndexFunc(nodes.Items, func(n corev1.Node) bool { return n.Name == m.Node })
	if i < 0 {
		return nil, false, fmt.Errorf("there is no node %s", m.Node)
	}
	return &nodes.Items[i], len(nodes.Items) == 1, nil
}

// isOn reports whether the directory of a PersistentVolume is on a node, or else the name of its node as it is known.
func isOn(pv *corev1.PersistentVolume, here *corev1.Node, only bool) (is bool, node string) {
	owner, unknown := origin.Node(pv)
	if pv.Spec.NodeAffinity == nil || pv.Spec.NodeAffinity.Required == nil {
		// As the single-node provisioner makes them.
		return owner == here.Name || unknown != nil && only, owner
	}
	if unknown == nil && owner != here.Name {
		return false, owner
	}
	if origin.Only(pv, here) {
		return true, here.Name
	}
	var others []string
	for _, term := range pv.Spec.NodeAffinity.Required.NodeSelectorTerms {
		matches := len(term.MatchExpressions) > 0 && len(term.MatchFields) == 0
		for _, r := range term.MatchExpressions {
			if r.Operator != corev1.NodeSelectorOpIn || !slices.Contains(r.Values, here.Labels[r.Key]) {
				matches, others = false, append(others, r.Values...)
			}
		}
		if matches {
			return true, here.Name
		}
	}
	return false, strings.Join(others, ",")
}

// handle is the name of the directory as a volume of the driver: its own, or that of the PersistentVolume where
// local-path made a name that is too long.
func handle(pv *corev1.PersistentVolume) string {
	name := filepath.Base(origin.Path(pv))
	if _, err := volume.ParseID(name); err != nil {
		return pv.Name
	}
	return name
}

// check finds all that would stop a migration that has not begun, and completes what is to be saved.
func (m *migration) check(ctx context.Context, s *saved) error {
	if s.missing != nil {
		return fmt.Errorf("the claim of the PersistentVolume is gone: %w", s.missing)
	}
	problems := append(s.checkObjects(), m.checkOwner(s), m.checkOthers(ctx, s), m.checkServed(ctx, s))
	h := s.handover(csi)
	err := errors.Join(h.Check(), m.checkHandle(ctx, s))
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
	return m.tryCreate(ctx, s)
}

// checkHandle refuses a name that the driver has a volume of, in any pool, unless that is the directory itself: it would take the
// record of one that was lost, or serve neither of two.
func (m *migration) checkHandle(ctx context.Context, s *saved) error {
	id, err := volume.ParseID(s.To.Name)
	if err != nil {
		return err
	}
	has, err := m.driver.Volume(ctx, id)
	if errors.Is(err, volume.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ask the driver whether it has a volume %s: %w", id, err)
	}
	in, err := m.poolOf(has.Context["storagePool"])
	if err != nil || in.Path != s.From.Directory {
		return fmt.Errorf("the driver has a volume %s already, in its pool %s: see what inspect says of it there", id, has.Context["storagePool"])
	}
	return nil
}

// tryCreate asks the API server, which then creates nothing, whether it would take the new objects: a quota, a webhook or a
// right that is missing would otherwise be met after the old ones are deleted. Their names are still taken.
func (m *migration) tryCreate(ctx context.Context, s *saved) error {
	const prefix = "migrate-check-"
	try := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	pv, claim := s.volume(csi, client.Volume{}), s.claim(csi)
	pv.Name, pv.GenerateName, claim.Name, claim.GenerateName = "", prefix, "", prefix
	_, volumeErr := m.client.CoreV1().PersistentVolumes().Create(ctx, pv, try)
	_, claimErr := m.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Create(ctx, claim, try)
	if volumeErr != nil {
		volumeErr = fmt.Errorf("the API server would refuse the new PersistentVolume: %w", volumeErr)
	}
	if claimErr != nil {
		claimErr = fmt.Errorf("the API server would refuse the new claim, beside the old one: %w", claimErr)
	}
	return errors.Join(volumeErr, claimErr)
}

// checkOwner refuses what no known provisioner made, and paths that the administrator has not said may be moved.
func (m *migration) checkOwner(s *saved) error {
	by := s.Volume.Annotations[origin.ProvisionedBy]
	if !slices.Contains(provisioners, by) {
		return fmt.Errorf("it was made by %q, and can be migrated only if it is of one of %s", by, strings.Join(provisioners, ", "))
	}
	path := origin.Path(s.Volume)
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return fmt.Errorf("path %q of the PersistentVolume has empty parts, . or ..: make a PersistentVolume by hand that names %s", path, filepath.Clean(path))
	}
	if s.From.Directory != s.To.Directory && !slices.Contains(m.From, s.From.Directory) {
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
	for _, finalizer := range slices.Concat(pv.Finalizers, claim.Finalizers) {
		refuse(!slices.Contains(ours, finalizer), "it has the finalizer %s, whose owner has to remove it first", finalizer)
	}
	return problems
}

// checkServed refuses a pool that a provisioner from before CSI serves too, of a shared pool on any node: each would
// clean up what the other makes.
func (m *migration) checkServed(ctx context.Context, s *saved) error {
	var on metav1.ListOptions
	if !m.target.pool.Shared {
		on.FieldSelector = "spec.nodeName=" + m.Node
	}
	pods, err := m.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, on)
	if err != nil {
		return err
	}
	var problems []error
	isPool := func(path string) bool {
		is, err := m.isDirectory(path, s.To.Directory)
		problems = append(problems, err)
		return is
	}
	for _, pod := range pods.Items {
		if (m.target.pool.Shared || pod.Spec.NodeName == m.Node) && serves(&pod, isPool) {
			return fmt.Errorf("pod %s/%s is a provisioner with PV_DIR=%s, so that two programs serve this pool: delete its DaemonSet or Deployment first", pod.Namespace, pod.Name, s.To.Directory)
		}
	}
	return errors.Join(problems...)
}

// serves reports whether a pod is a provisioner from before CSI whose directory is the pool. Where its configuration is not in
// the pod, it is one that mounts the directory.
func serves(pod *corev1.Pod, isPool func(path string) bool) bool {
	mounts := slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && isPool(v.HostPath.Path)
	})
	is := func(path string) bool {
		return isPool(path) || strings.Contains(path, "$(") && mounts
	}
	return slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
		words := append(slices.Clone(c.Command), c.Args...)
		byFlag := slices.ContainsFunc(words, func(word string) bool {
			path, found := strings.CutPrefix(strings.TrimPrefix(word, "-"), "-pv-dir=")
			return found && is(path)
		})
		at := slices.IndexFunc(words, func(word string) bool { return word == "--pv-dir" || word == "-pv-dir" })
		byEnv := slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool {
			return e.Name == "PV_DIR" && (is(e.Value) || e.ValueFrom != nil && mounts)
		})
		return byFlag || byEnv || 0 <= at && at+1 < len(words) && is(words[at+1])
	})
}

func (m *migration) summarize(found choice, failed int) {
	m.print("%s on node %s, %d stopped\n", claims(len(found.here)), m.Node, failed)
	for _, node := range slices.Sorted(maps.Keys(found.elsewhere)) {
		if node == "" {
			m.print("%s of PersistentVolumes that do not say on which node they are\n", claims(found.elsewhere[node]))
			continue
		}
		m.print("%s on node %s: run the command there\n", claims(found.elsewhere[node]), node)
	}
	missing := "no volume of it on this node can be migrated"
	if m.Undo {
		missing = "no migration of it is saved on this node"
	}
	for _, name := range found.missing {
		m.print("claim %s: %s\n", name, missing)
	}
	if !m.Apply {
		m.print("nothing was changed; --apply performs these steps\n")
	}
}

func claims(count int) string {
	if count == 1 {
		return "1 claim"
	}
	return fmt.Sprintf("%d claims", count)
}
