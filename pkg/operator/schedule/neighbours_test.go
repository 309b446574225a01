package schedule_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/operator/schedule"
)

func node(name, zone string) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, "zone": zone}}}
}

// pod is one of an application that runs on a node.
func pod(name, app, on string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "apps", Name: name, Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{NodeName: on, Affinity: &corev1.Affinity{}},
	}
}

func about(app, by string) []corev1.PodAffinityTerm {
	return []corev1.PodAffinityTerm{{LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}, TopologyKey: by}}
}

func without(p corev1.Pod, terms []corev1.PodAffinityTerm) corev1.Pod {
	p.Spec.Affinity.PodAntiAffinity = &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms}
	return p
}

func beside(p corev1.Pod, terms []corev1.PodAffinityTerm) corev1.Pod {
	p.Spec.Affinity.PodAffinity = &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms}
	return p
}

// A pod goes to no node where it may not be with others, nor to one without those that it has to be with.
func TestNeighbours(t *testing.T) {
	const host = corev1.LabelHostname
	elsewhere := func(p corev1.Pod, terms func(*corev1.PodAffinityTerm)) corev1.Pod {
		terms(&p.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0])
		return p
	}
	other := pod("db-1", "db", "node-b")
	other.Namespace = "others"
	for name, c := range map[string]struct {
		moves  []corev1.Pod
		runs   []corev1.Pod
		refuse string // of node-b, in zone 1; empty for nothing
	}{
		"replicas on nodes of their own": {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", host))}, []corev1.Pod{pod("db-1", "db", "node-b")}, "pod db-1"},
		"another replica elsewhere":      {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", host))}, []corev1.Pod{pod("db-1", "db", "node-c")}, ""},
		"one in the same zone":           {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", "zone"))}, []corev1.Pod{pod("db-1", "db", "node-c")}, "pod db-1"},
		"itself":                         {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", "zone"))}, []corev1.Pod{pod("db-0", "db", "node-c")}, ""},
		"one that is not scheduled":      {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", host))}, []corev1.Pod{pod("db-1", "db", "")}, ""},
		"one of another application":     {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", host))}, []corev1.Pod{pod("web-0", "web", "node-b")}, ""},
		"one that wants to be alone":     {[]corev1.Pod{pod("db-0", "db", "node-a")}, []corev1.Pod{without(pod("batch", "batch", "node-b"), about("db", host))}, "pod batch"},
		"one of another namespace":       {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", host))}, []corev1.Pod{other}, ""},
		"one of a namespace by name": {[]corev1.Pod{elsewhere(without(pod("db-0", "db", "node-a"), about("db", host)), func(term *corev1.PodAffinityTerm) {
			term.Namespaces = []string{"others"}
		})}, []corev1.Pod{other}, "pod db-1"},
		"one of all namespaces": {[]corev1.Pod{elsewhere(without(pod("db-0", "db", "node-a"), about("db", host)), func(term *corev1.PodAffinityTerm) {
			term.NamespaceSelector = &metav1.LabelSelector{}
		})}, []corev1.Pod{other}, "pod db-1"},
		"with a cache there":             {[]corev1.Pod{beside(pod("web-0", "web", "node-a"), about("cache", host))}, []corev1.Pod{pod("c-0", "cache", "node-b")}, ""},
		"with a cache elsewhere":         {[]corev1.Pod{beside(pod("web-0", "web", "node-a"), about("cache", host))}, []corev1.Pod{pod("c-0", "cache", "node-a")}, "affinity to pods"},
		"with a cache that moves":        {[]corev1.Pod{beside(pod("web-0", "web", "node-a"), about("cache", host)), pod("c-0", "cache", "node-a")}, nil, ""},
		"the first of those together":    {[]corev1.Pod{beside(pod("web-0", "web", "node-a"), about("web", host))}, nil, ""},
		"another of those together":      {[]corev1.Pod{beside(pod("web-0", "web", "node-a"), about("web", host))}, []corev1.Pod{pod("web-1", "web", "node-c")}, "affinity to pods"},
		"a term that is about no pod":    {[]corev1.Pod{without(pod("db-0", "db", "node-a"), []corev1.PodAffinityTerm{{TopologyKey: host}})}, []corev1.Pod{pod("db-1", "db", "node-b")}, ""},
		"a label that the node has not":  {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", "rack"))}, []corev1.Pod{pod("db-1", "db", "node-b")}, ""},
		"on a node that has gone by now": {[]corev1.Pod{without(pod("db-0", "db", "node-a"), about("db", host))}, []corev1.Pod{pod("db-1", "db", "node-x")}, ""},
	} {
		at := node("node-b", "1")
		got := schedule.Refuses(c.moves, &at, schedule.Neighbours{Pods: c.runs, Nodes: []corev1.Node{node("node-a", "0"), at, node("node-c", "1")}})
		if (got == "") != (c.refuse == "") || !strings.Contains(got, c.refuse) {
			t.Errorf("%s: it says %q, want %q", name, got, c.refuse)
		}
	}
}
