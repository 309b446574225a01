package cases_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster"
)

// A cluster of the upstream operator is taken over in place: the same objects, with what only the upstream one wanted
// removed from them, and the same volumes, in pods that go on. Neither a second driver nor a second DaemonSet appears.
func TestOperatorAdoptsUpstreamCluster(t *testing.T) {
	s := begin(t)
	client := s.withOperator()
	ctx := t.Context()
	scale := func(replicas string) {
		if out, err := c.Kubectl(ctx, "-n", cluster.Namespace, "scale", "deployment", "hostpath-provisioner-operator", "--replicas="+replicas); err != nil {
			t.Fatal(out, err)
		}
	}
	scale("0")
	// The name of the upstream operator's field manager is the same as ours, but for the operation.
	if out, err := c.Kubectl(ctx, "create", "--field-manager=hostpath-provisioner-operator", "-f", "testdata/upstream-objects.yaml"); err != nil {
		t.Fatal(out, err)
	}
	set := func() (uid, revision string) {
		got, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return string(got.UID), fmt.Sprint(got.Generation)
	}
	uid, _ := set()
	s.claim("data", "64Mi", ofClass(operatorClass))
	s.pod("running", with("data", "/data"))
	s.ready("running")
	s.mustRun("running", "echo before >/data/file; sync")
	volume := s.volume("data")
	file := filepath.Join(s.disk(volume), "file")
	s.wantFile(file, "before\n")

	if _, err := client.Create(ctx, provisioner(t, "earlier", onePool("")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.removeProvisioner("earlier") })
	scale("1")
	s.condition(client, "earlier", "Available", "True")

	if now, _ := set(); now != uid {
		t.Error("the DaemonSet is another one")
	}
	got, err := c.Client.AppsV1().DaemonSets(cluster.Namespace).Get(ctx, operatorDaemonSet, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, container := range got.Spec.Template.Spec.Containers {
		names = append(names, container.Name)
	}
	slices.Sort(names)
	if want := "csi-provisioner csi-resizer driver health-monitor livenessprobe node-driver-registrar"; strings.Join(names, " ") != want {
		t.Errorf("the containers are %q, want %q", names, want)
	}
	for _, v := range got.Spec.Template.Spec.Volumes {
		if strings.HasSuffix(v.Name, "-dir") {
			t.Errorf("the volume %s of the upstream operator is still there", v.Name)
		}
	}
	for _, kind := range []string{"daemonset", "clusterrole", "csidriver", "serviceaccount"} {
		out, err := c.Kubectl(ctx, "get", "-n", cluster.Namespace, kind, "-l", "k8s-app=hostpath-provisioner", "-o", "yaml")
		if err != nil || strings.Contains(out, "lastAppliedConfiguration") {
			t.Errorf("the annotation of the upstream operator is still on a %s (%v)", kind, err)
		}
	}
	role, err := c.Client.RbacV1().ClusterRoles().Get(ctx, "hostpath-provisioner-admin-csi", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, rule := range role.Rules {
		if slices.Contains(rule.Resources, "nodes") {
			t.Error("a right that only the upstream operator gave is still there")
		}
	}

	// The pod goes on with its volume, and gives it back.
	if got := s.mustRun("running", "echo after >>/data/file; cat /data/file"); got != "before\nafter\n" {
		t.Errorf("the pod reads %q", got)
	}
	pod, err := c.Client.CoreV1().Pods(s.namespace).Get(ctx, "running", metav1.GetOptions{})
	if err != nil || pod.Status.ContainerStatuses[0].RestartCount > 0 {
		t.Errorf("the pod was restarted %v times (%v)", pod.Status.ContainerStatuses, err)
	}
	s.remove("running")
	s.pod("next", with("data", "/data"))
	s.ready("next")
	if got := s.mustRun("next", "cat /data/file"); got != "before\nafter\n" {
		t.Errorf("the next pod reads %q", got)
	}
	s.remove("next")
	s.removeClaim("data")
	s.until("the volume to be gone", func(context.Context) (string, error) {
		found, err := filepath.Glob(filepath.Dir(file))
		return strings.Join(found, ""), err
	})
}
