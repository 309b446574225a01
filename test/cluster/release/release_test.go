// Package release_test tries a release as a new user does: from its files alone, on a clean cluster.
package release_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/cluster/progress"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

const (
	snapshotController = "../overlay/snapshot-controller"
	// busybox is the image of the example.
	busybox = "docker.io/library/busybox:1.37.0"
)

var (
	programs = flag.String("programs", "../../../bin/cluster", "directory with the programs of the cluster")
	files    = flag.String("release", "", "directory of the release")
	helm     = flag.String("helm", "", "the program helm")
	kubelet  = flag.String("kubelet", "", "directory of kubelet by another name than the usual one; only file and chart are tried")
	box      *sandbox.Sandbox
)

func TestMain(m *testing.M) {
	trap.Launch()
	box = sandbox.Enter()
	flag.Parse()
	os.Exit(m.Run())
}

// A way to install the product, and to remove it. Each line is one command that a user types in the directory of the release.
type way struct {
	name            string
	install, remove []string
	// change, also in lines, is what may be done while pods use volumes.
	change []string
	// refused says that the first command that removes it refuses while pods use volumes, and leaves everything as it is.
	refused bool
	// resume, in lines, is what has to be done after that, to change it again: Helm takes the release for one that is being uninstalled.
	resume []string
	// stays has what is left by one who removes what others installed, as kubectl names it: what the user had made before.
	stays []string
}

const (
	helmInstall = "helm install %[1]s %[1]s-%[2]s.tgz --namespace hostpath-provisioner"
	helmRemove  = "helm uninstall %s --namespace hostpath-provisioner --wait"
)

func ways(version string) []way {
	return []way{
		{
			name:    "file",
			install: []string{"kubectl apply -f namespace.yaml -f hostpath-csi-driver-snapshots.yaml"},
			remove:  []string{"kubectl delete -f hostpath-csi-driver-snapshots.yaml -f namespace.yaml"},
		},
		{
			name: "chart",
			install: []string{
				"kubectl apply -f namespace.yaml",
				fmt.Sprintf(helmInstall, "hostpath-csi-driver", version) + " --set snapshots.enabled=true",
			},
			change: []string{
				"helm test hostpath-csi-driver --namespace hostpath-provisioner --timeout 2m",
				fmt.Sprintf("helm upgrade hostpath-csi-driver hostpath-csi-driver-%s.tgz --namespace hostpath-provisioner --reuse-values --set logLevel=3 --set 'pools[0].name=local,pools[0].path=/var/hpvolumes,pools[1].name=plain,pools[1].path=/var/plain' --wait --timeout 3m", version),
				"kubectl hostpath pools | grep plain",
				"helm rollback hostpath-csi-driver 1 --namespace hostpath-provisioner --wait --timeout 3m",
			},
			remove: []string{fmt.Sprintf(helmRemove, "hostpath-csi-driver"), "kubectl delete -f namespace.yaml"},
		},
		{
			name: "operator",
			install: []string{
				"kubectl apply -f namespace.yaml -f hostpath-provisioner-operator.yaml",
				"kubectl apply -f hostpathprovisioner-snapshots.yaml",
			},
			remove:  []string{"kubectl hostpath uninstall --yes -f hostpath-provisioner-operator.yaml -f hostpathprovisioner-snapshots.yaml -f namespace.yaml", "kubectl delete -f namespace.yaml"},
			refused: true,
		},
		{
			name: "chart of the operator",
			install: []string{
				"kubectl apply -f namespace.yaml",
				fmt.Sprintf(helmInstall, "hostpath-provisioner-operator", version),
				"kubectl apply -f hostpathprovisioner-snapshots.yaml",
			},
			// The operator completes the webhooks, which Helm is to leave so.
			change: []string{
				"helm test hostpath-provisioner-operator --namespace hostpath-provisioner --timeout 2m",
				fmt.Sprintf("helm upgrade hostpath-provisioner-operator hostpath-provisioner-operator-%s.tgz --namespace hostpath-provisioner --reuse-values --set logLevel=3 --wait --timeout 3m", version),
				"helm rollback hostpath-provisioner-operator 1 --namespace hostpath-provisioner --wait --timeout 3m",
				"kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations -o jsonpath='{.items[*].webhooks[*].clientConfig.caBundle}' | grep -c '^[^ ]* [^ ]*$'",
				"kubectl wait hostpathprovisioner --all --for=condition=RolledOut --timeout=3m",
			},
			remove:  []string{fmt.Sprintf(helmRemove, "hostpath-provisioner-operator")},
			refused: true,
			resume:  []string{"helm rollback hostpath-provisioner-operator 3 --namespace hostpath-provisioner --wait --timeout 3m"},
			stays: []string{
				"namespace/hostpath-provisioner", "configmap/kube-root-ca.crt", "serviceaccount/default",
				"storageclass.storage.k8s.io/hostpath-csi", "volumesnapshotclass.snapshot.storage.k8s.io/hostpath-csi",
			},
		},
	}
}

// waysElsewhere are those of docs/install.md for another directory of kubelet.
func waysElsewhere(version string) []way {
	file, chart := ways(version)[0], ways(version)[1]
	file.install = []string{"sed 's|/var/lib/kubelet|" + *kubelet + "|g' hostpath-csi-driver-snapshots.yaml | kubectl apply -f namespace.yaml -f -"}
	chart.install[1] += " --set kubeletDirectory=" + *kubelet
	return []way{file, chart}
}

// A trial is a clean cluster with a shell in the directory of the release.
type trial struct {
	*cluster.Cluster
	release string
	typed   int // commands of the user
}

func TestRelease(t *testing.T) {
	l := begin(t)
	charts, err := filepath.Glob(filepath.Join(l.release, "hostpath-csi-driver-*.tgz"))
	must.Succeed(t, err)
	if len(charts) != 1 {
		t.Fatalf("there are the charts %q", charts)
	}
	version := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(charts[0]), "hostpath-csi-driver-"), ".tgz")
	all := append(ways(version), asHCO(t, l))
	if *kubelet != "" {
		all = waysElsewhere(version)
	}
	for _, w := range all {
		t.Run(w.name, func(t *testing.T) { l.try(t, w) })
	}
}

// begin starts the cluster, with what the README wants of it: the images on its nodes, and what snapshots need.
func begin(t *testing.T) *trial {
	t.Helper()
	dir, err := filepath.Abs(*files)
	must.Succeed(t, err)
	tools, err := filepath.Abs(*programs)
	must.Succeed(t, err)
	c, err := cluster.Up(t.Context(), cluster.Options{
		Sandbox:  box,
		Programs: tools,
		Logs:     filepath.Join(tools, "logs"),
		Nodes:    []string{"node-a", "node-b"},
		Kubelet:  *kubelet,
		Pools:    cluster.Pools("btrfs"),
		Log:      progress.New(os.Stdout),
	})
	t.Cleanup(func() {
		if t.Failed() {
			c.Summarize(context.Background(), os.Stdout)
		}
	})
	must.Succeed(t, err)
	l := &trial{Cluster: c, release: dir}
	l.importImages(t)
	must.Succeed(t, c.InstallSnapshotController(t.Context(), snapshotController))
	return l
}

// sidecars are images of other projects, with digests if those are known.
var sidecars = regexp.MustCompile(`registry\.k8s\.io/sig-storage/([a-z-]+):v[0-9.]+(@sha256:[0-9a-f]{64})?`)

// importImages gives the nodes the archives of the release, and the stand-ins of what others publish under the names that the release
// has for it.
func (l *trial) importImages(t *testing.T) {
	t.Helper()
	archives, err := filepath.Glob(filepath.Join(l.release, "*.oci.tar"))
	must.Succeed(t, err)
	if len(archives) == 0 {
		t.Fatalf("no images in %s", l.release)
	}
	tags := map[string]string{busybox: cluster.Shell}
	standIn := map[string]string{
		"csi-node-driver-registrar": "node-driver-registrar", "csi-external-health-monitor-controller": "health-monitor",
	}
	documents, err := filepath.Glob(filepath.Join(l.release, "*.yaml"))
	must.Succeed(t, err)
	for _, document := range documents {
		text, err := os.ReadFile(document)
		must.Succeed(t, err)
		for _, found := range sidecars.FindAllStringSubmatch(string(text), -1) {
			name, digest := found[1], found[2]
			has := "localhost/" + name + ":test"
			if other, ok := standIn[name]; ok {
				has = "localhost/" + other + ":test"
			}
			tags[strings.TrimSuffix(found[0], digest)] = has
			if digest != "" { // by which alone the container runtime looks for it
				tags["registry.k8s.io/sig-storage/"+name+digest] = has
			}
		}
	}
	for _, n := range l.Nodes {
		for _, archive := range archives {
			must.Succeed(t, n.Import(t.Context(), archive))
		}
		for name, has := range tags {
			must.Succeed(t, n.Tag(t.Context(), has, name))
		}
	}
}

// shell runs what a person types in the directory of the release, and returns what it prints.
func (l *trial) shell(t *testing.T, script string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = l.release
	cmd.Env = append(os.Environ(), "KUBECONFIG="+l.Kubeconfig, "PATH="+l.Programs+":"+filepath.Dir(*helm)+":"+os.Getenv("PATH"),
		"HELM_CACHE_HOME="+l.Sandbox.Dir, "HELM_CONFIG_HOME="+l.Sandbox.Dir, "HELM_DATA_HOME="+l.Sandbox.Dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return string(out)
}

// typeIn counts what it runs.
func (l *trial) typeIn(t *testing.T, script string) string {
	t.Helper()
	l.Log.Printf("%s", script)
	l.typed++
	return l.shell(t, script)
}

const (
	example = "hostpath-csi-example"
	// restored is what docs/snapshots.md shows, of the claim and pod of the example.
	snapshot = `apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: trial}
spec:
  volumeSnapshotClassName: hostpath-csi
  source: {persistentVolumeClaimName: hostpath-csi-example}`
	restored = `apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: restored}
spec:
  storageClassName: hostpath-csi
  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: trial}
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 1Gi}}
---
apiVersion: v1
kind: Pod
metadata: {name: restored}
spec:
  nodeSelector: {kubernetes.io/hostname: %s}
  containers:
  - name: reader
    image: docker.io/library/busybox:1.37.0
    command: [sleep, infinity]
    volumeMounts: [{name: data, mountPath: /data}]
  terminationGracePeriodSeconds: 1
  volumes: [{name: data, persistentVolumeClaim: {claimName: restored}}]`
)

func (l *trial) try(t *testing.T, w way) {
	before := l.objects(t)
	l.typed = 0
	start := time.Now()
	for _, command := range w.install {
		l.typeIn(t, command)
	}
	l.typeIn(t, "kubectl apply -f example.yaml")
	l.shell(t, "kubectl wait --for=condition=Ready --timeout=5m pod/"+example)
	bound := time.Since(start)
	starts := l.shell(t, "kubectl exec "+example+" -- cat /data/starts")
	if strings.Count(starts, "\n") != 1 {
		t.Errorf("the pod wrote %q, want one line", starts)
	}

	l.typeIn(t, "kubectl apply -f - <<'EOF'\n"+snapshot+"\nEOF")
	l.shell(t, "kubectl wait --for=jsonpath='{.status.readyToUse}'=true --timeout=2m volumesnapshot/trial")
	node := l.shell(t, "kubectl get pod "+example+" -o jsonpath='{.spec.nodeName}'")
	l.typeIn(t, "kubectl apply -f - <<'EOF'\n"+fmt.Sprintf(restored, node)+"\nEOF")
	l.shell(t, "kubectl wait --for=condition=Ready --timeout=5m pod/restored")
	if got := l.shell(t, "kubectl exec restored -- cat /data/starts"); got != starts {
		t.Errorf("the restore has %q, want %q", got, starts)
	}
	l.Log.Printf("%s: a pod writes after %.0f s, its snapshot is restored after %.0f s, with %d commands",
		w.name, bound.Seconds(), time.Since(start).Seconds(), l.typed)

	pods := l.uids(t)
	for _, command := range w.change {
		l.typeIn(t, command)
	}
	if got := l.uids(t); !maps.Equal(got, pods) {
		t.Errorf("the pods were %v and are %v", pods, got)
	}
	if got := l.shell(t, "kubectl exec "+example+" -- sh -c 'cat /data/starts && echo more >/data/more'"); got != starts {
		t.Errorf("the pod reads %q, want %q", got, starts)
	}

	if w.refused {
		l.wantRefused(t, w, example, pods)
	}
	l.shell(t, "kubectl delete pod/restored pvc/restored volumesnapshot/trial --timeout=2m")
	l.shell(t, "kubectl delete -f example.yaml --timeout=2m")
	must.Succeed(t, l.Log.Until(t.Context(), 2*time.Minute, "the volumes to be removed", l.volumes))
	for _, command := range w.remove {
		l.typeIn(t, command)
	}
	l.wantNothingLeft(t, before, w.stays)
	if len(w.stays) > 0 {
		// What is left is no obstacle to the next installation.
		for _, command := range slices.Concat(w.install, w.remove) {
			l.typeIn(t, command)
		}
		l.wantNothingLeft(t, before, w.stays)
		l.shell(t, "kubectl delete storageclass/hostpath-csi volumesnapshotclass/hostpath-csi namespace/hostpath-provisioner")
		l.wantNothingLeft(t, before, nil)
	}
}

// wantRefused removes while pods use volumes: that names them, and changes nothing.
func (l *trial) wantRefused(t *testing.T, w way, pod string, pods map[string]string) {
	t.Helper()
	must.Succeed(t, l.Log.Until(t.Context(), 2*time.Minute, "replaced pods to be gone", l.ending))
	was := l.objects(t)
	command := w.remove[0]
	if said := l.shell(t, command+" 2>&1 && echo removed"+" || true"); strings.HasSuffix(said, "removed\n") || !strings.Contains(said, "nothing was removed, because this is in use: pod default/"+pod) {
		t.Fatalf("%s: %s", command, said)
	}
	is := l.objects(t)
	for _, name := range was {
		if !slices.Contains(is, name) {
			t.Errorf("%s is not there any more", name)
		}
	}
	l.shell(t, "kubectl wait hostpathprovisioner --all --for=condition=Available --timeout=1m")
	if got := l.uids(t); !maps.Equal(got, pods) {
		t.Errorf("the pods were %v and are %v", pods, got)
	}
	for _, command := range slices.Concat(w.resume, w.change) {
		l.typeIn(t, command)
	}
}

// ending says which pods of the product are being deleted.
func (l *trial) ending(ctx context.Context) (string, error) {
	pods, err := l.Client.CoreV1().Pods("hostpath-provisioner").List(ctx, metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	var names []string
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp != nil {
			names = append(names, pod.Name)
		}
	}
	return strings.Join(names, " "), nil
}

// volumes says which volumes there are.
func (l *trial) volumes(ctx context.Context) (string, error) {
	return l.Kubectl(ctx, "get", "persistentvolumes", "--output=name")
}

// uids are those of the user's pods that run.
func (l *trial) uids(t *testing.T) map[string]string {
	t.Helper()
	pods, err := l.Client.CoreV1().Pods(corev1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
	must.Succeed(t, err)
	running := map[string]string{}
	for _, pod := range pods.Items {
		if cluster.State(pod) == "" {
			running[pod.Name] = string(pod.UID)
		}
	}
	return running
}

// objects are all of the cluster, but for those that come and go by themselves.
func (l *trial) objects(t *testing.T) []string {
	t.Helper()
	kinds := l.shell(t, "kubectl api-resources --verbs=list,delete --output=name | grep -vE '^(events|leases|endpoints|componentstatuses)' | paste -sd,")
	names := strings.Fields(l.shell(t, "kubectl get --all-namespaces --output=name "+strings.TrimSpace(kinds)))
	slices.Sort(names)
	return names
}

// wantNothingLeft waits for what Kubernetes removes in the background.
func (l *trial) wantNothingLeft(t *testing.T, before, stays []string) {
	t.Helper()
	must.Succeed(t, l.Log.Until(t.Context(), 2*time.Minute, "nothing to be left", func(context.Context) (string, error) {
		var left []string
		for _, name := range l.objects(t) {
			if !slices.Contains(before, name) && !slices.Contains(stays, name) {
				left = append(left, name)
			}
		}
		return strings.Join(left, " "), nil
	}))
	for name, n := range l.Nodes {
		for _, pool := range []string{"/var/hpvolumes", "/var/hpvolumes/csi"} {
			// The pool itself stays, with no volume in it.
			found, err := filepath.Glob(filepath.Join(n.Disk(pool), "pvc-*"))
			must.Succeed(t, err)
			if len(found) > 0 {
				t.Errorf("on the disk of %s are %q", name, found)
			}
		}
	}
}
