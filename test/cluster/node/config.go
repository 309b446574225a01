package node

import (
	"fmt"

	"kubevirt.io/hostpath-provisioner/test/cluster/control"
)

// All nodes are at the address of the control plane and differ in their ports.
const nodeAddress = control.Address

func (n *Node) port() int       { return 10250 + 100*n.Number }
func (n *Node) healthPort() int { return n.port() - 2 }

// network has the pods of each node on a bridge of its own. Between the bridges
// the kernel routes.
func (n *Node) network() string {
	return fmt.Sprintf(`{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "pods%d",
      "isGateway": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.244.%d.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`, n.Number, n.Number)
}

func (n *Node) containerdConfig() string {
	return fmt.Sprintf(`version = 2
root = %q
state = "/run/containerd"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]

[grpc]
  address = %q

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  # Root may lack the right to lower a process's score, as in a container.
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = %q
`, n.file("containerd"), containerdSocket, n.Pause, n.file("net.d"))
}

func (n *Node) kubeletConfig() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 0.0.0.0
port: %d
healthzBindAddress: 127.0.0.1
healthzPort: %d
authentication:
  anonymous: {enabled: true}
  webhook: {enabled: false}
authorization: {mode: AlwaysAllow}
containerRuntimeEndpoint: unix://%s
resolvConf: %s
maxPods: %d
# Two kubelets on one root would kill each other's pods as orphans.
cgroupRoot: %s
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
# The machine's own disk may be nearly full.
evictionHard: {memory.available: 50Mi, nodefs.available: 1Mi, imagefs.available: 1Mi, nodefs.inodesFree: "10"}
imageGCHighThresholdPercent: 100
# Nothing is to wait here that need not.
kubeAPIQPS: 100
kubeAPIBurst: 200
registryPullQPS: 0
serializeImagePulls: false
nodeStatusUpdateFrequency: 4s
# Also how often it asks for the health of volumes.
volumeStatsAggPeriod: 5s
featureGates: {%s}
# How long a pod in use waits for its volume to grow.
syncFrequency: 10s
`, n.port(), n.healthPort(), containerdSocket, n.file("resolv.conf"), n.MaxPods, n.Cgroup, n.FeatureGates)
}
