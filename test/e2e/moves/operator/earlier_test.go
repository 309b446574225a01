package operator

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A frame is a message of gRPC, and frames pass them on.
type frame []byte

type frames struct{}

func (frames) Marshal(v any) ([]byte, error)      { return *v.(*frame), nil }
func (frames) Unmarshal(data []byte, v any) error { *v.(*frame) = append(frame{}, data...); return nil }
func (frames) Name() string                       { return "frames" }

// downgrade has the driver of a node be one from before there were moves, until it is updated: its calls are answered as a server does that
// does not know them, and all others by the driver.
func (n *node) downgrade() (update func()) {
	n.Helper()
	forward := func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream)
		if strings.HasPrefix(method, "/"+moves.Service+"/") {
			return status.Errorf(codes.Unimplemented, "unknown service %s", moves.Service)
		}
		var request, answer frame
		if err := stream.RecvMsg(&request); err != nil {
			return err
		}
		if err := n.Process.Conn().Invoke(stream.Context(), method, &request, &answer, grpc.ForceCodec(frames{})); err != nil {
			return err
		}
		return stream.SendMsg(&answer)
	}
	socket := filepath.Join(testenv.SocketDir(n), "s")
	listener, err := net.Listen("unix", socket)
	must.Succeed(n, err)
	server := grpc.NewServer(grpc.ForceServerCodec(frames{}), grpc.UnknownServiceHandler(forward))
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	n.Cleanup(func() {
		server.Stop()
		must.Succeed(n, <-ended)
	})
	n.socket = "unix://" + socket
	return func() { n.socket = n.Process.Endpoint() }
}

// A driver of the version before on one of the nodes has a move wait, which says on which node and which version that is, before anything is
// made on a node. When it is updated, the move goes on.
func TestDriverOfVersionBefore(t *testing.T) {
	c := newCluster(t, "")
	for name, on := range map[string]string{"source": nodeA, "target": nodeB} {
		t.Run(name, func(t *testing.T) {
			c.lend(t)
			c.begin(corev1.PersistentVolumeReclaimDelete)
			update := c.nodes[on].downgrade()
			// The DaemonSet was changed, and its pod on the node was not replaced yet.
			c.roll(on, "1")
			c.waits("node "+on+" has the image driver:v1", v1alpha1.Pending)
			// The tag of the image was given to another: only the movers see that.
			c.roll(on, "2")
			c.waits("the mover on node "+on+" failed, and is started again: hostpath-csi-driver move-"+map[string]string{nodeA: "out", nodeB: "in"}[on]+
				": the driver of this node has version "+driverVersion, v1alpha1.Copying)
			update()
			c.restartMovers()
			c.move(deletion{}, func() {})
		})
	}
}

// roll has the pod of the driver on a node be of a generation of its DaemonSet, which has the second.
func (c *cluster) roll(on, generation string) {
	c.Helper()
	set := driverSet()
	c.has(set)
	set.Annotations = map[string]string{appsv1.DeprecatedTemplateGeneration: "2"}
	must.Succeed(c, c.api.Update(c.Context(), set))
	for _, name := range []string{nodeA, nodeB} {
		pod := driverPod(name)
		c.has(pod)
		pod.Labels["pod-template-generation"] = "2"
		if name == on {
			pod.Labels["pod-template-generation"], pod.Spec.Containers[0].Image = generation, "driver:v"+generation
		}
		must.Succeed(c, c.api.Update(c.Context(), pod))
	}
}

// waits has the move go on until it says something, in a phase, and expects the pod to have the volume, and nothing else to be on a node.
func (c *cluster) waits(says string, in v1alpha1.Phase) {
	c.Helper()
	again := time.NewTicker(often)
	defer again.Stop()
	said := "" // before: a mover that is started again says nothing for a moment
	for began := time.Now(); !strings.Contains(c.says(), says) || in == v1alpha1.Copying && !c.failsAgain(); <-again.C {
		if now := c.says(); now != "" {
			said = now
		}
		if time.Since(began) > drivertest.Patience {
			c.Fatalf("it says %q, want %q\n%s", said, says, c.output())
		}
		c.reconcile()
		c.live()
	}
	m, pod := c.moveObject(), appPod()
	if c.has(m); m.Status.Phase != in {
		c.Errorf("in the phase %s it says %q", m.Status.Phase, c.says())
	}
	if !c.isRunning() || !c.has(pod) {
		c.Fatal("the pod does not run")
	}
	c.wantVolume(nodeA, podName(pod))
}

// failsAgain says whether a mover was started again some times, in which the other one would have made something.
func (c *cluster) failsAgain() bool {
	for _, m := range c.movers {
		if m.restarts > 5 {
			return true
		}
	}
	return false
}

// restartMovers has kubelet run movers anew, with the driver's socket as it is by now.
func (c *cluster) restartMovers() {
	for _, m := range c.movers {
		m.kill()
	}
	clear(c.movers)
}
