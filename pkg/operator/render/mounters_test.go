package render

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// templates are two pools on claims, of which one has a name that the other begins with, on two nodes.
func templates(t *testing.T, mode corev1.PersistentVolumeMode) *Renderer {
	t.Helper()
	m, err := Load()
	must.Succeed(t, err)
	facts := allFacts
	facts.Nodes = []string{"node-a", "node-b"}
	return m.For(testConfig, facts, &hppv1.HostPathProvisioner{Spec: hppv1.HostPathProvisionerSpec{StoragePools: []hppv1.StoragePool{
		{Name: "local", Path: "/mnt/local", PVCTemplate: &hppv1.ClaimTemplate{VolumeMode: &mode}, FSType: "ext4", MountOptions: []string{"noatime", "discard"}},
		{Name: "local-fast", Path: "/mnt/fast", PVCTemplate: &hppv1.ClaimTemplate{
			VolumeMode: &mode, AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteMany},
		}},
	}}})
}

func TestClaimNamesAreCompatibleWithUpstream(t *testing.T) {
	var names []string
	for _, claim := range templates(t, corev1.PersistentVolumeFilesystem).Claims() {
		names = append(names, claim.Name)
		if len(claim.OwnerReferences) > 0 {
			t.Errorf("%s has an owner, and would go with it", claim.Name)
		}
	}
	if diff := cmp.Diff([]string{"hpp-pool-local-fast-shared", "hpp-pool-local-node-a", "hpp-pool-local-node-b"}, names); diff != "" {
		t.Error(diff)
	}
}

// Names are valid at every length: the upstream operator's for a Job began with a hyphen at one.
func TestNamesAreValid(t *testing.T) {
	seen := map[string]bool{}
	for length := 1; length <= 253; length++ {
		name := MounterName("pool", strings.Repeat("n", length))
		for _, name := range []string{name, CleanUpName(name)} {
			if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
				t.Errorf("%s: %v", name, problems)
			}
			if seen[name] {
				t.Errorf("%s is the name of two", name)
			}
			seen[name] = true
		}
	}
}

// A pool on a claim is mounted while the driver runs already: its capacity is to be known soon after, and not after a minute.
func TestCapacityOfPoolOnClaimIsKnownSoon(t *testing.T) {
	onClaim := onePoolSpec()
	onClaim.StoragePools[0].PVCTemplate = &hppv1.ClaimTemplate{}
	for want, spec := range map[string]hppv1.HostPathProvisionerSpec{"": onePoolSpec(), "10s": onClaim} {
		args := containerOf(t, driverSet(t, rendered(t, testConfig, Facts{}, spec)), provisionerContainer).Args
		var got string
		for _, arg := range args {
			if value, found := strings.CutPrefix(arg, "--capacity-poll-interval="); found {
				got = value
			}
		}
		if got != want {
			t.Errorf("the capacity is asked for every %q, want %q", got, want)
		}
	}
}

func TestMounter(t *testing.T) {
	tests := map[string]struct {
		mode    corev1.PersistentVolumeMode
		args    []string
		probe   []string
		devices int
	}{
		"a device": {corev1.PersistentVolumeBlock,
			[]string{"mount", "--target=/pool/csi", "--device=/dev/pool", "--fs-type=ext4", "--v=2", "--mount-options=noatime,discard"},
			[]string{"/pool-mounter", "probe", "--target=/pool/csi", "--device=/dev/pool"}, 1},
		"a filesystem": {corev1.PersistentVolumeFilesystem,
			[]string{"mount", "--target=/pool/csi", "--volume=/volume", "--v=2"},
			[]string{"/pool-mounter", "probe", "--target=/pool/csi", "--volume=/volume"}, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			all, err := templates(t, tt.mode).mounters()
			must.Succeed(t, err)
			selectors := map[string]bool{}
			for _, d := range all {
				selectors[d.Spec.Selector.MatchLabels[mounterLabel]] = true
				l := LeftoverOf(d)
				if NodeOf(&corev1.Pod{Spec: d.Spec.Template.Spec}) != l.Node || len(d.Spec.Template.Spec.Tolerations) == 0 {
					t.Errorf("%s does not run on %s whatever its taints and labels", d.Name, l.Node)
				}
			}
			if len(all) != 4 || len(selectors) != 4 {
				t.Fatalf("%d mounters have %d selectors, want 4 with one each", len(all), len(selectors))
			}
			c := all[0].Spec.Template.Spec.Containers[0]
			if diff := cmp.Diff(tt.args, c.Args); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(tt.probe, c.ReadinessProbe.Exec.Command); diff != "" {
				t.Error(diff)
			}
			if len(c.VolumeDevices) != tt.devices {
				t.Errorf("it has the devices %v", c.VolumeDevices)
			}
		})
	}
}

// The clean-up of a pool is only for that pool, and follows the annotations of its mounter, also one of the upstream operator.
func TestCleanUpOfOnePool(t *testing.T) {
	r := templates(t, corev1.PersistentVolumeBlock)
	all, err := r.mounters()
	must.Succeed(t, err)
	i := slices.IndexFunc(all, func(d *appsv1.Deployment) bool { return d.Name == "hpp-pool-local-fast-node-b" })
	if i < 0 {
		t.Fatal("there is no mounter of local-fast on node-b")
	}
	earlier := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: all[i].Name, Labels: PoolLabels("local-fast")},
		Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Command: []string{"/usr/bin/mounter", "--storagePoolPath", "/source", "--mountPath", "/mnt/fast/csi", "--hostPath", "/host"}}},
			Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{
					Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{"node-b"},
				}}}},
			}}},
		}}},
	}
	for name, d := range map[string]*appsv1.Deployment{"ours": all[i], "of the upstream operator": earlier} {
		t.Run(name, func(t *testing.T) {
			job, err := r.CleanUpJob(LeftoverOf(d))
			must.Succeed(t, err)
			pod := job.Spec.Template.Spec
			if got := NodeOf(&corev1.Pod{Spec: pod}); job.Name != "cleanup-pool-local-fast-node-b" || got != "node-b" {
				t.Errorf("the Job %s is for %s", job.Name, got)
			}
			if path := pod.Volumes[0].HostPath.Path; path != "/mnt/fast" {
				t.Errorf("it unmounts %s", path)
			}
		})
	}
}

// A clean-up has the claim under the path that it names to the program, which knows by it what is the pool's.
func TestCleanUpHasTheClaimThatItNames(t *testing.T) {
	for block, want := range map[bool]string{true: "--device=/dev/pool", false: "--volume=/volume"} {
		job, err := templates(t, corev1.PersistentVolumeBlock).CleanUpJob(Leftover{Mounter: "hpp-pool-local-node-a", Pool: "local", Node: "node-a", Path: "/mnt/local", Claim: "claim", Block: block})
		must.Succeed(t, err)
		c := job.Spec.Template.Spec.Containers[0]
		var at []string
		for _, d := range c.VolumeDevices {
			at = append(at, "--device="+d.DevicePath)
		}
		for _, m := range c.VolumeMounts {
			if m.Name == "claim" {
				at = append(at, "--volume="+m.MountPath)
			}
		}
		if !slices.Equal(at, []string{want}) || !slices.Contains(c.Args, want) {
			t.Errorf("it has the claim at %v, and the arguments %v; want %s", at, c.Args, want)
		}
	}
}

// A clean-up looks for users before its pod runs, which ends the mounter.
func TestCleanUpLooksBeforeItRuns(t *testing.T) {
	r := templates(t, corev1.PersistentVolumeBlock)
	job, err := r.CleanUpJob(Leftover{Mounter: "hpp-pool-local-node-a", Pool: "local", Node: "node-a", Path: "/mnt/local", Claim: "claim", Block: true})
	must.Succeed(t, err)
	pod := job.Spec.Template.Spec
	if first := pod.InitContainers; len(first) != 1 || first[0].Args[0] != "look" || first[0].Image != pod.Containers[0].Image {
		t.Errorf("it begins with %+v", first)
	}
}

// A clean-up sees what is published where kubelet is. On a node without the usual directory its pod would never start.
func TestCleanUpHasTheDirectoryOfKubelet(t *testing.T) {
	for directory, want := range map[string]string{"": kubeletDirectory, kubeletDirectory: kubeletDirectory, "/var/lib/k0s/kubelet": "/var/lib/k0s/kubelet"} {
		r := templates(t, corev1.PersistentVolumeBlock)
		r.object.Spec.KubeletDirectory = directory
		const pool = kubeletDirectory + "/pool" // as an object from before the definition refused it
		job, err := r.CleanUpJob(Leftover{Mounter: "hpp-pool-local-node-a", Pool: "local", Node: "node-a", Path: pool})
		must.Succeed(t, err)
		var paths []string
		for _, v := range job.Spec.Template.Spec.Volumes {
			paths = append(paths, v.HostPath.Path)
		}
		if !slices.Equal(paths, []string{pool, want}) {
			t.Errorf("with kubelet in %q it has %q", directory, paths)
		}
	}
}

// The next pod of a mounter starts before the last one ends, so that a rollout leaves no claim without one. Only where one pod may have the
// claim, as it is or will be made, the last one ends first.
func TestMounterIsReplacedUnderItsClaim(t *testing.T) {
	for name, tt := range map[string]struct {
		mode corev1.PersistentVolumeAccessMode
		made corev1.PersistentVolumeAccessMode
		want appsv1.DeploymentStrategyType
	}{
		"one node":                {corev1.ReadWriteOnce, "", appsv1.RollingUpdateDeploymentStrategyType},
		"one pod":                 {corev1.ReadWriteOncePod, "", appsv1.RecreateDeploymentStrategyType},
		"one pod, until a change": {corev1.ReadWriteOnce, corev1.ReadWriteOncePod, appsv1.RecreateDeploymentStrategyType},
		"one pod, after a change": {corev1.ReadWriteOncePod, corev1.ReadWriteOnce, appsv1.RollingUpdateDeploymentStrategyType},
	} {
		t.Run(name, func(t *testing.T) {
			r := templates(t, corev1.PersistentVolumeBlock)
			pool := &r.pools[0]
			pool.PVCTemplate.AccessModes = []corev1.PersistentVolumeAccessMode{tt.mode}
			if claim := claimName(pool, "node-a"); tt.made != "" {
				r.facts.ClaimPools = map[string]string{claim: pool.Name}
				if tt.made == corev1.ReadWriteOncePod {
					r.facts.ExclusiveClaims = sets.New(claim)
				}
			}
			d, err := r.mounter(pool, "node-a")
			must.Succeed(t, err)
			s := d.Spec.Strategy
			if surges := s.RollingUpdate != nil && s.RollingUpdate.MaxSurge.IntValue() == 1 && s.RollingUpdate.MaxUnavailable.IntValue() == 0; s.Type != tt.want || surges != (tt.want == appsv1.RollingUpdateDeploymentStrategyType) {
				t.Errorf("the strategy is %+v", s)
			}
			if !Keeps(&corev1.Pod{ObjectMeta: d.Spec.Template.ObjectMeta}) {
				t.Error("a clean-up cannot begin beside the mounter")
			}
		})
	}
}

// The driver is needed without a pool too: by pods that end while the pools on claims are removed.
func TestDriverWithoutPools(t *testing.T) {
	data, err := dataDir(nil)
	must.Succeed(t, err)
	pools, err := poolconfig.Parse(data, "/")
	if err != nil || len(pools) != 1 || !pools[0].RequireMount {
		t.Errorf("the pools are %+v, %v", pools, err)
	}
}

// Pool a on node b-c and pool a-b on node c want one name. They do not get one claim: the one that is there keeps it.
func TestPoolsWithOneNameDoNotShareAClaim(t *testing.T) {
	template := func(modes ...corev1.PersistentVolumeAccessMode) *hppv1.ClaimTemplate {
		return &hppv1.ClaimTemplate{AccessModes: modes}
	}
	m, err := Load()
	must.Succeed(t, err)
	for name, tt := range map[string]struct {
		pools []hppv1.StoragePool
		facts Facts
		want  []Spot
		clash string
	}{
		"both are new": {
			[]hppv1.StoragePool{{Name: "a", PVCTemplate: template()}, {Name: "a-b", PVCTemplate: template()}},
			Facts{Nodes: []string{"b-c", "c"}}, []Spot{{"a", "b-c"}, {"a", "c"}, {"a-b", "b-c"}}, "pool a-b on node c",
		},
		"the second has its claim": {
			[]hppv1.StoragePool{{Name: "a", PVCTemplate: template()}, {Name: "a-b", PVCTemplate: template()}},
			Facts{Nodes: []string{"b-c", "c"}, Mounters: map[string]Spot{"hpp-pool-a-b-c": {"a-b", "c"}}, ClaimPools: map[string]string{"hpp-pool-a-b-c": "a-b"}},
			[]Spot{{"a", "c"}, {"a-b", "b-c"}, {"a-b", "c"}}, "pool a on node b-c",
		},
		"the claim of a pool that was removed": {
			[]hppv1.StoragePool{{Name: "a-b", PVCTemplate: template()}},
			Facts{Nodes: []string{"c"}, ClaimPools: map[string]string{"hpp-pool-a-b-c": "a"}}, nil, "is that of pool a:",
		},
		"the claim of all nodes": {
			[]hppv1.StoragePool{{Name: "x-y", PVCTemplate: template(corev1.ReadWriteMany)}, {Name: "x", PVCTemplate: template()}},
			Facts{Nodes: []string{"y-shared"}}, []Spot{{"x-y", "y-shared"}}, "pool x on node y-shared",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := m.For(testConfig, tt.facts, &hppv1.HostPathProvisioner{Spec: hppv1.HostPathProvisionerSpec{StoragePools: tt.pools}})
			all, err := r.mounters()
			must.Succeed(t, err)
			var got []Spot
			for _, d := range all {
				l := LeftoverOf(d)
				got = append(got, Spot{l.Pool, l.Node})
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("mounters: %s", diff)
			}
			if err := r.Clashes(); err == nil || !strings.Contains(err.Error(), tt.clash) {
				t.Errorf("the clash is %v, want %q", err, tt.clash)
			}
		})
	}
}
