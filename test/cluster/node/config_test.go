package node

import (
	"encoding/json"
	"testing"

	kubelet "k8s.io/kubelet/config/v1beta1"
	"sigs.k8s.io/yaml"
)

func testNode(number int) *Node {
	return &Node{Config: Config{Name: "node", Number: number, Dir: "/dir", Cgroup: "/group/node", Pause: "pause", MaxPods: 10}}
}

// A misspelt setting would be ignored by kubelet.
func TestKubeletConfigHasKnownSettings(t *testing.T) {
	var config kubelet.KubeletConfiguration
	if err := yaml.UnmarshalStrict([]byte(testNode(1).kubeletConfig()), &config); err != nil {
		t.Fatal(err)
	}
	if config.CgroupRoot != "/group/node" || config.FailCgroupV1 == nil || *config.FailCgroupV1 {
		t.Errorf("the control group is %q, and failCgroupV1 %v", config.CgroupRoot, config.FailCgroupV1)
	}
}

// Nodes share one network, so nothing of theirs may have the same port, bridge or
// range of addresses.
func TestNodesShareNoPortOrAddress(t *testing.T) {
	seen := map[any]bool{}
	for _, n := range []*Node{testNode(1), testNode(2)} {
		var network struct {
			Plugins []struct {
				Bridge string
				IPAM   struct{ Ranges [][]struct{ Subnet string } }
			}
		}
		if err := json.Unmarshal([]byte(n.network()), &network); err != nil {
			t.Fatal(err)
		}
		bridge := network.Plugins[0]
		for _, own := range []any{n.port(), n.healthPort(), bridge.Bridge, bridge.IPAM.Ranges[0][0].Subnet} {
			if seen[own] {
				t.Errorf("two nodes have %v", own)
			}
			seen[own] = true
		}
	}
}
