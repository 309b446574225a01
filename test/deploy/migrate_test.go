package deploy_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

const (
	migrateDir       = "../../deploy/migrate"
	migrateNamespace = "hostpath-migrate"
)

func TestMigrationObjects(t *testing.T) {
	objs := manifest.Render(t, migrateDir)
	for _, o := range objs {
		k, ok := kinds[o.APIVersion+" "+o.Kind]
		if !ok {
			t.Fatalf("%s of %s is not expected here", o.Kind, o.APIVersion)
		}
		if err := k.decode(o.YAML); err != nil {
			t.Error(err)
		}
		if k.namespaced && o.Namespace != migrateNamespace {
			t.Errorf("%s is in namespace %q", o, o.Namespace)
		}
	}
	if ns := manifest.Only[corev1.Namespace](t, objs, "Namespace"); ns.Labels["pod-security.kubernetes.io/enforce"] != "privileged" {
		t.Errorf("the namespace has the labels %v", ns.Labels)
	}
}

func TestMigrationRights(t *testing.T) {
	objs := manifest.Render(t, migrateDir)
	want := map[right]bool{}
	for resource, verbs := range map[string][]string{
		"persistentvolumes":             {"get", "list", "create", "patch", "delete"},
		"persistentvolumeclaims":        {"get", "create", "delete"},
		"pods":                          {"list"},
		"nodes":                         {"list"},
		"storageclasses.storage.k8s.io": {"get"},
	} {
		for _, verb := range verbs {
			want[right{resource, verb, true}] = true
		}
	}
	if diff := cmp.Diff(want, rights(t, objs), cmp.AllowUnexported(right{})); diff != "" {
		t.Errorf("(- want, + got):\n%s", diff)
	}
}

// The plan that a pod writes into its log, and the commands in it, are for the driver that deploy/csi installs.
func TestMigrationIsForTheDriverAsItIsInstalled(t *testing.T) {
	pod := manifest.Only[appsv1.DaemonSet](t, manifest.Render(t, migrateDir), "DaemonSet").Spec.Template.Spec
	c := pod.Containers[0]
	want := corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"DAC_OVERRIDE"}}
	if diff := cmp.Diff(&want, c.SecurityContext.Capabilities); diff != "" || c.SecurityContext.Privileged != nil {
		t.Errorf("the security context is %+v:\n%s", c.SecurityContext, diff)
	}
	if !slices.Equal(c.Args, []string{"migrate", "--all", "--stay"}) {
		t.Errorf("it runs %q", c.Args)
	}
	driver := manifest.Only[appsv1.DaemonSet](t, manifest.Render(t, csiDir), "DaemonSet").Spec.Template.Spec
	host := func(pod corev1.PodSpec, container corev1.Container, path string) string {
		for _, m := range container.VolumeMounts {
			for _, v := range pod.Volumes {
				if m.MountPath == path && m.Name == v.Name && v.HostPath != nil {
					return v.HostPath.Path
				}
			}
		}
		return ""
	}
	for _, path := range []string{"/csi", "/var/hpvolumes"} {
		if got, want := host(pod, c, path), host(driver, driver.Containers[0], path); got == "" || got != want {
			t.Errorf("%s is %q of the host, in the driver %q", path, got, want)
		}
	}
	if host(pod, c, "/var/lib/hostpath-migrate") == "" {
		t.Error("what is saved does not stay on the node")
	}
	if !slices.Contains(c.Env, corev1.EnvVar{Name: "HOST_ROOT", Value: "/host"}) || host(pod, c, "/host") != "/" {
		t.Error("the paths of other pods cannot be looked up")
	}
}

// On OpenShift the pods get what is everywhere, and constraints that allow that and no more, for their account alone.
func TestMigrationConstraints_allowWhatThePodHas(t *testing.T) {
	objs := manifest.Render(t, migrateDir+"/openshift")
	scc := manifest.Only[securityContextConstraints](t, objs, "SecurityContextConstraints")
	pod := manifest.Only[appsv1.DaemonSet](t, objs, "DaemonSet").Spec.Template.Spec
	used := []string{"projected"} // the token
	for _, v := range pod.Volumes {
		used = append(used, volumeType(t, v))
	}
	slices.Sort(used)
	if diff := cmp.Diff(slices.Compact(used), scc.Volumes); diff != "" {
		t.Errorf("volumes (- used, + allowed):\n%s", diff)
	}
	var capabilities []string
	for _, c := range pod.Containers[0].SecurityContext.Capabilities.Add {
		capabilities = append(capabilities, string(c))
	}
	if diff := cmp.Diff(capabilities, scc.AllowedCapabilities); diff != "" {
		t.Errorf("capabilities (- used, + allowed):\n%s", diff)
	}
	if scc.AllowPrivilegedContainer || !scc.AllowHostDirVolumePlugin || scc.AllowHostNetwork || scc.AllowHostPID || !scc.ReadOnlyRootFilesystem || len(scc.Users)+len(scc.Groups) != 0 {
		t.Errorf("%+v", scc)
	}
	if rules := roles(t, objs)["Role hostpath-migrate-scc"]; len(rules) != 1 || !slices.Equal(rules[0].ResourceNames, []string{scc.Name}) {
		t.Errorf("the constraints that may be used: %v", rules)
	}
	for _, b := range bindings(t, objs) {
		if len(b.subjects) != 1 || b.subjects[0].Name != pod.ServiceAccountName || b.subjects[0].Namespace != migrateNamespace {
			t.Errorf("%s is for %v", b.name, b.subjects)
		}
	}
	if got, want := len(objs), len(manifest.Render(t, migrateDir))+5; got != want {
		t.Errorf("%d objects, want %d: those of every cluster, the constraints with their role and its binding, and the rights on owners with theirs", got, want)
	}
}
