package deploy_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const snapshotter = "csi-snapshotter"

// A volumeSnapshotClass is one as external-snapshotter v8 has it, with the fields used here.
type volumeSnapshotClass struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`

	Driver         string            `json:"driver"`
	DeletionPolicy string            `json:"deletionPolicy"`
	Parameters     map[string]string `json:"parameters"`
}

func TestSnapshotsComponent(t *testing.T) {
	for _, resource := range []string{"$csi", "$csi/openshift"} {
		t.Run(resource, func(t *testing.T) {
			without := manifest.Render(t, strings.Replace(resource, "$csi", csiDir, 1))
			with := overlay(t, map[string]string{"kustomization.yaml": `
resources: [` + resource + `]
components: [$csi/snapshots]
`})
			added := slices.DeleteFunc(slices.Collect(named(with, nil)), func(name string) bool {
				return slices.Contains(slices.Collect(named(without, nil)), name)
			})
			want := []string{
				"ClusterRole hostpath-csi-provisioner-snapshots", "ClusterRole hostpath-csi-snapshotter",
				"ClusterRoleBinding hostpath-csi-provisioner-snapshots", "ClusterRoleBinding hostpath-csi-snapshotter",
				"VolumeSnapshotClass hostpath-csi",
			}
			if slices.Sort(added); !slices.Equal(added, want) {
				t.Errorf("it adds %q, want %q", added, want)
			}
			for _, b := range bindings(t, with) {
				if _, ok := roles(t, with)[b.ref.Kind+" "+b.ref.Name]; !ok || b.subjects[0].Namespace != namespace {
					t.Errorf("%s binds %v to %v", b.name, b.ref, b.subjects)
				}
			}
			wantSnapshotter(t, with)
			for _, class := range manifest.All[volumeSnapshotClass](t, with, "VolumeSnapshotClass") {
				if class.Driver != driverName || class.DeletionPolicy != "Delete" || class.Parameters["consistency"] != "verify" {
					t.Errorf("the class is %+v", class)
				}
			}
		})
	}
}

// wantSnapshotter expects the sidecar to have what the others have, and to make the snapshots of
// its own node.
func wantSnapshotter(t *testing.T, objs manifest.Objects) {
	t.Helper()
	pod := daemonSet(t, objs).Spec.Template.Spec
	// Users' own patches name containers by their number, and kubectl shows the logs of the first.
	if first, last := pod.Containers[0].Name, pod.Containers[len(pod.Containers)-1].Name; first != "driver" || last != snapshotter {
		t.Errorf("the containers begin with %s and end with %s", first, last)
	}
	c, other := container(t, pod, snapshotter), container(t, pod, "csi-provisioner")
	args := argsOf(c)
	if _, given := args["node-deployment"]; !given || args["csi-address"] != argsOf(other)["csi-address"] {
		t.Errorf("its arguments are %v", args)
	}
	for _, flag := range []string{"leader-election", "enable-volume-group-snapshots"} {
		if value, given := args[flag]; given && value != "false" {
			t.Errorf("it has --%s=%s", flag, value)
		}
	}
	if !slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "NODE_NAME" && e.ValueFrom != nil }) {
		t.Error("it does not know its node")
	}
	if !strings.Contains(c.Image, ":v") {
		t.Errorf("its image is %s", c.Image)
	}
	if diff := cmp.Diff(other.SecurityContext, c.SecurityContext); diff != "" {
		t.Errorf("its security context is not that of the other sidecars (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(other.VolumeMounts, c.VolumeMounts); diff != "" {
		t.Errorf("its mounts are not those of the other sidecars (-want +got):\n%s", diff)
	}
}

// The freezer is the driver's program in a container without any capability, which alone sees the
// control groups of the node.
func TestFreezeComponent(t *testing.T) {
	objs := overlay(t, map[string]string{"kustomization.yaml": `
resources: [$csi]
components: [$csi/snapshots, $csi/freeze]
`})
	pod := daemonSet(t, objs).Spec.Template.Spec
	if first := pod.Containers[0].Name; first != driver {
		t.Errorf("the first container is %s", first)
	}
	c, of := container(t, pod, "freezer"), container(t, pod, driver)
	if c.Image != of.Image || c.Args[0] != "freezer" {
		t.Errorf("it runs %s %q, the driver is %s", c.Image, c.Args, of.Image)
	}
	if diff := cmp.Diff(container(t, pod, snapshotter).SecurityContext, c.SecurityContext); diff != "" {
		t.Errorf("its rights (- csi-snapshotter, + freezer)\n%s", diff)
	}
	for _, other := range pod.Containers {
		for _, m := range other.VolumeMounts {
			v, _ := volume(pod, m.Name)
			if v.HostPath != nil && strings.HasPrefix(v.HostPath.Path, "/sys/fs/cgroup") && (other.Name != "freezer" || m.ReadOnly || m.MountPath != argsOf(c)["cgroups"]) {
				t.Errorf("%s mounts %s at %s, read-only: %v", other.Name, v.HostPath.Path, m.MountPath, m.ReadOnly)
			}
		}
	}
	if got := argsOf(c)["socket"]; got != "/csi/freezer.sock" || argsOf(of)["endpoint"] != "unix:///csi/csi.sock" {
		t.Errorf("it serves at %s, the driver at %s", got, argsOf(of)["endpoint"])
	}
}
