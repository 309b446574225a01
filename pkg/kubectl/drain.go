package kubectl

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/schedule"
)

// topologyKey is the label that volumes and capacities have their node by.
const topologyKey = "topology.hostpath.csi/node"

// PlanHeadings are those of the table of a plan.
var PlanHeadings = []string{"NAMESPACE", "CLAIM", "SIZE", "FROM", "TO", "PROBLEM"}

// A Planned is a claim whose volume is to move.
type Planned struct {
	Namespace string `json:"namespace,omitempty"`
	Claim     string `json:"claim,omitempty"`
	Volume    string `json:"volume"`
	SizeBytes *int64 `json:"sizeBytes"`
	From      string `json:"from"`
	// To is where it goes if no more changes: the operator chooses when the move begins. It is empty if no node has room.
	To string `json:"to,omitempty"`
	// Problem is why it cannot move, and what to do; empty for none.
	Problem string `json:"problem,omitempty"`

	move  types.UID // of the VolumeMove that has begun to move it; empty for none
	group int       // is what pods use together with it; 0 if that is not known
}

func (p Planned) cells() []string {
	return []string{p.Namespace, cmp.Or(p.Claim, "("+p.Volume+")"), size(p.SizeBytes), p.From, p.To, p.Problem}
}

// MoveOptions say how volumes move.
type MoveOptions struct {
	// Target is the node that they go to; empty for one that the operator chooses.
	Target string
	// Evict has the operator evict the pods, and Force those too that no controller makes again.
	Evict, Force bool
	// LeaveSnapshots leaves them on the source.
	LeaveSnapshots bool
	// BytesPerSecond limits each move; 0 for no limit.
	BytesPerSecond int64
}

// storage is what a plan is made of.
type storage struct {
	volumes    []corev1.PersistentVolume
	claims     []corev1.PersistentVolumeClaim
	pods       []corev1.Pod // that have not ended, and those that StatefulSets would make
	nodes      []corev1.Node
	classes    []storagev1.StorageClass
	capacities []storagev1.CSIStorageCapacity
	// snapshots are how many each volume has, by its id.
	snapshots map[string]int
	// moves are those that have begun and go on.
	moves []v1alpha1.VolumeMove
	// room is what nodes have, by class and node, less what is planned for them.
	room map[string]map[string]int64
}

// PlanDrain plans to move all volumes of one node, by namespace and claim, with those of moves that go on. Volumes of shared pools are of no node, and
// stay.
func PlanDrain(ctx context.Context, k Kubectl, node Node, o MoveOptions) ([]Planned, error) {
	s, err := readStorage(ctx, k, node)
	if err != nil {
		return nil, err
	}
	var plan []Planned
	for _, v := range s.volumes {
		if nodeOf(v) == node.Driver.Node {
			plan = append(plan, s.planned(v))
		}
	}
	slices.SortFunc(plan, func(a, b Planned) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Claim, b.Claim), cmp.Compare(a.Volume, b.Volume))
	})
	s.decide(plan, o)
	if plan = append(plan, s.moving(node.Driver.Node, plan)...); !o.LeaveSnapshots {
		plan = append(plan, s.leftOn(node.Driver.Node)...)
	}
	return plan, nil
}

// leftOn are the volumes that a node has snapshots of alone. Of one that moves it may have what the movers compare with.
func (s *storage) leftOn(node string) (found []Planned) {
	for _, source := range slices.Sorted(maps.Keys(s.snapshots)) {
		here := slices.ContainsFunc(s.volumes, func(v corev1.PersistentVolume) bool { return nodeOf(v) == node && v.Spec.CSI.VolumeHandle == source })
		moves := slices.ContainsFunc(s.moves, func(m v1alpha1.VolumeMove) bool { return m.Status.VolumeHandle == source })
		if !here && !moves {
			found = append(found, Planned{Volume: source, From: node, Problem: fmt.Sprintf(
				"%d snapshots of the volume %s, which is not there, stay on the node: delete them, or use --leave-snapshots", s.snapshots[source], source)})
		}
	}
	return found
}

// moving are the volumes of moves that go on but for those that a plan has: what moves bring to a node, and what the node may have the last copy of until
// they have ended.
func (s *storage) moving(node string, plan []Planned) (found []Planned) {
	for i := range s.moves {
		m := &s.moves[i]
		p := Planned{Namespace: m.Namespace, Claim: m.Spec.ClaimName, Volume: m.Status.Volume, From: m.Status.SourceNode, To: m.Status.TargetNode, move: m.UID}
		if m.Status.Phase == v1alpha1.Undoing {
			p.From, p.To = p.To, p.From
		}
		switch {
		case slices.ContainsFunc(plan, func(other Planned) bool { return other.Volume == p.Volume }):
			continue
		case p.To == node:
			p.Problem = fmt.Sprintf("the VolumeMove %s brings it here: drain the node again when it has ended", m.Name)
		case p.From != node || m.Status.Phase == v1alpha1.Undoing:
			continue
		}
		found = append(found, p)
	}
	return found
}

// PlanMove plans to move the volume of one claim, and with it those on the same node that pods use together with it. The operator knows
// whether they have snapshots.
func PlanMove(ctx context.Context, k Kubectl, namespace, claim string, o MoveOptions) ([]Planned, error) {
	s, err := readStorage(ctx, k, Node{})
	if err != nil {
		return nil, err
	}
	var plan []Planned
	for _, name := range s.together(namespace, claim) {
		for _, v := range s.volumes {
			p := s.planned(v)
			if p.Namespace != namespace || p.Claim != name {
				continue
			}
			if name == claim && p.From == "" {
				return nil, fmt.Errorf("its volume %s is on no single node of this driver: only volumes of the driver in pools that are not shared move", v.Name)
			}
			if name == claim || len(plan) > 0 && p.From == plan[0].From {
				plan = append(plan, p)
			}
		}
	}
	if len(plan) == 0 {
		return nil, fmt.Errorf("there is no such claim that is bound")
	}
	s.decide(plan, o)
	return plan, nil
}

func readStorage(ctx context.Context, k Kubectl, node Node) (*storage, error) {
	s := &storage{snapshots: map[string]int{}, room: map[string]map[string]int64{}}
	var sets []appsv1.StatefulSet
	var err error
	if s.moves, err = volumeMoves(ctx, k); err != nil { // before the volumes: what has come meanwhile is among them
		return nil, err
	}
	s.moves = slices.DeleteFunc(s.moves, func(m v1alpha1.VolumeMove) bool { return !m.Underway() })
	for _, read := range []func() error{
		func() error { return get(ctx, k, &s.volumes, "persistentvolumes") },
		func() error { return get(ctx, k, &s.claims, "persistentvolumeclaims") },
		func() error { return get(ctx, k, &s.pods, "pods") },
		func() error { return get(ctx, k, &sets, "statefulsets") },
		func() error { return list(ctx, k, &s.nodes, "nodes") },
		func() error { return list(ctx, k, &s.classes, classes) },
		func() error { return get(ctx, k, &s.capacities, "csistoragecapacities") },
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	s.addPods(sets)
	for _, p := range node.Report.Pools {
		for _, snapshot := range p.Snapshots {
			s.snapshots[snapshot.Source]++
		}
	}
	for _, c := range s.capacities {
		if c.NodeTopology == nil || c.Capacity == nil {
			continue
		}
		on := c.NodeTopology.MatchLabels[topologyKey]
		if on == "" {
			continue
		}
		if s.room[c.StorageClassName] == nil {
			s.room[c.StorageClassName] = map[string]int64{}
		}
		s.room[c.StorageClassName][on] = c.Capacity.Value()
	}
	return s, nil
}

// addPods adds the pods that StatefulSets would make, and leaves out those that have ended.
func (s *storage) addPods(sets []appsv1.StatefulSet) {
	claims := make([]types.NamespacedName, len(s.claims))
	for i, c := range s.claims {
		claims[i] = types.NamespacedName{Namespace: c.Namespace, Name: c.Name}
	}
	s.pods = schedule.AddUnmade(slices.DeleteFunc(s.pods, hasEnded), sets, claims)
}

// nodeOf is the one node that a volume of the driver is on; empty for none, and for more.
func nodeOf(v corev1.PersistentVolume) string {
	if v.Spec.CSI == nil || v.Spec.CSI.Driver != driverName || v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return ""
	}
	terms := v.Spec.NodeAffinity.Required.NodeSelectorTerms
	if len(terms) != 1 {
		return ""
	}
	for _, e := range terms[0].MatchExpressions {
		if e.Key == topologyKey && e.Operator == corev1.NodeSelectorOpIn && len(e.Values) == 1 {
			return e.Values[0]
		}
	}
	return ""
}

func (s *storage) planned(v corev1.PersistentVolume) Planned {
	p := Planned{Volume: v.Name, From: nodeOf(v)}
	if v.Spec.ClaimRef != nil && v.Status.Phase == corev1.VolumeBound {
		p.Namespace, p.Claim = v.Spec.ClaimRef.Namespace, v.Spec.ClaimRef.Name
	}
	claim := &corev1.PersistentVolumeClaim{}
	if i := slices.IndexFunc(s.claims, func(c corev1.PersistentVolumeClaim) bool { return c.Namespace == p.Namespace && c.Name == p.Claim }); i >= 0 {
		claim = &s.claims[i]
	}
	if size := v1alpha1.Size(claim, &v); !size.IsZero() {
		bytes := size.Value()
		p.SizeBytes = &bytes
	}
	return p
}

// together are the claims that pods use together with one, directly or by others, or would use; that one first.
func (s *storage) together(namespace, claim string) []string {
	_, claims := schedule.Together(s.pods, namespace, claim)
	return claims
}

func hasEnded(pod corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// decide says where volumes go, or why they cannot. Those that pods use together go to one node.
func (s *storage) decide(plan []Planned, o MoveOptions) {
	for i := range plan {
		v := s.volumeOf(&plan[i])
		if plan[i].To, plan[i].move = s.going(v); plan[i].To == "" {
			plan[i].Problem = s.keeps(&plan[i], v, o)
		}
	}
	done := make([]bool, len(plan))
	for i := range plan {
		if done[i] || plan[i].To != "" {
			continue
		}
		group, to := []*Planned{&plan[i]}, o.Target
		if plan[i].Claim != "" {
			claims := s.together(plan[i].Namespace, plan[i].Claim)
			group = withClaims(plan, i, claims, done)
			on := s.elsewhere(plan[i], claims)
			if on != "" && to != "" && on != to { // the operator would wait for ever
				plan[i].Problem = cmp.Or(plan[i].Problem, fmt.Sprintf("pods use a volume on node %s too", on))
			}
			to = cmp.Or(on, to)
		}
		s.place(group, to)
	}
}

// withClaims groups one of a plan and those after it that have one of the claims, which are done then. Those that have begun wait for them.
func withClaims(plan []Planned, first int, claims []string, done []bool) (group []*Planned) {
	for i := range plan {
		if plan[i].Namespace != plan[first].Namespace || !slices.Contains(claims, plan[i].Claim) {
			continue
		}
		if plan[i].group = first + 1; plan[i].To == "" {
			done[i] = true
			group = append(group, &plan[i])
		}
	}
	return group
}

func (s *storage) volumeOf(p *Planned) corev1.PersistentVolume {
	return s.volumes[slices.IndexFunc(s.volumes, func(v corev1.PersistentVolume) bool { return v.Name == p.Volume })]
}

// going is the node that a move has begun to bring a volume to, where its room is promised, and that move; empty for none, and for one that is there.
func (s *storage) going(v corev1.PersistentVolume) (to string, move types.UID) {
	i := slices.IndexFunc(s.moves, func(m v1alpha1.VolumeMove) bool {
		return m.Status.Volume == v.Name && m.Status.Phase != v1alpha1.Undoing
	})
	if i < 0 || s.moves[i].Status.TargetNode == nodeOf(v) {
		return "", ""
	}
	return s.moves[i].Status.TargetNode, s.moves[i].UID
}

// elsewhere is the node that has the volume of one of the claims already, or gets it; empty for none.
func (s *storage) elsewhere(than Planned, claims []string) string {
	for _, v := range s.volumes {
		is := s.planned(v)
		to, _ := s.going(v)
		if on := cmp.Or(to, is.From); is.Namespace == than.Namespace && slices.Contains(claims, is.Claim) && on != "" && on != than.From {
			return on
		}
	}
	return ""
}

// place says where a group of volumes goes, or why none of them does.
func (s *storage) place(group []*Planned, to string) {
	if stays := slices.IndexFunc(group, func(p *Planned) bool { return p.Problem != "" }); stays >= 0 {
		for _, p := range group {
			p.Problem = cmp.Or(p.Problem, fmt.Sprintf("pods use the claim %s too, which stays", group[stays].Claim))
		}
		return
	}
	needed := map[string]int64{}
	for _, p := range group {
		if p.SizeBytes != nil {
			needed[s.volumeOf(p).Spec.StorageClassName] += *p.SizeBytes
		}
	}
	refused := s.refused(group)
	on, known := s.roomiest(group[0], needed, to, refused)
	problem := ""
	switch {
	case refused[to] != "":
		on, problem = "", refused[to]
	case !known && to == "" && len(refused) > 0 && len(refused) == len(s.nodes)-1:
		problem = strings.Join(append([]string{"no other node can take it"}, slices.Sorted(maps.Values(refused))...), ", and ")
	case !known: // the class is gone, or no node reports: the operator and the driver of the target decide
		on = to
	case on == "" && to != "":
		problem = fmt.Sprintf("node %s has no room for it", to)
	case on == "":
		problem = strings.Join(append([]string{"no other node has room for it"}, slices.Sorted(maps.Values(refused))...), ", and ")
	}
	for _, p := range group {
		p.To, p.Problem = on, problem
	}
	for class, room := range s.room {
		if _, known := room[on]; known {
			room[on] -= s.inPoolOf(class, needed)
		}
	}
}

// inPoolOf is how many of the bytes that are needed by class are needed in the pool of one.
func (s *storage) inPoolOf(class string, needed map[string]int64) (sum int64) {
	pool := func(name string) string {
		i := slices.IndexFunc(s.classes, func(c storagev1.StorageClass) bool { return c.Name == name })
		if i < 0 { // it is gone
			return "of " + name
		}
		return poolOf(s.classes[i])
	}
	for of, bytes := range needed {
		if of == class || pool(of) == pool(class) {
			sum += bytes
		}
	}
	return sum
}

// refused says of nodes why the scheduler would have no pods of a group run there.
func (s *storage) refused(group []*Planned) map[string]string {
	refused := map[string]string{}
	var pods []corev1.Pod
	for _, pod := range s.pods {
		if slices.ContainsFunc(group, func(p *Planned) bool { return pod.Namespace == p.Namespace && schedule.Uses(&pod, p.Claim) }) {
			pods = append(pods, pod)
		}
	}
	for i := range s.nodes {
		node := &s.nodes[i]
		why := ""
		for _, p := range group {
			why = cmp.Or(why, s.notAllowed(p, node))
		}
		if why = cmp.Or(why, schedule.Refuses(pods, node, schedule.Neighbours{Pods: s.pods, Nodes: s.nodes})); why != "" && node.Name != group[0].From {
			refused[node.Name] = why
		}
	}
	return refused
}

// notAllowed says that the class of a volume does not allow it on a node.
func (s *storage) notAllowed(p *Planned, node *corev1.Node) string {
	name := s.volumeOf(p).Spec.StorageClassName
	i := slices.IndexFunc(s.classes, func(c storagev1.StorageClass) bool { return c.Name == name })
	if i < 0 {
		return "" // it is gone
	}
	return schedule.NotAllowed(&s.classes[i], node, topologyKey)
}

// roomiest is the node with the most room for a volume that has enough for all that is needed, and does not refuse its pods; empty for none.
// Where no node says what room it has, that is not known.
func (s *storage) roomiest(first *Planned, needed map[string]int64, to string, refused map[string]string) (best string, known bool) {
	class := s.volumeOf(first).Spec.StorageClassName
	room := s.room[class]
	for on, free := range room {
		enough := refused[on] == ""
		for of := range needed {
			enough = enough && (len(s.room[of]) == 0 || s.room[of][on] >= s.inPoolOf(of, needed))
		}
		if on != first.From && (to == "" || on == to) && enough && (best == "" || free > room[best] || free == room[best] && on < best) {
			best = on
		}
	}
	return best, len(room) > 0
}

// keeps says what keeps a volume on its node, whatever the room elsewhere.
func (s *storage) keeps(p *Planned, v corev1.PersistentVolume, o MoveOptions) string {
	if p.Claim == "" {
		return "it is bound to no claim: delete the PersistentVolume, or let a claim use it"
	}
	for _, c := range s.claims {
		if c.Namespace == p.Namespace && c.Name == p.Claim && owned(c.OwnerReferences, "Pod") {
			return "it is deleted with its pod: delete the pod"
		}
	}
	if n := s.snapshots[v.Spec.CSI.VolumeHandle]; n > 0 && !o.LeaveSnapshots {
		return fmt.Sprintf("it has %d snapshots, which stay on the node: delete them, or use --leave-snapshots", n)
	}
	for _, other := range s.volumes {
		if csi := other.Spec.CSI; csi != nil && other.Name != p.Volume && csi.Driver == driverName && csi.VolumeHandle == v.Spec.CSI.VolumeHandle &&
			slices.Contains([]string{p.From, ""}, nodeOf(other)) {
			return fmt.Sprintf("the PersistentVolume %s leads to it, too: keep one of the two, and delete the other once its policy is Retain", other.Name)
		}
	}
	return s.podsKeep(p, o)
}

// podsKeep says which pod keeps a volume on its node.
func (s *storage) podsKeep(p *Planned, o MoveOptions) string {
	for _, pod := range s.pods {
		if pod.Namespace != p.Namespace || !schedule.Uses(&pod, p.Claim) {
			continue
		}
		switch {
		case slices.Contains([]string{"virt-launcher", "hotplug-disk"}, pod.Labels["kubevirt.io"]):
			return "a virtual machine runs on it: stop it, or have KubeVirt migrate the volume (docs/kubevirt.md)"
		case pod.Spec.NodeSelector[corev1.LabelHostname] == p.From:
			return fmt.Sprintf("pod %s may run on node %s only, by its nodeSelector", pod.Name, p.From)
		case o.Evict && !o.Force && metav1.GetControllerOf(&pod) == nil:
			return fmt.Sprintf("no controller makes pod %s again: delete it, or use --force", pod.Name)
		}
	}
	return ""
}

func owned(references []metav1.OwnerReference, kind string) bool {
	return slices.ContainsFunc(references, func(r metav1.OwnerReference) bool { return r.Kind == kind })
}

// Cordon keeps new pods from a node.
func (k Kubectl) Cordon(ctx context.Context, node string) error {
	if _, err := k.run(ctx, "cordon", node); err != nil {
		return fmt.Errorf("cordon node %s: %w", node, err)
	}
	return nil
}
