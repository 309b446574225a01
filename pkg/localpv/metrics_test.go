package localpv

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestDocumentedMetricsAreCurrent(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	m := newMetrics(registry, "n1")
	m.progress.WithLabelValues("/dev/sda")
	m.writes.WithLabelValues("create")
	m.configIs(invalid)
	families, err := registry.Gather()
	must.Succeed(t, err)
	var served, documented []string
	for _, family := range families {
		served = append(served, family.GetName())
	}
	text, err := os.ReadFile("../../docs/devices.md")
	must.Succeed(t, err)
	for _, match := range regexp.MustCompile("(?m)^\\| `(local_pv_provisioner_\\w+)` \\|").FindAllSubmatch(text, -1) {
		documented = append(documented, string(match[1]))
	}
	slices.Sort(documented)
	if diff := cmp.Diff(served, documented); diff != "" {
		t.Errorf("(- served, + documented)\n%s", diff)
	}
}

func TestUncleanedVolumes(t *testing.T) {
	var pvs []corev1.PersistentVolume
	for name, phase := range map[string]corev1.PersistentVolumePhase{
		"available": corev1.VolumeAvailable, "bound": corev1.VolumeBound, "refused": corev1.VolumeReleased,
		"wiping": corev1.VolumeReleased, "clean": corev1.VolumeReleased,
	} {
		pv := volume()
		pv.Name, pv.Status.Phase = name, phase
		if phase != corev1.VolumeAvailable {
			pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: name, UID: "claim"}
		}
		pvs = append(pvs, *pv)
	}
	report := devices.Report{Cleaned: []string{"clean"}, Wiping: []devices.Wiping{{Volume: "wiping"}, {Path: "/dev/new"}},
		Problems: []devices.Problem{{Volume: "refused"}}}
	if n := uncleaned(pvs, report); n != 1 {
		t.Errorf("%d volumes are not cleaned, want that which is refused", n)
	}
	if n := uncleaned(pvs, devices.Report{}); n != 3 {
		t.Errorf("without a pass %d volumes are not cleaned, want all that are released", n)
	}
}
