package localpv

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var config = devices.Config{StorageClass: "local-storage", VolumeMode: devices.Filesystem, FSType: "xfs", DeviceDir: "/dev/disk/by-path",
	Filter: regexp.MustCompile("^pci"), Wipe: devices.WipeSignatures}

func volume() *corev1.PersistentVolume {
	node := nodeMetadata("n1")
	node.UID, node.Labels = "uid", map[string]string{corev1.LabelHostname: "n1.example.com"}
	return newVolume(node, config, devices.Offer{Name: "local-n1-pci-0", Path: "/dev/disk/by-path/pci-0", Bytes: 1<<30 + 512})
}

// What users' tools read of a volume: createPV of controllers/device_detector.go in local-pv-provisioner 0.5.3 of cybozu/neco-containers. What it
// does not have of upstream's is blockOwnerDeletion, for which OpenShift wants a right to nodes.
func TestVolumeIsCompatibleWithUpstream(t *testing.T) {
	const want = `
metadata:
  name: local-n1-pci-0
  labels:
    local-pv-provisioner.cybozu.com/node: n1
    local-pv-provisioner.cybozu.io/node: n1
  annotations:
    local-pv-provisioner.cybozu.io/device-identity: ""
    local-pv-provisioner.cybozu.io/deviceDir: /dev/disk/by-path
    local-pv-provisioner.cybozu.io/deviceNameFilter: ^pci
    local-pv-provisioner.cybozu.io/fsType: xfs
    local-pv-provisioner.cybozu.io/storageClassName: local-storage
    local-pv-provisioner.cybozu.io/volumeMode: Filesystem
  ownerReferences:
  - {apiVersion: v1, kind: Node, name: n1, uid: uid, controller: true}
spec:
  accessModes: [ReadWriteOnce]
  capacity: {storage: "1073742336"}
  local: {path: /dev/disk/by-path/pci-0, fsType: xfs}
  nodeAffinity:
    required:
      nodeSelectorTerms:
      - matchExpressions:
        - {key: kubernetes.io/hostname, operator: In, values: [n1.example.com]}
  persistentVolumeReclaimPolicy: Retain
  storageClassName: local-storage
  volumeMode: Filesystem
`
	var expected corev1.PersistentVolume
	must.Succeed(t, yaml.UnmarshalStrict([]byte(want), &expected))
	if diff := cmp.Diff(expected, *volume()); diff != "" {
		t.Error(diff)
	}
}

func TestVolumeOfOtherConfiguration(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*corev1.PersistentVolume)
		want   string
	}{
		"the same": {func(*corev1.PersistentVolume) {}, ""},
		"without the annotations that early versions did not write": {func(pv *corev1.PersistentVolume) {
			delete(pv.Annotations, prefix+devices.KeyStorageClass)
		}, ""},
		"of another class, which early versions did not write": {func(pv *corev1.PersistentVolume) {
			delete(pv.Annotations, prefix+devices.KeyStorageClass)
			pv.Spec.StorageClassName = "fast"
		}, `storageClassName "fast"`},
		"of another directory": {func(pv *corev1.PersistentVolume) { pv.Annotations[prefix+devices.KeyDeviceDir] = "/dev" }, `deviceDir "/dev"`},
		"of an unknown filter": {func(pv *corev1.PersistentVolume) { delete(pv.Annotations, prefix+devices.KeyFilter) }, `deviceNameFilter ""`},
	} {
		t.Run(name, func(t *testing.T) {
			pv := volume()
			c.change(pv)
			found := strings.Join(conflicts([]corev1.PersistentVolume{*pv}, config), "; ")
			if (c.want == "") != (found == "") || !strings.Contains(found, c.want) {
				t.Errorf("conflicts %q, want %q", found, c.want)
			}
		})
	}
}

func TestVolumeOf(t *testing.T) {
	pv := volume()
	pv.UID = "uid"
	want := devices.Volume{Name: pv.Name, UID: "uid", Path: pv.Spec.Local.Path, Bytes: 1<<30 + 512, Unidentified: true}
	check := func(want devices.Volume) {
		t.Helper()
		if got, ok := volumeOf(pv); !ok || got != want {
			t.Errorf("volume %+v, %v; want %+v", got, ok, want)
		}
	}
	check(want)
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "claim"}
	want.Claim, want.ClaimUID, want.Used = "default/data", "claim", true
	check(want) // whatever its phase is still
	pv.Status.Phase, want.Bound = corev1.VolumeBound, true
	check(want)
	pv.Status.Phase = corev1.VolumeReleased
	want.Used, want.Bound, want.Released = false, false, true
	check(want)
	pv.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{}
	if _, ok := volumeOf(pv); ok {
		t.Error("a volume that is not local is taken")
	}
}

// The way of cleaning is a promise to the users of a volume. The default is not written, so that the object is as upstream
// makes it.
func TestVolumeHasItsWayOfCleaning(t *testing.T) {
	c := config
	c.Wipe = devices.WipeZero
	pv := newVolume(nodeMetadata("n1"), c, devices.Offer{})
	if v, _ := volumeOf(pv); v.Wipe != devices.WipeZero {
		t.Errorf("it is %+v", v)
	}
	pv.Annotations[prefix+devices.KeyWipe] = "thoroughly"
	if v, _ := volumeOf(pv); v.Wipe != "" {
		t.Errorf("with an unknown one it is %+v", v)
	}
	if v, _ := volumeOf(volume()); v.Wipe != "" {
		t.Errorf("with the default it is %+v", v)
	}
}

func TestProblemsOfOneReasonAreOneEvent(t *testing.T) {
	r := newReports()
	node := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	r.add(node, "DeviceMounted", "a")
	r.add(node, "DeviceMounted", "b")
	if text := r.texts["event n1 DeviceMounted"]; text != "a; b" || len(r.texts) != 1 {
		t.Errorf("reports %v", r.texts)
	}
}

// Volumes that others have made count if they may be on the node.
func TestVolumeForNode(t *testing.T) {
	node := nodeMetadata("n1")
	node.Labels = map[string]string{corev1.LabelHostname: "n1.example.com", "zone": "a"}
	expression := func(key string, operator corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: operator, Values: values}}}
	}
	field := func(name string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{name}}}}
	}
	both := expression("zone", corev1.NodeSelectorOpIn, "a")
	both.MatchExpressions = append(both.MatchExpressions, expression(corev1.LabelHostname, corev1.NodeSelectorOpIn, "n2").MatchExpressions...)
	for name, c := range map[string]struct {
		terms []corev1.NodeSelectorTerm
		want  bool
	}{
		"its host":                  {[]corev1.NodeSelectorTerm{expression(corev1.LabelHostname, corev1.NodeSelectorOpIn, "n1.example.com")}, true},
		"another host":              {[]corev1.NodeSelectorTerm{expression(corev1.LabelHostname, corev1.NodeSelectorOpIn, "n2")}, false},
		"its zone and another host": {[]corev1.NodeSelectorTerm{both}, false},
		"its zone or another host":  {[]corev1.NodeSelectorTerm{expression("zone", corev1.NodeSelectorOpIn, "a"), expression(corev1.LabelHostname, corev1.NodeSelectorOpIn, "n2")}, true},
		"all but its zone":          {[]corev1.NodeSelectorTerm{expression("zone", corev1.NodeSelectorOpNotIn, "a")}, false},
		"what has a zone":           {[]corev1.NodeSelectorTerm{expression("zone", corev1.NodeSelectorOpExists)}, true},
		"what has a rack":           {[]corev1.NodeSelectorTerm{expression("rack", corev1.NodeSelectorOpExists)}, false},
		"what has no zone":          {[]corev1.NodeSelectorTerm{expression("zone", corev1.NodeSelectorOpDoesNotExist)}, false},
		"its name":                  {[]corev1.NodeSelectorTerm{field("n1")}, true},
		"another name":              {[]corev1.NodeSelectorTerm{field("n2")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			pv := volume()
			pv.Spec.NodeAffinity.Required.NodeSelectorTerms = c.terms
			if v, got := volumeFor(node, pv); !got || v.Foreign {
				t.Errorf("with the label it is %+v, %t", v, got)
			}
			pv.Labels = nil
			if v, got := volumeFor(node, pv); got != c.want || got && !v.Foreign {
				t.Errorf("it is %+v, %t; want %t", v, got, c.want)
			}
		})
	}
	pv := &corev1.PersistentVolume{}
	pv.Spec.HostPath = &corev1.HostPathVolumeSource{Path: "/dev/sdb"}
	if v, ok := volumeFor(node, pv); !ok || v.Path != "/dev/sdb" {
		t.Errorf("a hostPath without an affinity is %+v, %t; want it to count", v, ok)
	}
	pv.Labels = map[string]string{legacyNodeLabel: "n1"} // as of a volume that was copied
	if v, ok := volumeFor(node, pv); !ok || v.Path != "/dev/sdb" || !v.Foreign {
		t.Errorf("a hostPath with the label is %+v, %t; want it to count", v, ok)
	}
}
