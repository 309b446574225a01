package deploy_test

import (
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// securityContextConstraints are the fields of security.openshift.io/v1 that
// are of use here.
type securityContextConstraints struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`

	AllowHostDirVolumePlugin bool     `json:"allowHostDirVolumePlugin"`
	AllowHostIPC             bool     `json:"allowHostIPC"`
	AllowHostNetwork         bool     `json:"allowHostNetwork"`
	AllowHostPID             bool     `json:"allowHostPID"`
	AllowHostPorts           bool     `json:"allowHostPorts"`
	AllowPrivilegeEscalation *bool    `json:"allowPrivilegeEscalation"`
	AllowPrivilegedContainer bool     `json:"allowPrivilegedContainer"`
	AllowedCapabilities      []string `json:"allowedCapabilities"`
	DefaultAddCapabilities   []string `json:"defaultAddCapabilities"`
	RequiredDropCapabilities []string `json:"requiredDropCapabilities"`
	ReadOnlyRootFilesystem   bool     `json:"readOnlyRootFilesystem"`
	FSGroup                  strategy `json:"fsGroup"`
	RunAsUser                strategy `json:"runAsUser"`
	SELinuxContext           strategy `json:"seLinuxContext"`
	SupplementalGroups       strategy `json:"supplementalGroups"`
	SeccompProfiles          []string `json:"seccompProfiles"`
	Volumes                  []string `json:"volumes"`
	Users                    []string `json:"users"`
	Groups                   []string `json:"groups"`
}

type strategy struct {
	Type string `json:"type"`
}

func TestSecurityContextConstraints(t *testing.T) {
	scc := manifest.Only[securityContextConstraints](t, manifest.Render(t, openshiftDir), "SecurityContextConstraints")
	tests := []struct {
		name string
		ok   bool
	}{
		{"let the driver be privileged", scc.AllowPrivilegedContainer && ptr(scc.AllowPrivilegeEscalation)},
		{"let the pod mount directories of the host", scc.AllowHostDirVolumePlugin},
		{"keep the pod out of the host's network", !scc.AllowHostNetwork && !scc.AllowHostPorts},
		{"keep the pod out of the host's processes", !scc.AllowHostPID && !scc.AllowHostIPC},
		{"let no container write to its root filesystem", scc.ReadOnlyRootFilesystem},
		{"let no container add a capability", len(scc.AllowedCapabilities)+len(scc.DefaultAddCapabilities) == 0},
		{"let the sidecars be root", scc.RunAsUser.Type == "RunAsAny"},
		{"let the sidecars be spc_t", scc.SELinuxContext.Type == "RunAsAny"},
		{"say something on groups, as they must", scc.FSGroup.Type != "" && scc.SupplementalGroups.Type != ""},
		{"let the sidecars be filtered by the runtime, and none be unconfined",
			slices.Equal(scc.SeccompProfiles, []string{"runtime/default"})},
		{"are given only by a role", len(scc.Users)+len(scc.Groups) == 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !tt.ok {
				t.Errorf("%+v", scc)
			}
		})
	}
}

func TestConstraintsAllowOnlyPodVolumes(t *testing.T) {
	objs := manifest.Render(t, openshiftDir)
	scc := manifest.Only[securityContextConstraints](t, objs, "SecurityContextConstraints")
	var used []string
	for _, v := range daemonSet(t, objs).Spec.Template.Spec.Volumes {
		used = append(used, volumeType(t, v))
	}
	slices.Sort(used)
	used = slices.Compact(used)
	allowed := slices.Sorted(slices.Values(scc.Volumes))
	if !slices.Equal(used, allowed) {
		t.Errorf("the pod uses %q, allowed are %q", used, allowed)
	}
}

// volumeType is the name of the one source that a volume has.
func volumeType(t *testing.T, v corev1.Volume) string {
	t.Helper()
	source := reflect.ValueOf(v.VolumeSource)
	for i := range source.NumField() {
		if !source.Field(i).IsNil() {
			name := source.Type().Field(i).Name
			return string(name[0]|0x20) + name[1:]
		}
	}
	t.Fatalf("the volume %s has no source", v.Name)
	return ""
}

// OpenShift gets what every cluster gets, and the constraints, and no more.
func TestOpenShiftAddsOnlyConstraints(t *testing.T) {
	plain := map[string]string{}
	for _, o := range manifest.Render(t, csiDir) {
		plain[o.String()] = string(o.YAML)
	}
	var added []string
	for _, o := range manifest.Render(t, openshiftDir) {
		was, ok := plain[o.String()]
		if !ok {
			added = append(added, o.String())
		} else if diff := cmp.Diff(was, string(o.YAML)); diff != "" {
			t.Errorf("%s (- elsewhere, + on OpenShift):\n%s", o, diff)
		}
		delete(plain, o.String())
	}
	for o := range plain {
		t.Errorf("%s is missing on OpenShift", o)
	}
	want := []string{
		"Role hostpath-csi-scc",
		"RoleBinding hostpath-csi-scc",
		"SecurityContextConstraints hostpath-csi-driver",
	}
	if slices.Sort(added); !slices.Equal(added, want) {
		t.Errorf("added are %q, want %q", added, want)
	}
}

func TestRoleAllowsOnlyOwnConstraints(t *testing.T) {
	objs := manifest.Render(t, openshiftDir)
	scc := manifest.Only[securityContextConstraints](t, objs, "SecurityContextConstraints")
	want := []rbacv1.PolicyRule{{
		APIGroups:     []string{"security.openshift.io"},
		Resources:     []string{"securitycontextconstraints"},
		ResourceNames: []string{scc.Name},
		Verbs:         []string{"use"},
	}}
	if diff := cmp.Diff(want, roles(t, objs)["Role hostpath-csi-scc"]); diff != "" {
		t.Errorf("(- want, + got):\n%s", diff)
	}
}

// OpenShift's default node selector would keep the driver off some nodes.
func TestNamespaceOverridesDefaultNodeSelector(t *testing.T) {
	ns := manifest.Only[corev1.Namespace](t, manifest.Render(t, csiDir+"/namespace"), "Namespace")
	if got, ok := ns.Annotations["openshift.io/node-selector"]; !ok || got != "" {
		t.Errorf("the node selector of the namespace is %q (set: %t)", got, ok)
	}
}
