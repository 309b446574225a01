package cases_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	there = "From the upstream operator"
	back  = "Back to the upstream operator"
)

// A guide is what upgrade.md says, word for word, for a cluster with one object.
type guide struct {
	*harness
	object string
	// saved is the file with the object that the way back makes.
	saved string
	// operator and webhook are the files of the upstream operator.
	operator, webhook string
}

// commands are the blocks of commands below a heading of upgrade.md, one after the other.
func (g *guide) commands(heading string) []string {
	g.Helper()
	return g.documented("upgrade.md", heading)
}

// documented are the blocks of commands below a heading of a document, one after the other.
func (h *harness) documented(document, heading string) []string {
	h.Helper()
	text, err := os.ReadFile("../../../docs/" + document)
	must.Succeed(h, err)
	_, section, found := strings.Cut(string(text), "# "+heading+"\n")
	section, _, _ = strings.Cut(section, "\n#")
	blocks := regexp.MustCompile(`(?m)(?:^ {4,}\S.*\n)+`).FindAllString(section, -1)
	if !found || len(blocks) == 0 {
		h.Fatalf("%s has no commands below %q", document, heading)
	}
	return blocks
}

// run has a shell do what is written, where it is written: those that name the path of a pool on a node. It returns what is printed.
func (g *guide) run(commands, node string) string {
	g.Helper()
	return g.shell(strings.NewReplacer(" NAME", " "+g.object, "saved.yaml", g.saved, "webhook.yaml", g.webhook, "operator.yaml", g.operator,
		"-k deploy/operator", "-k test/cluster/overlay/operator", "PATH/csi", operatorPool).Replace(commands), node)
}

// shell has one do what a document says, on a node if it is named. It returns what is printed.
func (h *harness) shell(commands, node string) string {
	h.Helper()
	shell := []string{"-euo", "pipefail", "-c", commands}
	cmd := exec.CommandContext(h.Context(), "bash", shell...)
	if node != "" {
		cmd = c.Nodes[node].Command(h.Context(), "bash", shell...)
	}
	cmd.Dir = "../../.."
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig, "PATH="+c.Programs+":"+os.Getenv("PATH"))
	var printed bytes.Buffer
	cmd.Stdout, cmd.Stderr = &printed, &printed
	err := cmd.Run()
	h.Logf("%s%s", commands, printed.String())
	must.Succeed(h, err)
	return printed.String()
}

// follow does all that is below a heading, and returns what the commands on nodes have printed. Other things happen before the last
// block, which waits for them.
func (g *guide) follow(heading string, others ...func()) (onNodes string) {
	g.Helper()
	blocks := g.commands(heading)
	for i, block := range blocks {
		if i == len(blocks)-1 {
			for _, other := range others {
				other()
			}
		}
		if !strings.Contains(block, "PATH/csi") {
			g.run(block, "")
			continue
		}
		for name := range c.Nodes {
			onNodes += g.run(block, name)
		}
	}
	return onNodes
}

// upstream makes an object of the upstream operator, which has deployed the driver for it, and the guide for both ways.
func (h *harness) upstream(name, spec string) *guide {
	h.Helper()
	h.upstreamObjects("testdata/upstream-operator.yaml")
	h.upstreamObject(name, spec)
	h.upstreamObjects("testdata/upstream-webhook.yaml")
	dir := h.TempDir()
	g := &guide{harness: h, object: name, saved: filepath.Join(dir, "saved"), operator: filepath.Join(dir, "operator"), webhook: filepath.Join(dir, "webhook")}
	var operator [][]byte
	for _, file := range []string{"crd", "operator", "webhook"} {
		text, err := os.ReadFile("testdata/upstream-" + file + ".yaml")
		must.Succeed(h, err)
		operator = append(operator, text)
	}
	must.Succeed(h, os.WriteFile(g.operator, bytes.Join(operator[:2], []byte("---\n")), 0o600))
	// What is there in the place of the upstream operator does not answer.
	must.Succeed(h, os.WriteFile(g.webhook, bytes.Replace(operator[2], []byte("failurePolicy: Fail"), []byte("failurePolicy: Ignore"), 1), 0o600))
	return g
}

// returned is what the upstream operator does with the object that the way back has made for it: it deploys, which nothing that was left
// hinders, and says so.
func (g *guide) returned(daemonSet string, deploy func()) {
	g.Helper()
	g.wantNothingOfOurs()
	if status := g.kubectl("get", "hostpathprovisioner", g.object, "-o", "jsonpath={.status}"); status != "" {
		g.Errorf("the upstream operator is given the status %s", status)
	}
	deploy()
	g.kubectl("rollout", "status", "-n", cluster.Namespace, "daemonset/"+daemonSet, "--timeout=2m")
	g.kubectl("patch", "hostpathprovisioner", g.object, "--type=merge", "-p", `{"status":{"observedVersion":"v0.25.2","conditions":[{"type":"Available","status":"True"}]}}`)
}

// wantNothingOfOurs says that there is only what the upstream operator's manifests have: the rest would ask, or refuse, or keep fields.
func (h *harness) wantNothingOfOurs() {
	h.Helper()
	inCluster := h.kubectl("get", "validatingadmissionpolicy,validatingadmissionpolicybinding,validatingwebhookconfiguration,mutatingwebhookconfiguration,"+
		"clusterrole,clusterrolebinding,csidriver", "-o", "name")
	left := h.kubectl("get", "-n", cluster.Namespace, "daemonset,deployment,serviceaccount,role,rolebinding,job,secret,service,networkpolicy", "-o", "name")
	for name := range strings.Lines(inCluster) {
		if strings.Contains(name, "hostpath") {
			left += name
		}
	}
	want := []string{
		"clusterrole.rbac.authorization.k8s.io/hostpath-provisioner-operator", "clusterrolebinding.rbac.authorization.k8s.io/hostpath-provisioner-operator",
		"deployment.apps/hostpath-provisioner-operator", "secret/hostpath-provisioner-operator-webhook-service-cert",
		"service/hostpath-provisioner-operator-webhook-service", "serviceaccount/default", "serviceaccount/hostpath-provisioner-operator",
		"validatingwebhookconfiguration.admissionregistration.k8s.io/hostpathprovisioner.kubevirt.io",
	}
	got := strings.Fields(left)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		h.Errorf("there is not what the upstream operator's manifests have (-want +got):\n%s", diff)
	}
}

// leaveUpstream removes an object of the upstream operator and what that has made for it, once no volume needs it any more.
func (h *harness) leaveUpstream(name string, fixtures ...string) {
	h.Helper()
	ctx := context.Background()
	for _, args := range [][]string{
		{"delete", "validatingwebhookconfiguration", "hostpathprovisioner.kubevirt.io", "--ignore-not-found"},
		{"delete", "hostpathprovisioner", name, "--ignore-not-found", "--wait=false"},
		{"patch", "hostpathprovisioner", name, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`},
	} {
		out, err := c.Kubectl(ctx, args...)
		if err != nil && !strings.Contains(out, "NotFound") && !strings.Contains(out, "the server doesn't have a resource type") {
			h.Error(err)
		}
	}
	for _, file := range fixtures {
		h.kubectl("delete", "--ignore-not-found", "-f", file)
	}
}

// A cluster with pools on claims goes from the upstream operator to this one and back, as upgrade.md says. A pod with a volume in a plain pool writes all
// the time. Both drivers serve and remove the volumes of both.
func TestBackToUpstreamOperator(t *testing.T) {
	needTime(t)
	h := begin(t)
	h.withoutDriver()
	h.kubectl("apply", "-f", operatorDir+"/namespace.yaml")
	all := []string{"testdata/upstream-objects.yaml", "testdata/upstream-pools.yaml", "testdata/upstream-operator.yaml"}
	t.Cleanup(func() { h.leaveUpstream("away", all...) })
	h.upstreamObjects(all[0])
	h.claim("data", "64Mi", ofClass(operatorClass))
	h.pod("writer", with("data", "/data"), doing(counting))
	pod := h.ready("writer")
	writers := []writer{{pod, filepath.Join(h.disk(h.volume("data")), "numbers")}}
	pools := h.upstreamPools()
	g := h.upstream("away", adoptedPools)

	g.follow(there)
	h.kubectl("delete", "secret", "-n", cluster.Namespace, "hostpath-provisioner-operator-webhook-service-cert")
	h.wantAdopted(pools)
	h.goOn(writers)
	h.claim("ours", "64Mi", ofClass(operatorClass))
	h.pod("ours", with("ours", "/data"), on(pod.Spec.NodeName))
	h.pod("inline", on(pod.Spec.NodeName), withVolume(corev1.VolumeMount{MountPath: "/data"}, corev1.VolumeSource{
		CSI: &corev1.CSIVolumeSource{Driver: cluster.DriverName, VolumeAttributes: map[string]string{"storagePool": "local", "size": "32Mi"}},
	}))
	h.ready("inline")
	h.mustRun("inline", "echo inline >/data/file")
	h.ready("ours")
	h.mustRun("ours", "echo ours >/data/file; sync -f /data")
	// What the upstream driver has made for a pod that ended under this one (createVolumeDirectoryFunc of its pkg/hostpath/utils.go).
	ended := operatorPool + "/csi-" + strings.Repeat("0e", 32)
	must.Succeed(t, os.Mkdir(c.Nodes[nodeB].Disk(ended), 0o755))

	h.remove("on-fast")
	listed := g.follow(back, func() {
		g.returned(operatorDaemonSet, func() {
			h.upstreamObjects(all[0])
			h.mountUpstream()
		})
	})
	if strings.TrimSpace(listed) != ended {
		t.Errorf("upgrade.md lists %q, want %s alone", listed, ended)
	}
	must.Succeed(t, os.Remove(c.Nodes[nodeB].Disk(ended)))
	h.goOn(writers)
	h.wantUninterrupted(writers)
	for pod, want := range map[string]string{"ours": "ours\n", "inline": "inline\n"} {
		if got := h.mustRun(pod, "cat /data/file"); got != want {
			t.Errorf("the pod %s reads %q", pod, got)
		}
	}
	h.pod("on-fast", with("fast", "/data"))
	h.ready("on-fast")
	if got := h.mustRun("on-fast", "cat /data/file"); got != "before\n" {
		t.Errorf("the next pod reads %q", got)
	}
	directories := []string{filepath.Dir(writers[0].file), h.disk(h.volume("ours"))}
	h.remove("writer", "ours", "inline", "on-fast")
	h.kubectl("delete", "pvc", "-n", h.namespace, "--all")
	h.until("the volumes to be deleted", h.volumesOf(h.namespace))
	for _, directory := range directories {
		h.wantGone(directory)
	}
	if left := h.kubectl("get", "volumeattachments", "-o", "name"); left != "" {
		t.Errorf("volumes are attached: %s", left)
	}
	h.unmountUpstream()
	h.removePoolClaims("hpp-pool-everywhere-shared", "hpp-pool-fast-node-a", "hpp-pool-fast-node-b")
}

// unmountUpstream removes the mounters of the upstream operator, and unmounts their pools.
func (h *harness) unmountUpstream() {
	h.Helper()
	h.kubectl("delete", "-f", "testdata/upstream-pools.yaml")
	for _, n := range c.Nodes {
		_, err := n.Output(h.Context(), "sh", "-ec", "umount /var/adopted/csi /var/adopted-everywhere/csi")
		must.Succeed(h, err)
	}
}

// The same with pathConfig, and volumes of the pre-CSI provisioners of both.
func TestBackToUpstreamPreCSIProvisioner(t *testing.T) {
	const class = "hostpath-operator-pre-csi"
	needTime(t)
	h := begin(t)
	h.withoutDriver()
	h.class(operatorLegacyClass, "legacy", storagev1.VolumeBindingWaitForFirstConsumer)
	h.applyText("{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: " + class + "}, provisioner: kubevirt.io/hostpath-provisioner, volumeBindingMode: WaitForFirstConsumer}")
	h.kubectl("apply", "-f", operatorDir+"/namespace.yaml")
	all := []string{"testdata/upstream-legacy.yaml", "testdata/upstream-operator.yaml"}
	t.Cleanup(func() { h.leaveUpstream("away", all...) })
	h.upstreamObjects(all[0])
	g := h.upstream("away", "pathConfig: {path: /var/hpvolumes}")

	g.follow(there)
	h.kubectl("delete", "secret", "-n", cluster.Namespace, "hostpath-provisioner-operator-webhook-service-cert")
	h.claim("old", "64Mi", ofClass(class))
	h.pod("old", with("old", "/data"))
	h.ready("old")
	volume, _, directory := h.hostPath("old")
	h.mustRun("old", "echo hello >/data/file; sync -f /data")

	g.follow(back, func() {
		g.returned("hostpath-provisioner", func() { h.upstreamObjects(all[0]) })
	})
	if got := h.mustRun("old", "cat /data/file"); got != "hello\n" {
		t.Errorf("the pod reads %q", got)
	}
	h.remove("old")
	h.kubectl("delete", "pvc", "-n", h.namespace, "old")
	// As its provisioner does it (deleteVolumeOperation of its controller/controller.go): directory, then PersistentVolume, whose finalizers it leaves.
	must.Succeed(t, os.RemoveAll(directory))
	h.kubectl("delete", "pv", volume.Name, "--timeout=1m")
	// Its record stays, as upgrade.md says of the directory that it is in, and is in the way of the next case.
	must.Succeed(t, os.Remove(filepath.Join(filepath.Dir(directory), ".hostpath-provisioner", "volumes", volume.Name+".json")))
}
