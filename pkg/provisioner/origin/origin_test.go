package origin_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
)

func TestNode(t *testing.T) {
	annotations := func(by, identity, node string) map[string]string {
		set := map[string]string{origin.ProvisionedBy: by}
		if identity != "" {
			set[origin.Identity] = identity
		}
		if node != "" {
			set[origin.ProvisionOnNode] = node
		}
		return set
	}
	tests := map[string]struct {
		annotations map[string]string
		want        string
		known       bool
	}{
		"of KubeVirt's provisioner":                     {annotations("kubevirt.io/hostpath-provisioner", "kubevirt.io/hostpath-provisioner", "node-a"), "node-a", true},
		"as ours once wrote it":                         {annotations("kubevirt.io/hostpath-provisioner", "node-a", "node-a"), "node-a", true},
		"of KubeVirt's provisioner, before August 2019": {annotations("kubevirt.io/hostpath-provisioner", "kubevirt.io/hostpath-provisioner", ""), "", false},
		"two nodes":                            {annotations("kubevirt.io/hostpath-provisioner", "node-a", "node-b"), "", false},
		"without an identity":                  {annotations("kubevirt.io/hostpath-provisioner", "", "node-a"), "", false},
		"of the single-node provisioner":       {annotations("hostpath", "node-a", ""), "node-a", true},
		"of the single-node one, unidentified": {annotations("hostpath", "", "node-a"), "", false},
		"of another provisioner":               {annotations("rancher.io/local-path", "node-a", "node-a"), "", false},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			got, err := origin.Node(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Annotations: tt.annotations}})
			if got != tt.want || (err == nil) != tt.known {
				t.Errorf("got %q (%v)", got, err)
			}
		})
	}
}

func TestInside(t *testing.T) {
	for at, want := range map[string]bool{"/a/b": true, "/a/b/": true, "/a//b/./c": true, "/a/b-c": false, "/a": false, "/a/b/../c": false, "": false} {
		if got := origin.Inside(at, "/a/b"); got != want {
			t.Errorf("%q: %t", at, got)
		}
	}
	if !origin.Inside("/a", "/") {
		t.Error("nothing is inside the root")
	}
}

// Only is strict, as what is removed goes by it; MayUse is not, as what is kept goes by it.
func TestAffinity(t *testing.T) {
	in := func(key string, values ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}}}
	}
	exists := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpExists}}}
	tests := map[string]struct {
		terms        []corev1.NodeSelectorTerm
		only, mayUse bool
	}{
		"by hostname":             {[]corev1.NodeSelectorTerm{in(corev1.LabelHostname, "host-a")}, true, true},
		"by the node's name":      {[]corev1.NodeSelectorTerm{in(corev1.LabelHostname, "node-a")}, true, true},
		"another node":            {[]corev1.NodeSelectorTerm{in(corev1.LabelHostname, "host-b")}, false, false},
		"two nodes":               {[]corev1.NodeSelectorTerm{in(corev1.LabelHostname, "host-b", "host-a")}, false, true},
		"two nodes, in two terms": {[]corev1.NodeSelectorTerm{in(corev1.LabelHostname, "host-b"), in(corev1.LabelHostname, "host-a")}, false, true},
		"a zone":                  {[]corev1.NodeSelectorTerm{in("zone", "east")}, false, true},
		"another zone":            {[]corev1.NodeSelectorTerm{in("zone", "west")}, false, false},
		"any zone":                {[]corev1.NodeSelectorTerm{exists}, false, true},
		"none":                    {nil, false, true},
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a", Labels: map[string]string{corev1.LabelHostname: "host-a", "zone": "east"}}}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			pv := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: tt.terms}}}}
			if only, mayUse := origin.Only(pv, node), origin.MayUse(pv, node); only != tt.only || mayUse != tt.mayUse {
				t.Errorf("only %t, may use %t", only, mayUse)
			}
		})
	}
	if !origin.MayUse(&corev1.PersistentVolume{}, node) {
		t.Error("without an affinity it is for no node")
	}
}

func TestPath(t *testing.T) {
	for want, source := range map[string]corev1.PersistentVolumeSource{
		"/a": {HostPath: &corev1.HostPathVolumeSource{Path: "/a"}},
		"/b": {Local: &corev1.LocalVolumeSource{Path: "/b"}},
		"":   {},
	} {
		if got := origin.Path(&corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: source}}); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
