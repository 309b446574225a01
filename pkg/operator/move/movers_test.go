package move

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What is said to movers, and by them, is what pkg/mover has.
func TestWordsOfMovers(t *testing.T) {
	want := []string{mover.Passing, mover.Passed, mover.Copied, mover.Fenced, mover.Unused, mover.HandedOver, mover.SourceName, mover.TargetName}
	if diff := cmp.Diff(want, []string{eventPassing, eventPassed, eventCopied, eventFenced, eventUnused, eventHandedOver, sourceName, targetName}); diff != "" {
		t.Error(diff)
	}
	for role, needs := range map[role][]privilege.Capability{
		roleOut: privilege.Needed, roleIn: slices.Concat(privilege.Needed, privilege.ForCopies),
		roleConfirm: nil, roleAssure: nil, roleVouch: nil, roleRemove: nil, roleAbort: nil, roleUndo: nil, roleTell: nil, roleAbortUndone: nil, roleGiveUp: nil,
	} {
		var needed []corev1.Capability
		for _, c := range needs {
			needed = append(needed, corev1.Capability(strings.TrimPrefix(c.String(), "CAP_")))
		}
		if diff := cmp.Diff(needed, role.capabilities()); diff != "" {
			t.Errorf("%s: %s", role, diff)
		}
	}
}

// A mover has of the node what the driver has, without what shows on the host, and no more rights than it needs.
func TestMoverPod(t *testing.T) {
	h := newHarness(t)
	object := moveOf("m", func(m *v1alpha1.VolumeMove) {
		m.Spec.BytesPerSecond, m.Spec.Snapshots = 1<<20, v1alpha1.LeaveSnapshots
		m.Status.SourceNode, m.Status.TargetNode, m.Status.VolumeHandle = nodeA, nodeB, "pvc-1"
		m.Status.PromisedBytes = 10 * gib
	})
	m := (&Reconciler{Client: h.Client, APIReader: h.api, DriverNamespace: storage}).reconciliation(object).movers
	pod, err := m.newPod(t.Context(), roleOut, m.args(roleOut, volumeOf("pv")))
	must.Succeed(t, err)
	c := pod.Spec.Containers[0]
	var mounts []string
	for _, mount := range c.VolumeMounts {
		mounts = append(mounts, mount.Name)
	}
	if diff := cmp.Diff([]string{"socket", "pool", "certificates"}, mounts); diff != "" {
		t.Error(diff)
	}
	if *pod.Spec.AutomountServiceAccountToken || *c.SecurityContext.Privileged || *c.SecurityContext.AllowPrivilegeEscalation || c.Image != "driver:v1" || pod.Spec.NodeName != nodeA {
		t.Errorf("the pod is %+v", pod.Spec)
	}
	want := []string{
		"move-out", "--volume=pvc-1", "--move=move-m", "--peer=node-b", "--may-fence=/move/may-fence", "--bytes=10737418240", "--verify=changed", "--leave-snapshots", "--bytes-per-second=1048576",
		"--cert-file=/move/source.crt", "--key-file=/move/source.key", "--ca-file=/move/ca.crt", "--endpoint=unix:///csi/csi.sock", "--datadir=$(DATADIR)",
	}
	if diff := cmp.Diff(want, c.Args); diff != "" {
		t.Error(diff)
	}
	// kubectl drain refuses a node with pods that no controller makes again.
	if owner := metav1.GetControllerOf(pod); owner == nil || owner.Kind != "Node" || owner.Name != nodeA || owner.UID != "uid of node-a" {
		t.Errorf("the pod is of %+v", owner)
	}
	for _, item := range pod.Spec.Volumes[2].Projected.Sources[0].Secret.Items {
		if strings.HasPrefix(item.Key, targetFile) {
			t.Errorf("the source has %s", item.Key)
		}
	}
}

// The movers of a move reach each other on one port, and nothing else, nor does anything else reach them.
func TestNetworkOfMovers(t *testing.T) {
	h := newHarness(t)
	must.Succeed(t, objects{move: moveOf("m"), api: apiServer{h.Client, h.api}, namespace: storage}.networkPolicy(t.Context()))
	policy := &networkingv1.NetworkPolicy{ObjectMeta: madeFor("m").meta("")}
	h.has(policy)
	movers := metav1.LabelSelector{MatchLabels: map[string]string{moveLabel: "move-m"}}
	ports := []networkingv1.NetworkPolicyPort{{Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(intstr.FromInt32(8444))}}
	peers := []networkingv1.NetworkPolicyPeer{{PodSelector: &movers}}
	want := networkingv1.NetworkPolicySpec{
		PodSelector: movers, PolicyTypes: []networkingv1.PolicyType{"Ingress", "Egress"},
		Ingress: []networkingv1.NetworkPolicyIngressRule{{Ports: ports, From: peers}},
		Egress:  []networkingv1.NetworkPolicyEgressRule{{Ports: ports, To: peers}},
	}
	if diff := cmp.Diff(want, policy.Spec); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The two sides take each other, and nothing else of another move.
func TestCertificates(t *testing.T) {
	one, err := issue(time.Now())
	must.Succeed(t, err)
	other, err := issue(time.Now().Add(-lifetime))
	must.Succeed(t, err)
	config := func(data map[string][]byte, side string) *tls.Config {
		pair, err := tls.X509KeyPair(data[side+".crt"], data[side+".key"])
		must.Succeed(t, err)
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(data[authorityFile])
		return &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, ServerName: targetName}
	}
	for name, tt := range map[string]struct {
		source map[string][]byte
		ok     bool
	}{"its own": {one, true}, "of another": {other, false}} {
		here, there := net.Pipe()
		server := tls.Server(there, config(one, targetFile))
		ended := make(chan error, 1)
		go func() {
			ended <- server.Handshake()
			_ = there.Close()
		}()
		clientErr := tls.Client(here, config(tt.source, sourceFile)).Handshake()
		_ = here.Close()
		if serverErr := <-ended; (clientErr == nil && serverErr == nil) != tt.ok {
			t.Errorf("%s: %v, %v", name, clientErr, serverErr)
		}
	}
}

// Certificates that were made while the clock was ahead, as that of a machine that had not asked for the time, are made anew once it is right.
func TestCertificatesOfAClockThatWasAhead(t *testing.T) {
	now := time.Now()
	for ahead, want := range map[time.Duration]bool{0: true, time.Minute: true, skew/2 + time.Minute: false, 30 * 24 * time.Hour: false, deadline - lifetime: false} {
		if data := must.Value(issue(now.Add(ahead)))(t); good(data, now) != want {
			t.Errorf("made %v ahead, the certificates are good: %v", ahead, !want)
		}
	}
}

// The clocks of the two nodes and of the operator are hours apart, from when the certificates are made until no mover has them any more.
func TestClocksApart(t *testing.T) {
	data, err := issue(time.Now())
	must.Succeed(t, err)
	for _, age := range []time.Duration{0, lifetime - deadline, lifetime} {
		for _, apart := range []time.Duration{-5 * time.Hour, -time.Hour, 0, time.Hour, 5 * time.Hour} {
			for _, side := range []struct {
				file string
				use  x509.ExtKeyUsage
			}{{sourceFile, x509.ExtKeyUsageClientAuth}, {targetFile, x509.ExtKeyUsageServerAuth}} {
				pool := x509.NewCertPool()
				pool.AppendCertsFromPEM(data[authorityFile])
				pair, err := tls.X509KeyPair(data[side.file+".crt"], data[side.file+".key"])
				must.Succeed(t, err)
				at := time.Now().Add(age + apart)
				if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, CurrentTime: at, KeyUsages: []x509.ExtKeyUsage{side.use}}); err != nil {
					t.Errorf("after %v, by a clock that is %v ahead: %v", age, apart, err)
				}
			}
		}
	}
}

func TestMessagesAreShort(t *testing.T) {
	if got := short(strings.Repeat("x", 5000)); len(got) > 1010 {
		t.Errorf("%d bytes", len(got))
	}
	if got := short("a\nb\x1b[2K\xff"); got != "a?b?[2K\ufffd" {
		t.Errorf("it says %q", got)
	}
}

// A silent kubelet answers nothing.
type silent struct{}

func (silent) Lines(ctx context.Context, _, _ string) (string, error) {
	<-ctx.Done()
	return "", ctx.Err()
}

// A kubelet that does not answer holds up no other move: one is looked at at a time.
func TestKubeletThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		r := &Reconciler{Client: h.Client, APIReader: h.api, Reports: silent{}, DriverNamespace: storage}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		for range 8 {
			_, err := r.Reconcile(ctx, ctrl.Request{NamespacedName: types.NamespacedName{Namespace: space, Name: "m"}})
			must.Succeed(t, err, ctx.Err())
			h.live()
		}
		if said := h.says("m"); !strings.Contains(said, "the mover on node node-a cannot be read") {
			t.Errorf("it says %q", said)
		}
	})
}

// Of a node that is known not to answer no log is asked for, which takes its time: the move goes on when it does.
func TestSourceThatIsDownIsNotAsked(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	down := 0
	h.run("m", func(look int) {
		if m := h.move("m"); m.Status.Phase != v1alpha1.Copying && m.Status.Phase != v1alpha1.Fenced || look < 4 || down == 2*long {
			return
		}
		answers := corev1.ConditionUnknown
		if down++; down%long == 0 {
			answers = corev1.ConditionTrue
		}
		change(node(nodeA), func(n *corev1.Node) { n.Status.Conditions[0].Status = answers })(h)
		if h.silent = answers != corev1.ConditionTrue; !h.silent {
			return
		}
		r := &Reconciler{Client: h.Client, APIReader: h.api, Reports: h, DriverNamespace: storage}
		result := must.Value(r.Reconcile(t.Context(), ctrl.Request{NamespacedName: types.NamespacedName{Namespace: space, Name: "m"}}))(t)
		if says := h.says("m"); result.RequeueAfter < idle || !strings.Contains(says, "node node-a does not answer") {
			t.Errorf("it looks again after %v, and says %q", result.RequeueAfter, says)
		}
	})
	if h.wantOn(nodeB); down < 2*long {
		t.Errorf("it was down for %d looks", down)
	}
}

// What kubelet refuses a mover for is said, and it is asked again now and then.
func TestKubeletThatRefusesMovers(t *testing.T) {
	for _, of := range []role{roleIn, roleOut} {
		h := newHarness(t, moveOf("m"), appPod("data-0", false))
		pod := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(of))}
		refused, said := 0, 0
		h.run("m", func(int) {
			if refused > 0 && strings.Contains(h.says("m"), "OutOfpods too many pods") {
				said++
			}
			if refused == 5 || !h.has(pod) || pod.Status.Phase == corev1.PodSucceeded {
				return
			}
			refused++
			pod.CreationTimestamp = metav1.Now()
			if refused == 5 {
				pod.CreationTimestamp.Time = time.Now().Add(-idle)
			}
			pod.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "OutOfpods", Message: "too many pods"}
			h.update(pod)
		})
		if said < 4 {
			t.Errorf("%s is refused %d times, and that is said %d times", of, refused, said)
		}
		h.wantOn(nodeB)
	}
}

// An image from before there were movers refuses their flags, which says little to a user.
func TestImageThatKnowsNoMovers(t *testing.T) {
	const old = "hostpath-csi-driver: invalid configuration:\nunexpected argument \"move-in\"\n--nodeid: invalid: the node id is empty\n"
	for _, tt := range []struct {
		message string
		exit    int32
		named   bool
	}{
		{old, 1, true},
		{"{\"event\":\"failed\"}\nhostpath-csi-driver move-in: no room\n", 1, false},
		{"", 137, false},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{NodeName: nodeB, Containers: []corev1.Container{{Image: "driver:v0"}}}}
		pod.Status.ContainerStatuses = []corev1.ContainerStatus{{LastTerminationState: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{ExitCode: tt.exit, Message: tt.message},
		}}}
		if said := trouble(pod); strings.Contains(said, "driver:v0") != tt.named {
			t.Errorf("of a mover that ends with %q it says %q", tt.message, said)
		}
	}
}

// Movers that have failed once, and go on, have pods stop as others do.
func TestMoversThatHadFailed(t *testing.T) {
	h := newHarness(t, moveOf("m"), appPod("data-0", false))
	failed := 0
	h.run("m", func(int) {
		for _, of := range []role{roleIn, roleOut} {
			pod := &corev1.Pod{ObjectMeta: madeFor("m").meta("-" + string(of))}
			if !h.has(pod) || len(pod.Status.ContainerStatuses) > 0 {
				continue
			}
			failed++
			pod.Status.ContainerStatuses = []corev1.ContainerStatus{{RestartCount: 1, LastTerminationState: corev1.ContainerState{
				Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, Message: "connection reset\n"},
			}}}
			h.update(pod)
		}
	})
	if failed != 2 {
		t.Errorf("%d movers had failed", failed)
	}
	h.wantOn(nodeB)
}
