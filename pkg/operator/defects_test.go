package operator

import (
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	appsv1 "k8s.io/api/apps/v1"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// upstreamDefects are defects of the upstream operator and of its mounter, by their number in the list that this one was
// built from, with the test that fails if one comes back.
var upstreamDefects = []struct {
	number                  int
	defect, directory, test string
}{
	{1, "a PrometheusRule that was emptied stays empty", "apply", "TestIncludes"},
	{2, "removing a pool unmounts another one whose name is the beginning of its name", "render", "TestCleanUpOfOnePool"},
	{3, "a pool that is removed from the object stays mounted", "../../test/cluster/cases", "TestOperatorWithPoolOnClaims"},
	{4, "an unmount that fails counts as done", "../../test/e2e/mounter", "TestUnmountPoolInUse"},
	{5, "a deletion waits for a node that is gone", ".", "TestDeletionDoesNotWaitForNodes"},
	{6, "mounters do not run on nodes with taints", "render", "TestMounter"},
	{7, "available although no pool is mounted", "status", "TestStatusOfPoolsOnClaims"},
	{8, "a pod that is not scheduled stops everything", "status", "TestUnscheduledPod"},
	{9, "Jobs are left over", ".", "TestCleanUpWaitsForMounterToStop"},
	{10, "fields that a new version drops stay", "../../test/cluster/cases", "TestOperatorAdoptsUpstreamCluster"},
	{11, "the metric says ready while an error stays", ".", "TestReadyMetric"},
	{12, "the name of a Job is not valid at one length", "render", "TestNamesAreValid"},
	{13, "two shared pools get one StorageClass", "render", "TestOverlayClasses"},
	{14, "a second object keeps the first from being deleted", ".", "TestSecondObjectDoesNotBlockDeletionOfTheFirst"},
	{15, "any name of a pool and of a snapshot provider is accepted", "../../test/cluster/cases", "TestObjectValidation"},
	{16, "mounters do not run on nodes whose hostname label is not their name", "render", "TestMounter"},
	{17, "a mounter mounts again what a Job unmounted", ".", "TestCleanUpWaitsForMounterToStop"},
	{18, "one node makes the snapshots of all nodes", "../../test/deploy", "TestSnapshotsComponent"},
	{19, "the observed version is set before the rollout", "status", "TestAssess"},
	{19, "a refused downgrade is not in the status", "status", "TestDowngrades"},
	{20, "a new account deletes the DaemonSet", ".", "TestDeletedAccountIsReplacedAlone"},
	{21, "the mounters of a pool have one selector", "render", "TestMounter"},
	{21, "both DaemonSets have one selector", "render", "TestLegacySelector"},
	{22, "a device is formatted when blkid fails", "../../test/e2e/mounter", "TestBlkidFailureIsNotBlankDevice"},
	{23, "claims that are a directory of a filesystem are not mounted", "../../test/e2e/mounter", "TestVolume"},
	{24, "the driver's pods lack the label of the network policies", "render", "TestPodsReachTheAPIServer"},
	{25, "a TLS profile without content ends the program", ".", "TestTLSProfileIsFollowed"},
}

func TestTestsOfUpstreamDefectsExist(t *testing.T) {
	sources := map[string]string{}
	for _, d := range upstreamDefects {
		if sources[d.directory] == "" {
			sources[d.directory] = testsIn(t, d.directory)
		}
		if !strings.Contains(sources[d.directory], "\nfunc "+d.test+"(t *testing.T)") {
			t.Errorf("defect %d (%s): there is no %s in %s", d.number, d.defect, d.test, d.directory)
		}
	}
}

// testsIn is the source of the tests in a directory.
func testsIn(t *testing.T, directory string) string {
	t.Helper()
	files, err := os.ReadDir(directory)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		source, err := os.ReadFile(directory + "/" + f.Name())
		if err != nil {
			t.Fatal(err)
		}
		text.Write(source)
	}
	return text.String()
}

// The metric is 0 whenever the object is not available, also while something is still being rolled out.
func TestReadyMetric(t *testing.T) {
	defer ready.Set(noObject)
	for nodes, want := range map[int32]float64{0: 0, 1: 0, 2: 1} {
		set := &appsv1.DaemonSet{Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: 2, UpdatedNumberScheduled: 2, NumberReady: nodes}}
		measure(status.Assess(&hppv1.HostPathProvisioner{}, "v1", status.Observed{DaemonSets: map[string]*appsv1.DaemonSet{render.DriverDaemonSet: set}}))
		if got := readyMetric(t); got != want {
			t.Errorf("with %d of 2 nodes ready the metric is %v, want %v", nodes, got, want)
		}
	}
}

func readyMetric(t *testing.T) float64 {
	t.Helper()
	registry := prometheus.NewRegistry()
	registry.MustRegister(ready)
	families, err := registry.Gather()
	if err != nil || len(families) != 1 {
		t.Fatalf("the metrics are %v, %v", families, err)
	}
	return families[0].GetMetric()[0].GetGauge().GetValue()
}
