package deploy_test

import (
	"reflect"
	"slices"
	"strings"
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

// The constraints allow what the pod has, to its account alone, and no more.
func TestConstraintsAllowWhatThePodHas(t *testing.T) {
	for _, p := range programs {
		t.Run(p.dir, func(t *testing.T) {
			objs := manifest.Render(t, deployDir+p.dir+"/openshift")
			scc, pod := manifest.Only[securityContextConstraints](t, objs, "SecurityContextConstraints"), podOf(t, objs)
			used, privileged, profiles := []string{"projected"}, false, []string{} // the token
			for _, v := range pod.Volumes {
				used = append(used, volumeType(t, v))
			}
			capabilities := []string{}
			for _, c := range pod.Containers {
				of := accessOf(t, pod, c)
				privileged, capabilities = privileged || of.privileged, append(capabilities, strings.Fields(of.capabilities)...)
				if !of.privileged {
					profiles = []string{"runtime/default"}
				}
			}
			slices.Sort(used)
			for what, c := range map[string][2]any{
				"volumes":      {slices.Compact(used), slices.Sorted(slices.Values(scc.Volumes))},
				"capabilities": {capabilities, append(append([]string{}, scc.AllowedCapabilities...), scc.DefaultAddCapabilities...)},
				"profiles":     {profiles, scc.SeccompProfiles},
				"privileged, PID, network, IPC, ports, read-only": {
					[]bool{privileged, pod.HostPID, false, false, false, true},
					[]bool{scc.AllowPrivilegedContainer, scc.AllowHostPID, scc.AllowHostNetwork, scc.AllowHostIPC, scc.AllowHostPorts, scc.ReadOnlyRootFilesystem},
				},
				"accounts": {0, len(scc.Users) + len(scc.Groups)},
				"strategies": {[]bool{true, true, true, true, true}, []bool{scc.AllowHostDirVolumePlugin, scc.RunAsUser.Type == "RunAsAny", scc.SELinuxContext.Type == "RunAsAny",
					scc.FSGroup.Type != "", scc.SupplementalGroups.Type != ""}},
			} {
				if diff := cmp.Diff(c[0], c[1]); diff != "" {
					t.Errorf("%s (- of the pod, + allowed):\n%s", what, diff)
				}
			}
			want := []rbacv1.PolicyRule{{APIGroups: []string{"security.openshift.io"}, Resources: []string{"securitycontextconstraints"}, ResourceNames: []string{scc.Name}, Verbs: []string{"use"}}}
			// TestOpenShiftAddsOnlyConstraints has that it is one role.
			for name, rules := range roles(t, objs) {
				if strings.HasSuffix(name, "-scc") && !cmp.Equal(want, rules) {
					t.Errorf("%s: %s", name, cmp.Diff(want, rules))
				}
			}
		})
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

// OpenShift gets what every cluster gets, and the constraints with their role and its binding; the migration also the rights on owners.
func TestOpenShiftAddsOnlyConstraints(t *testing.T) {
	for dir, adds := range map[string]int{"csi": 3, "devices": 3, "provisioner": 3, "single-node": 3, "migrate": 5} {
		was, is := byName(manifest.Render(t, deployDir+dir)), byName(manifest.Render(t, deployDir+dir+"/openshift"))
		for name, text := range was {
			if is[name] != text {
				t.Errorf("%s (- elsewhere, + on OpenShift):\n%s", name, cmp.Diff(text, is[name]))
			}
		}
		if added := len(is) - len(was); added != adds {
			t.Errorf("%s: %d objects are added, want %d", dir, added, adds)
		}
	}
}
