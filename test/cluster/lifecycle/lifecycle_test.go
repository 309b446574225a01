// Package lifecycle_test starts a cluster as a person does, does there what docs/cluster.md says, and ends it.
package lifecycle_test

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster/example"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// repository is where its commands are typed.
const repository = "../../.."

var programs = flag.String("programs", repository+"/bin/cluster", "directory with the programs of the cluster")

// What is left of it is in the list of .ci/run.
func TestClusterUpAndDown(t *testing.T) {
	dir, err := filepath.Abs(*programs)
	must.Succeed(t, err)
	state := filepath.Join(dir, "lifecycle")
	kubeconfig := ""
	// shell runs what a person types, at the repository's root, and returns what it prints.
	shell := func(script string) (string, error) {
		cmd := exec.Command("bash", "-euo", "pipefail", "-c", script)
		cmd.Dir = repository
		cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "PATH="+os.Getenv("PATH")+":"+dir)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	typeIn := func(script string) string {
		t.Helper()
		out, err := shell(script)
		if err != nil {
			t.Fatalf("%s: %v: %s", script, err, out)
		}
		return out
	}
	// It ends with the tests, however these do.
	cluster := "cluster -programs '" + dir + "' -state '" + state + "' -while " + strconv.Itoa(os.Getpid()) + " "
	// Also when something has failed. It is down usually.
	t.Cleanup(func() { typeIn(cluster + "down") })

	said := typeIn(cluster + "up")
	exported := regexp.MustCompile(`export KUBECONFIG=(\S+) `).FindStringSubmatch(said)
	typed := regexp.MustCompile(`(?m)^  (kubectl .*)$`).FindAllStringSubmatch(said, -1)
	if exported == nil || len(typed) != 2 {
		t.Fatalf("up does not say how to reach the cluster, and two commands of kubectl: %s", said)
	}
	kubeconfig = exported[1]
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Second) {
		out, err := shell(typed[0][1])
		if strings.Contains(out, "node-a") && strings.Contains(out, "node-b") && strings.Contains(out, "csistoragecapacity") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("not both nodes and capacities are listed: %s (%v)", out, err)
		}
	}
	typeIn(typed[1][1])
	typeIn(strings.Join(example.PodAndClaim.Lines(t), "\n"))
	typeIn("kubectl wait --for=condition=Ready pod/hostpath-csi-example --timeout=2m")
	// More than 1Gi is refused, until the claim has more.
	commands := example.WriteAndGrow.Lines(t)
	if out, err := shell(commands[0]); err == nil || !strings.Contains(out, "Disk quota exceeded") {
		t.Errorf("%s: %v: %s, want it refused for want of space", commands[0], err, out)
	}
	typeIn(commands[1])
	typeIn("kubectl wait --for=jsonpath='{.status.capacity.storage}'=4Gi pvc/hostpath-csi-example --timeout=2m")
	typeIn(commands[0])

	if out, err := shell(cluster + "up"); err == nil || !strings.Contains(out, "up already") {
		t.Errorf("a second up: %v: %s", err, out)
	}
	for _, want := range []string{"the cluster is gone", "no cluster is up"} {
		if out := typeIn(cluster + "down"); !strings.Contains(out, want) {
			t.Errorf("down says %s, want %q", out, want)
		}
	}
}
