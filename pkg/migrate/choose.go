package migrate

import (
	"context"
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
	"k8s.io/client-go/kubernetes"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
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
	pool       poolconfig.Config
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
	if t.pool, err = poolOf(m.Pools, class.Parameters["storagePool"]); err != nil {
		return t, fmt.Errorf("StorageClass %s: %w", class.Name, err)
	}
	if err := checkPlace(ctx, m.driver, class.Parameters, t.pool); err != nil {
		return t, fmt.Errorf("StorageClass %s: %w", class.Name, err)
	}
	t.parameters = class.Parameters
	return t, nil
}

// checkPlace refuses a pool that the driver does not serve, or has in another directory: it would report none of the volumes, whose objects are
// deleted by then, or others of their names. A full pool can take a directory that is there already.
func checkPlace(ctx context.Context, driver Driver, parameters map[string]string, p poolconfig.Config) error {
	has, err := driver.Directory(ctx, parameters)
	if err != nil {
		return fmt.Errorf("ask the driver on this node for its pool %s: %w", p.Name, err)
	}
	in, err := dir.Open(p.Path)
	if err != nil {
		return err
	}
	here, err := in.ID()
	if err := errors.Join(err, in.Close()); err != nil {
		return err
	}
	if here != has {
		return fmt.Errorf("the driver on this node has its pool %s in another directory than %s: give --datadir (DATADIR) the path that it has for it, mounted as the driver has it",
			p.Name, p.Path)
	}
	return nil
}

// poolOf is the pool that a StorageClass names.
func poolOf(pools []poolconfig.Config, name string) (poolconfig.Config, error) {
	if name == "" && len(pools) == 1 {
		return pools[0], nil
	}
	var names []string
	for _, p := range pools {
		if p.Name.String() == name {
			return p, nil
		}
		names = append(names, p.Name.String())
	}
	return poolconfig.Config{}, fmt.Errorf("its storagePool is %q, and --datadir (DATADIR) has the pools %q: give both the same", name, names)
}

// choose finds the volumes that were chosen: for an undo, those that have a file.
func (m *migration) choose(ctx context.Context) (found choice, err error) {
	found.elsewhere = make(map[string]int)
	files, err := m.files.load()
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
	here, only, err := findNode(ctx, m.client, m.Node)
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

// findNode is the Node of this process, and whether it is the only one.
func findNode(ctx context.Context, client kubernetes.Interface, name string) (here *corev1.Node, only bool, err error) {
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, false, err
	}
	i := slices.IndexFunc(nodes.Items, func(n corev1.Node) bool { return n.Name == name })
	if i < 0 {
		return nil, false, fmt.Errorf("there is no node %s", name)
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
