package move

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// A role is what a mover is for.
type role string

// The roles. The first two copy, the others do one step.
const (
	roleOut     role = "out"
	roleIn      role = "in"
	roleConfirm role = "confirm"
	roleAssure  role = "assure" // confirms once more, which succeeds only where the volume is
	roleRemove  role = "remove"
	roleAbort   role = "abort"
	roleUndo    role = "undo"
)

const (
	container = "mover"
	// stepDeadline is that of a mover that does one step.
	stepDeadline = 15 * time.Minute
	certificates = "/move"
)

// capabilities are those of pkg/hostfs/privilege that reading and writing a tree needs.
var capabilities = []corev1.Capability{"DAC_OVERRIDE", "FOWNER", "SYS_ADMIN", "CHOWN", "FSETID", "SETFCAP", "MKNOD"}

// onSource says on which side a role is.
func (r role) onSource() bool { return r == roleOut || r == roleRemove || r == roleUndo }

// copies is the role that copies on the same side.
func (r role) copies() role {
	if r.onSource() {
		return roleOut
	}
	return roleIn
}

func (r role) words() string {
	if r == roleUndo {
		return "have the volume be used again"
	}
	return "remove the copy"
}

func isOf(pod *corev1.Pod, roles []role) bool {
	return slices.Contains(roles, role(pod.Labels[roleLabel]))
}

// nodeOf is where a role runs.
func (m moving) nodeOf(r role) string {
	if r.onSource() {
		return m.Status.SourceNode
	}
	return m.Status.TargetNode
}

// A nodeState says of a node that it has an object, and that its kubelet answers.
type nodeState struct{ there, ready bool }

// away says of a node that does not answer what is the matter, and what ends that; it is empty for one that does.
func (s nodeState) away(name string) string {
	switch {
	case s.ready:
		return ""
	case s.there:
		return fmt.Sprintf("node %s does not answer (if it never comes back, delete its Node object)", name)
	}
	return fmt.Sprintf("node %s is gone", name)
}

// nodeStates are those of the source and of the target.
func (m moving) nodeStates(ctx context.Context) (source, target nodeState, err error) {
	if source, err = m.nodeState(ctx, m.Status.SourceNode); err == nil {
		target, err = m.nodeState(ctx, m.Status.TargetNode)
	}
	return source, target, err
}

func (m moving) nodeState(ctx context.Context, name string) (s nodeState, err error) {
	node := &corev1.Node{}
	if err := m.APIReader.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return s, client.IgnoreNotFound(err)
	}
	s.there = true
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			s.ready = condition.Status == corev1.ConditionTrue
		}
	}
	return s, nil
}

// driverSet is the DaemonSet of the driver, and its container.
func (m moving) driverSet(ctx context.Context) (*appsv1.DaemonSet, *corev1.Container, error) {
	sets := &appsv1.DaemonSetList{}
	if err := m.APIReader.List(ctx, sets, client.InNamespace(m.DriverNamespace)); err != nil {
		return nil, nil, err
	}
	for i := range sets.Items {
		all := sets.Items[i].Spec.Template.Spec.Containers
		for j := range all {
			if slices.Contains(all[j].Args, "--drivername="+render.DriverName) {
				return &sets.Items[i], &all[j], nil
			}
		}
	}
	return nil, nil, fmt.Errorf("there is no DaemonSet of the driver %s in the namespace %s", render.DriverName, m.DriverNamespace)
}

// driverNodes are those on which the driver is ready.
func (m moving) driverNodes(ctx context.Context) (map[string]bool, error) {
	set, _, err := m.driverSet(ctx)
	if err != nil {
		return nil, err
	}
	pods := &corev1.PodList{}
	if err := m.APIReader.List(ctx, pods, client.InNamespace(m.DriverNamespace), client.MatchingLabels(set.Spec.Selector.MatchLabels)); err != nil {
		return nil, err
	}
	nodes := map[string]bool{}
	for _, pod := range pods.Items {
		if slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue }) {
			nodes[pod.Spec.NodeName] = true
		}
	}
	return nodes, nil
}

// movers keeps the two movers running, shows what they report, and has pods stop at the fence. It says what is waited for, and nothing
// when the volume is handed over.
func (m moving) movers(ctx context.Context, volume *corev1.PersistentVolume) (saying, error) {
	fresh, err := m.identities(ctx)
	if err != nil || !fresh {
		return says("Copying", "renew the certificates of the movers"), err
	}
	if err := m.policy(ctx); err != nil {
		return saying{}, err
	}
	target, ended, err := m.pod(ctx, roleIn, m.args(roleIn, volume))
	if err != nil || target == nil {
		return says("Copying", "start the mover on node %s: %s", m.Status.TargetNode, ended), err
	}
	address, waits := m.address(target)
	if address == "" {
		return waits, nil
	}
	source, ended, err := m.pod(ctx, roleOut, append(m.args(roleOut, volume), "--address="+address))
	if err != nil || source == nil {
		return says("Copying", "start the mover on node %s: %s", m.Status.SourceNode, ended), err
	}
	report, err := m.read(ctx, source)
	if err != nil {
		return says("Copying", "read what the mover on node %s reports: %v", m.Status.SourceNode, err), nil
	}
	report.show(&m.Status)
	m.noteFence(report)
	m.hear(report, source, target)
	if source.Status.Phase == corev1.PodSucceeded {
		if report.fence == "" { // the log is lost: it hands the volume over again
			return says("Copying", "ask the mover on node %s again", m.Status.SourceNode), m.delete(ctx, source)
		}
		m.Status.Fence = report.fence
		m.standStill(report)
		return saying{}, nil
	}
	return m.progress(ctx, source, target, report)
}

// address is where the target listens, or what it waits for.
func (m moving) address(target *corev1.Pod) (string, saying) {
	switch {
	case target.Status.PodIP != "":
		return net.JoinHostPort(target.Status.PodIP, strconv.Itoa(port)), saying{}
	case target.Status.Phase == corev1.PodSucceeded:
		// The source has ended too, or has only to repeat what it said.
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), saying{}
	case trouble(target) != "":
		return "", says("Retrying", "%s", trouble(target))
	}
	return "", says("Copying", "start the mover on node %s: %s", m.Status.TargetNode, state(target))
}

// answering is how long a kubelet may take for a log: other moves wait meanwhile.
const answering = 5 * time.Second

// read is what a mover has reported.
func (m moving) read(ctx context.Context, pod *corev1.Pod) (progress, error) {
	if pod.Status.Phase != corev1.PodRunning && pod.Status.Phase != corev1.PodSucceeded {
		return progress{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, answering)
	defer cancel()
	text, err := m.Reports.Lines(ctx, pod.Namespace, pod.Name)
	return parseReport(text), err
}

// identities are there, and good for as long as a mover runs. Otherwise the movers end, and get others.
func (m moving) identities(ctx context.Context) (bool, error) {
	secret, err := m.secret(ctx)
	if err != nil || m.now().Sub(secret.CreationTimestamp.Time) < lifetime-deadline || secret.CreationTimestamp.IsZero() {
		return err == nil, err
	}
	left, err := m.removePods(ctx, roleOut, roleIn)
	if err != nil || len(left) > 0 {
		return false, err
	}
	return false, m.drop(ctx, secret)
}

// standStill notes when no pod used the volume any more.
func (m moving) standStill(report progress) {
	if (report.unused || report.fence != "") && m.Status.Standstill == nil {
		m.Status.Standstill = &v1alpha1.Standstill{Since: metav1.NewTime(m.now())}
	}
}

// progress says how far the movers are, and stops pods.
func (m moving) progress(ctx context.Context, source, target *corev1.Pod, report progress) (saying, error) {
	if report.fenced {
		m.Status.Phase = v1alpha1.Fenced
	}
	m.standStill(report)
	switch of := cmp.Or(trouble(source), trouble(target)); {
	case of != "":
		return says("Retrying", "%s", of), nil
	case report.unused:
		return says("Copying", "no pod uses the volume any more: copy what has changed, and compare"), nil
	case report.fenced:
		waits, err := m.stop(ctx)
		return says("WaitingForPods", "the volume can start on no node until it is given up on node %s: %s", m.Status.SourceNode, waits), err
	}
	return says("Copying", "copy the volume while pods go on: pass %d, %s sent", report.passes+1, quantity(m.Status.BytesSent)), nil
}

func quantity(bytes int64) string {
	return fmt.Sprintf("%d MiB", bytes>>20)
}

// args are those of a role. Only those that copy need the volume.
func (m moving) args(r role, volume *corev1.PersistentVolume) []string {
	args := []string{"move-in"}
	peer := m.Status.SourceNode
	if r.onSource() {
		args, peer = []string{"move-out"}, m.Status.TargetNode
	}
	args = append(args, "--volume="+m.Status.VolumeHandle, "--move="+string(m.UID), "--peer="+peer)
	side := targetFile
	switch r {
	case roleOut:
		args = append(args, fmt.Sprintf("--bytes=%d", m.Status.PromisedBytes), "--verify="+strings.ToLower(string(m.Spec.Verify)))
		if m.Spec.Snapshots == v1alpha1.LeaveSnapshots {
			args = append(args, "--leave-snapshots")
		}
		if m.Spec.BytesPerSecond > 0 {
			args = append(args, fmt.Sprintf("--bytes-per-second=%d", m.Spec.BytesPerSecond))
		}
		side = sourceFile
	case roleIn:
		args = append(args, fmt.Sprintf("--address=:%d", port), "--pool="+volume.Spec.CSI.VolumeAttributes[render.PoolParameter])
	case roleConfirm, roleAssure:
		return append(args, "--step=confirm", "--fence="+m.Status.Fence)
	case roleUndo:
		return append(args, "--step=undo", "--target-aborted")
	case roleAbort:
		if m.Status.Fence != "" { // the copy may be confirmed, and no PersistentVolume has led to it
			args = append(args, "--even-confirmed")
		}
		return append(args, "--step="+string(r))
	default:
		return append(args, "--step="+string(r))
	}
	return append(args, "--cert-file="+certificates+"/"+side+".crt", "--key-file="+certificates+"/"+side+".key", "--ca-file="+certificates+"/"+authorityFile)
}

// pod is that of a role, with these arguments. While one from before ends, which had others, or has failed, it is nil, and ended says why.
func (m moving) pod(ctx context.Context, r role, args []string) (pod *corev1.Pod, ended string, err error) {
	pod = &corev1.Pod{}
	err = m.APIReader.Get(ctx, client.ObjectKey{Namespace: m.DriverNamespace, Name: m.meta("-" + string(r)).Name}, pod)
	if apierrors.IsNotFound(err) {
		if pod, err = m.mover(ctx, r, args); err != nil {
			return nil, "", err
		}
		return pod, "", m.ensure(ctx, pod)
	}
	switch {
	case err != nil:
		return nil, "", err
	case !m.has(pod):
		return nil, "", fmt.Errorf("pod %s is not of this move", pod.Name)
	case pod.Status.Phase == corev1.PodSucceeded && pod.DeletionTimestamp == nil:
		return pod, "", nil
	case pod.Status.Phase == corev1.PodFailed:
		ended = fmt.Sprintf("pod %s has failed, and is made again: %s %s", pod.Name, pod.Status.Reason, cmp.Or(pod.Status.Message, trouble(pod)))
		if m.now().Sub(pod.CreationTimestamp.Time) < idle { // kubelet would refuse the next one, too, as on a node that is full of pods
			return nil, ended, nil
		}
		return nil, ended, m.delete(ctx, pod)
	case pod.DeletionTimestamp != nil:
		return nil, "one from before ends", nil
	case !sameArgs(pod, args):
		return nil, "one from before ends", m.delete(ctx, pod)
	}
	return pod, "", nil
}

// sameArgs says whether a mover was started with these arguments. It has what it got from the DaemonSet behind them.
func sameArgs(pod *corev1.Pod, args []string) bool {
	has := pod.Spec.Containers[0].Args
	return len(has) >= len(args) && slices.Equal(has[:len(args)], args) && !slices.ContainsFunc(has[len(args):], func(a string) bool {
		return !strings.HasPrefix(a, "--endpoint=") && !strings.HasPrefix(a, "--datadir=")
	})
}

// node has one step done on a node. It says what keeps it from being done.
func (m moving) node(ctx context.Context, r role) (done bool, said string, err error) {
	at, err := m.nodeState(ctx, m.nodeOf(r))
	if err != nil {
		return false, "", err
	}
	if !at.there {
		// What a node had is gone with it.
		return r != roleConfirm && r != roleAssure, "the node is gone; the other node has all of the volume still", nil
	}
	pod, ended, err := m.pod(ctx, r, m.args(r, nil))
	switch {
	case err != nil:
		return false, "", err
	case pod == nil:
		return false, ended, nil
	case pod.Status.Phase == corev1.PodSucceeded:
		return true, "", nil
	}
	if why := trouble(pod); why != "" {
		return false, why, nil
	}
	return false, state(pod), nil
}

// state says in words what a pod does.
func state(pod *corev1.Pod) string {
	if pod.Status.Phase == "" {
		return "pod " + pod.Name
	}
	return fmt.Sprintf("pod %s is %s", pod.Name, pod.Status.Phase)
}

// trouble is what a pod has failed with; empty for nothing, and for one that runs again: kubelet keeps how it had ended before.
func trouble(pod *corev1.Pod) string {
	for _, c := range pod.Status.ContainerStatuses {
		if c.State.Running != nil {
			continue
		}
		if waiting := c.State.Waiting; waiting != nil && strings.Contains(waiting.Reason, "Image") {
			return fmt.Sprintf("pod %s on node %s: %s: %s", pod.Name, pod.Spec.NodeName, waiting.Reason, waiting.Message)
		}
		for _, ended := range endings(c) {
			if ended.ExitCode != 0 {
				return fmt.Sprintf("the mover on node %s failed, and is started again: %s", pod.Spec.NodeName, lastLine(ended.Message))
			}
		}
	}
	return ""
}

// endings are how a container ended last.
func endings(c corev1.ContainerStatus) []*corev1.ContainerStateTerminated {
	return slices.DeleteFunc([]*corev1.ContainerStateTerminated{c.State.Terminated, c.LastTerminationState.Terminated},
		func(ended *corev1.ContainerStateTerminated) bool { return ended == nil })
}

// hasRefused says of a mover that it has ended by itself, with an error: drivers that do not answer are waited for.
func hasRefused(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return slices.ContainsFunc(endings(c), func(ended *corev1.ContainerStateTerminated) bool {
			return ended.ExitCode > 0 && ended.ExitCode < bySignal
		})
	})
}

// bySignal and more is the exit code of what a signal has ended.
const bySignal = 128

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// mover is the pod of a role. What of the node it needs it has from the driver's own pods.
func (m moving) mover(ctx context.Context, r role, args []string) (*corev1.Pod, error) {
	set, driver, err := m.driverSet(ctx)
	if err != nil {
		return nil, err
	}
	from := set.Spec.Template.Spec.DeepCopy()
	pod := &corev1.Pod{ObjectMeta: m.meta("-" + string(r))}
	if pod.OwnerReferences, err = m.ownedByNode(ctx, m.nodeOf(r)); err != nil {
		return nil, err
	}
	pod.Labels[roleLabel] = string(r)
	if constraints := set.Spec.Template.Annotations["openshift.io/required-scc"]; constraints != "" {
		pod.Annotations["openshift.io/required-scc"] = constraints
	}
	own := corev1.Container{
		Name: container, Image: driver.Image, ImagePullPolicy: driver.ImagePullPolicy, Command: driver.Command, Args: slices.Clone(args), Env: slices.Clone(driver.Env),
		SecurityContext: &corev1.SecurityContext{
			RunAsUser: ptr.To(int64(0)), AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true), Privileged: ptr.To(false),
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: capabilities},
			SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
		Resources:                corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("64Mi")}},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
	}
	for _, arg := range driver.Args {
		if strings.HasPrefix(arg, "--endpoint=") || strings.HasPrefix(arg, "--datadir=") {
			own.Args = append(own.Args, arg)
		}
	}
	limit := stepDeadline
	if r == roleOut || r == roleIn {
		limit = deadline
	}
	pod.Spec = corev1.PodSpec{
		NodeName: m.nodeOf(r), RestartPolicy: corev1.RestartPolicyOnFailure, ActiveDeadlineSeconds: ptr.To(int64(limit / time.Second)),
		// A cordoned node is what volumes are moved from.
		Tolerations:        []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		ServiceAccountName: from.ServiceAccountName, AutomountServiceAccountToken: ptr.To(false), EnableServiceLinks: ptr.To(false),
		PriorityClassName: from.PriorityClassName, ImagePullSecrets: from.ImagePullSecrets, SecurityContext: from.SecurityContext,
		TerminationGracePeriodSeconds: ptr.To(int64(10)),
	}
	addVolumes(&pod.Spec, &own, from, driver)
	if r == roleOut || r == roleIn {
		m.addCertificates(&pod.Spec, &own, r)
	}
	pod.Spec.Containers = []corev1.Container{own}
	return pod, nil
}

// ownedByNode says that a pod goes with its node. The VolumeMove is in another namespace, and kubectl drain refuses a node with pods that
// no controller makes again.
func (m moving) ownedByNode(ctx context.Context, name string) ([]metav1.OwnerReference, error) {
	node := &corev1.Node{}
	if err := m.APIReader.Get(ctx, client.ObjectKey{Name: name}, node); err != nil {
		return nil, err
	}
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: ptr.To(true)}}, nil
}

// addVolumes adds what the driver has of the node: its socket, device nodes and pools. What mounts show on the host by is left out, and
// with that what is kubelet's.
func addVolumes(pod *corev1.PodSpec, own *corev1.Container, from *corev1.PodSpec, driver *corev1.Container) {
	for _, mount := range driver.VolumeMounts {
		i := slices.IndexFunc(from.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
		if i < 0 || from.Volumes[i].HostPath == nil || ptr.Deref(mount.MountPropagation, "") == corev1.MountPropagationBidirectional {
			continue
		}
		own.VolumeMounts = append(own.VolumeMounts, mount)
		pod.Volumes = append(pod.Volumes, from.Volumes[i])
	}
}

// addCertificates adds those of one side.
func (m moving) addCertificates(pod *corev1.PodSpec, own *corev1.Container, r role) {
	side := targetFile
	if r == roleOut {
		side = sourceFile
	}
	source := &corev1.SecretVolumeSource{SecretName: m.meta("").Name, DefaultMode: ptr.To(int32(0o400))}
	for _, file := range []string{authorityFile, side + ".crt", side + ".key"} {
		source.Items = append(source.Items, corev1.KeyToPath{Key: file, Path: file})
	}
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: "certificates", VolumeSource: corev1.VolumeSource{Secret: source}})
	own.VolumeMounts = append(own.VolumeMounts, corev1.VolumeMount{Name: "certificates", MountPath: certificates, ReadOnly: true})
}
