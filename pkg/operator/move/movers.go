package move

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

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
	roleOut         role = "out"
	roleIn          role = "in"
	roleConfirm     role = "confirm"
	roleAssure      role = "assure" // confirms once more, which succeeds only where the volume is
	roleVouch       role = "vouch"  // does that whenever the source asks
	roleRemove      role = "remove"
	roleUndo        role = "undo"
	roleTell        role = "tell"         // does that once more, and says so to the next
	roleAbortUndone role = "abort-undone" // aborts, what may be whole once it is told
	roleAbort       role = "abort"
	roleGiveUp      role = "give-up" // undoes what nothing wants any more, and what may be gone
)

const (
	container = "mover"
	// stepDeadline is that of a mover that does one step.
	stepDeadline = 15 * time.Minute
	certificates = "/move"
	// mayFenceAnnotation on the pod of the source has the uid of the move once it may fence the volume, and mayFenceFile shows it to the mover:
	// kubelet looks at a pod as soon as its annotations change.
	mayFenceAnnotation = "hostpathprovisioner.kubevirt.io/may-fence"
	mayFenceFile       = "may-fence"
)

// Capabilities of pkg/hostfs/privilege.
var (
	toRead  = []corev1.Capability{"DAC_OVERRIDE", "FOWNER", "SYS_ADMIN"}
	toWrite = append(slices.Clone(toRead), "CHOWN", "FSETID", "SETFCAP", "MKNOD")
)

// capabilities are those that a role needs: one that does not copy only asks the driver for something. test/e2e/privilege checks that none
// is missing and none superfluous.
func (r role) capabilities() []corev1.Capability {
	switch r {
	case roleOut:
		return toRead
	case roleIn:
		return toWrite
	}
	return nil
}

// onSource says on which side a role is.
func (r role) onSource() bool {
	return r == roleOut || r == roleRemove || r == roleUndo || r == roleTell || r == roleGiveUp
}

// shows says that what a role has done shows what its node has, on which the removal of another copy relies.
func (r role) shows() bool { return r == roleConfirm || r == roleAssure || r == roleUndo }

// copies is the role that copies on the same side.
func (r role) copies() role {
	if r.onSource() {
		return roleOut
	}
	return roleIn
}

func (r role) words() string {
	if r.onSource() {
		return "have the volume be used again"
	}
	return "remove the copy"
}

func isOf(pod *corev1.Pod, roles []role) bool {
	return slices.Contains(roles, role(pod.Labels[roleLabel]))
}

// Movers are the pods that read, write and record what a move needs on its two nodes, one for each role.
type movers struct {
	move    *v1alpha1.VolumeMove
	api     apiServer
	objects objects
	driver  driver
}

// nodeOf is where a role runs.
func (m movers) nodeOf(r role) string {
	if r.onSource() {
		return m.move.Status.SourceNode
	}
	return m.move.Status.TargetNode
}

// args are those of a role. Only those that copy need the volume.
func (m movers) args(r role, volume *corev1.PersistentVolume) []string {
	args := []string{"move-in"}
	peer := m.move.Status.SourceNode
	if r.onSource() {
		args, peer = []string{"move-out"}, m.move.Status.TargetNode
	}
	args = append(args, "--volume="+m.move.Status.VolumeHandle, "--move="+string(m.move.UID), "--peer="+peer)
	switch r {
	case roleOut:
		args = append(args, "--may-fence="+certificates+"/"+mayFenceFile, fmt.Sprintf("--bytes=%d", m.move.Status.PromisedBytes), "--verify="+strings.ToLower(string(m.move.Spec.Verify)))
		if m.move.Spec.Snapshots == v1alpha1.LeaveSnapshots {
			args = append(args, "--leave-snapshots")
		}
		if m.move.Spec.BytesPerSecond > 0 {
			args = append(args, fmt.Sprintf("--bytes-per-second=%d", m.move.Spec.BytesPerSecond))
		}
	case roleIn:
		args = append(args, fmt.Sprintf("--address=:%d", port), "--pool="+volume.Spec.CSI.VolumeAttributes[render.PoolParameter])
	case roleConfirm, roleAssure:
		return append(args, "--step=confirm", "--fence="+m.move.Status.Fence)
	case roleVouch:
		args = append(args, "--step="+string(r), "--fence="+m.move.Status.Fence, fmt.Sprintf("--address=:%d", port))
	case roleAbortUndone:
		args = append(args, "--step="+string(r), fmt.Sprintf("--address=:%d", port))
	case roleUndo, roleTell:
		return append(args, "--step=undo", "--target-aborted") // the copy is not used, and aborted afterwards
	case roleAbort:
		if m.move.Status.Fence != "" { // the copy may be confirmed, and no PersistentVolume has led to it
			args = append(args, "--even-confirmed")
		}
		return append(args, "--step="+string(r))
	default:
		return append(args, "--step="+string(r))
	}
	return append(args, r.identity()...)
}

// identity are the arguments by which a role proves itself to the other node.
func (r role) identity() []string {
	return []string{"--cert-file=" + certificates + "/" + r.side() + ".crt", "--key-file=" + certificates + "/" + r.side() + ".key", "--ca-file=" + certificates + "/" + authorityFile}
}

func (r role) side() string {
	if r.onSource() {
		return sourceFile
	}
	return targetFile
}

// pod is that of a role, with these arguments. While one from before ends, which had others, or has failed, it is nil, and ended says why.
func (m movers) pod(ctx context.Context, r role, args []string) (pod *corev1.Pod, ended string, err error) {
	pod = &corev1.Pod{}
	err = m.api.reader.Get(ctx, client.ObjectKey{Namespace: m.objects.namespace, Name: m.objects.meta("-" + string(r)).Name}, pod)
	if apierrors.IsNotFound(err) {
		if pod, err = m.newPod(ctx, r, args); err != nil {
			return nil, "", err
		}
		return pod, "", m.objects.ensure(ctx, pod)
	}
	switch {
	case err != nil:
		return nil, "", err
	case !m.objects.has(pod):
		return nil, "", fmt.Errorf("pod %s is not of this move", pod.Name)
	case pod.Status.Phase == corev1.PodSucceeded && pod.DeletionTimestamp == nil:
		return pod, "", nil
	case pod.Status.Phase == corev1.PodFailed:
		ended = fmt.Sprintf("pod %s has failed, and is made again: %s %s", pod.Name, pod.Status.Reason, cmp.Or(pod.Status.Message, trouble(pod)))
		if m.objects.now().Sub(pod.CreationTimestamp.Time) < idle { // kubelet would refuse the next one, too, as on a node that is full of pods
			return nil, ended, nil
		}
		return nil, ended, m.api.delete(ctx, pod)
	case pod.DeletionTimestamp != nil:
		return nil, "one from before ends", nil
	case !sameArgs(pod, args):
		return nil, "one from before ends", m.api.delete(ctx, pod)
	}
	return pod, "", nil
}

// letFence gives the mover of the source leave to fence the volume, if that was written.
func (m movers) letFence(ctx context.Context, pod *corev1.Pod) error {
	before := pod.DeepCopy()
	if !m.noteLeave(pod) {
		return nil
	}
	return client.IgnoreNotFound(m.api.writer.Patch(ctx, pod, client.MergeFrom(before)))
}

// noteLeave notes on a pod that it may fence, and says whether that is new to it.
func (m movers) noteLeave(pod *corev1.Pod) bool {
	uid := string(m.move.UID)
	if m.move.Status.MayFenceTime == nil || pod.Annotations[mayFenceAnnotation] == uid {
		return false
	}
	metav1.SetMetaDataAnnotation(&pod.ObjectMeta, mayFenceAnnotation, uid)
	return true
}

// sameArgs says whether a mover was started with these arguments. It has what it got from the DaemonSet behind them.
func sameArgs(pod *corev1.Pod, args []string) bool {
	has := pod.Spec.Containers[0].Args
	return len(has) >= len(args) && slices.Equal(has[:len(args)], args) && !slices.ContainsFunc(has[len(args):], func(a string) bool {
		return !strings.HasPrefix(a, "--endpoint=") && !strings.HasPrefix(a, "--datadir=")
	})
}

// step has one step done on a node, with more arguments. It says what keeps it from being done.
func (m movers) step(ctx context.Context, r role, more ...string) (done bool, why string, err error) {
	at, err := m.api.nodeState(ctx, m.nodeOf(r))
	if err != nil {
		return false, "", err
	}
	if !at.there {
		// What a node had is gone with it, but for what it has to show.
		return !r.shows(), "the node is gone; the other node has all of the volume still", nil
	}
	pod, ended, err := m.pod(ctx, r, append(m.args(r, nil), more...))
	switch {
	case err != nil:
		return false, "", err
	case pod == nil:
		return false, ended, nil
	case pod.Status.Phase == corev1.PodSucceeded && r.shows() && pod.Annotations[bootAnnotation] != at.boot:
		return false, "the node was started anew since it has answered", m.api.delete(ctx, pod)
	case pod.Status.Phase == corev1.PodSucceeded:
		return true, "", nil
	}
	return false, cmp.Or(trouble(pod), state(pod)), nil
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
			if ended.ExitCode > 0 && ended.ExitCode < bySignal && !hasReported(ended.Message) {
				return fmt.Sprintf("the image %s on node %s runs no mover: it may be of a version that cannot move volumes: %s",
					pod.Spec.Containers[0].Image, pod.Spec.NodeName, lastLine(ended.Message))
			}
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

// newPod is the pod of a role. What of the node it needs it has from the driver's own pods.
func (m movers) newPod(ctx context.Context, r role, args []string) (*corev1.Pod, error) {
	set, driver, err := m.driver.daemonSet(ctx)
	if err != nil {
		return nil, err
	}
	from := set.Spec.Template.Spec.DeepCopy()
	pod := &corev1.Pod{ObjectMeta: m.objects.meta("-" + string(r))}
	if err := m.api.bind(ctx, pod, m.nodeOf(r)); err != nil {
		return nil, err
	}
	pod.Labels[roleLabel] = string(r)
	if r == roleOut {
		m.noteLeave(pod)
	}
	if constraints := set.Spec.Template.Annotations["openshift.io/required-scc"]; constraints != "" {
		pod.Annotations["openshift.io/required-scc"] = constraints
	}
	own := corev1.Container{
		Name: container, Image: driver.Image, ImagePullPolicy: driver.ImagePullPolicy, Command: driver.Command, Args: slices.Clone(args), Env: slices.Clone(driver.Env),
		SecurityContext: &corev1.SecurityContext{
			RunAsUser: ptr.To(int64(0)), AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true), Privileged: ptr.To(false),
			Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: r.capabilities()},
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
	if slices.Contains(args, r.identity()[0]) {
		m.addCertificates(&pod.Spec, &own, r)
	}
	pod.Spec.Containers = []corev1.Container{own}
	return pod, nil
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

// addCertificates adds those of one side, and for the source what it has leave for. All are one volume of a kind that a driver's pod has, too:
// the constraints of OpenShift allow no other.
func (m movers) addCertificates(pod *corev1.PodSpec, own *corev1.Container, r role) {
	side := r.side()
	source := &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: m.objects.meta("").Name}}
	for _, file := range []string{authorityFile, side + ".crt", side + ".key"} {
		source.Items = append(source.Items, corev1.KeyToPath{Key: file, Path: file})
	}
	sources := []corev1.VolumeProjection{{Secret: source}}
	if r == roleOut {
		annotation := &corev1.ObjectFieldSelector{FieldPath: "metadata.annotations['" + mayFenceAnnotation + "']"}
		sources = append(sources, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{
			Items: []corev1.DownwardAPIVolumeFile{{Path: mayFenceFile, FieldRef: annotation}},
		}})
	}
	projected := &corev1.ProjectedVolumeSource{Sources: sources, DefaultMode: ptr.To(int32(0o400))}
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: "certificates", VolumeSource: corev1.VolumeSource{Projected: projected}})
	own.VolumeMounts = append(own.VolumeMounts, corev1.VolumeMount{Name: "certificates", MountPath: certificates, ReadOnly: true})
}
