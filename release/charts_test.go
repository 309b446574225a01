package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/common"
	chartutil "helm.sh/helm/v4/pkg/chart/common/util"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"sigs.k8s.io/yaml"
)

// An object is one of Kubernetes, as YAML has it.
type object = map[string]any

// inMemory is what packed has made once.
var inMemory map[string]*chartv2.Chart

// packed are the charts as users get them.
func packed(t *testing.T) map[string]*chartv2.Chart {
	t.Helper()
	if inMemory != nil {
		return inMemory
	}
	out, err := made(t, checkout(t, time.Unix(0, 0)))
	succeed(t, err)
	all := map[string]*chartv2.Chart{}
	for _, c := range charts {
		f, err := os.Open(filepath.Join(out, c.name+"-1.2.3.tgz"))
		succeed(t, err)
		loaded, err := loader.LoadArchive(f)
		succeed(t, err)
		succeed(t, f.Close())
		if err := loaded.Validate(); err != nil || loaded.Metadata.Version != "1.2.3" || loaded.Metadata.AppVersion != "v1.2.3" {
			t.Errorf("chart %s is %+v, %v", c.name, loaded.Metadata, err)
		}
		all[c.name] = loaded
	}
	inMemory = all
	return all
}

// rendered is what Helm makes of a chart, by its own library: the objects by kind and name, and the notes.
func rendered(c *chartv2.Chart, namespace, values string) (objects map[string]object, notes string, err error) {
	return renderedFor(c, "v1.36.0", namespace, values)
}

func renderedFor(c *chartv2.Chart, kubernetes, namespace, values string) (objects map[string]object, notes string, err error) {
	version, err := common.ParseKubeVersion(kubernetes)
	if err != nil {
		return nil, "", err
	}
	capabilities := *common.DefaultCapabilities
	capabilities.KubeVersion = *version
	var given map[string]any
	if err := yaml.Unmarshal([]byte(values), &given); err != nil {
		return nil, "", err
	}
	release := common.ReleaseOptions{Name: "hp", Namespace: namespace, Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(c, given, release, &capabilities)
	if err != nil {
		return nil, "", err
	}
	texts, err := engine.Render(c, all)
	if err != nil {
		return nil, "", err
	}
	objects = map[string]object{}
	for name, text := range texts {
		if strings.HasSuffix(name, "NOTES.txt") {
			notes = text
			continue
		}
		if err := addObjects(objects, text); err != nil {
			return nil, "", fmt.Errorf("%s: %w", name, err)
		}
	}
	return objects, notes, nil
}

var separator = regexp.MustCompile(`(?m)^---\n`)

func addObjects(to map[string]object, text string) error {
	for _, one := range separator.Split(text, -1) {
		var o object
		if err := yaml.Unmarshal([]byte(one), &o); err != nil {
			return fmt.Errorf("%w:\n%s", err, one)
		}
		if len(o) == 0 {
			continue
		}
		key := nameOf(o)
		if _, twice := to[key]; twice {
			return fmt.Errorf("%s is there twice", key)
		}
		to[key] = o
	}
	return nil
}

func nameOf(o object) string {
	metadata := o["metadata"].(map[string]any)
	return fmt.Sprintf("%v/%s", o["kind"], hashed.ReplaceAllString(metadata["name"].(string), "$1"))
}

// hashed is the name that kustomize gives the ConfigMap of the pools.
var hashed = regexp.MustCompile(`(hostpath-csi-pools)-[a-z0-9]+\b`)

// alike takes away how a release of Helm differs from a kustomization on purpose: its labels, and where the pools are.
func alike(t *testing.T, objects map[string]object) map[string]object {
	t.Helper()
	delete(objects, "PersistentVolumeClaim/hp-test")
	delete(objects, "Pod/hp-test")
	delete(objects, "Job/hostpath-provisioner-operator-uninstall")
	text, err := json.Marshal(objects)
	succeed(t, err)
	var same map[string]object
	succeed(t, json.Unmarshal(hashed.ReplaceAll(text, []byte("$1")), &same))
	poolsOf(t, same)
	for _, o := range same {
		metadata := o["metadata"].(map[string]any)
		if labels, ok := metadata["labels"].(map[string]any); ok {
			for _, name := range []string{"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"} {
				delete(labels, name)
			}
			if len(labels) == 0 {
				delete(metadata, "labels")
			}
		}
		if o["kind"] == "DaemonSet" {
			spec := at(o, "spec", "template", "spec").(map[string]any)
			byName(spec["volumes"])
			for _, c := range spec["containers"].([]any) {
				byName(c.(map[string]any)["volumeMounts"])
			}
		}
	}
	return same
}

// poolsOf has the pools in the environment of the driver, as a release of Helm has them, and not in a ConfigMap, whose name in a
// kustomization changes with them.
func poolsOf(t *testing.T, objects map[string]object) {
	t.Helper()
	set := objects["DaemonSet/hostpath-csi-driver"]
	if set == nil {
		return
	}
	for _, e := range at(set, "spec", "template", "spec", "containers", 0, "env").([]any) {
		if at(e, "name") != "DATADIR" {
			continue
		}
		e := e.(map[string]any)
		text, _ := e["value"].(string)
		if from := objects["ConfigMap/hostpath-csi-pools"]; from != nil {
			text = at(from, "data", "pools.json").(string)
			delete(objects, "ConfigMap/hostpath-csi-pools")
			delete(e, "valueFrom")
		}
		var pools any
		succeed(t, json.Unmarshal([]byte(text), &pools))
		e["value"] = pools
	}
}

func byName(list any) {
	slices.SortFunc(list.([]any), func(a, b any) int {
		return strings.Compare(a.(map[string]any)["name"].(string), b.(map[string]any)["name"].(string))
	})
}

// TestChartsAreTheKustomizations compares each combination of options with the kustomization that has the same.
func TestChartsAreTheKustomizations(t *testing.T) {
	packedCharts := packed(t)
	files, err := manifests("../deploy", home)
	succeed(t, err)
	compare := func(c, values string, d document) {
		t.Helper()
		got, _, err := rendered(packedCharts[c], "hostpath-provisioner", values)
		if err != nil {
			t.Fatalf("%s: %v", values, err)
		}
		d.name = "wanted.yaml"
		text, err := release{version: "v1.2.3", images: "registry.example.com/storage/"}.render(files, d)
		succeed(t, err)
		want := map[string]object{}
		succeed(t, addObjects(want, string(text)))
		want, got = alike(t, want), alike(t, got)
		all := maps.Clone(want)
		maps.Copy(all, got)
		for key := range all {
			if diff := cmp.Diff(want[key], got[key]); diff != "" {
				t.Errorf("%s with %s: %s (-kustomization +chart):\n%s", c, values, key, diff)
			}
		}
	}
	compare("hostpath-provisioner-operator", `{}`, document{resources: []string{"operator"}})
	for n := range 3 * 2 * 2 * 2 {
		snapshots, healthMonitor, openshift, monitoring := n%3, n/3%2 == 0, n/6%2 == 1, n/12 == 1
		d := document{resources: []string{"csi"}}
		if openshift {
			d.resources[0] = "csi/openshift"
		}
		if monitoring {
			d.resources = append(d.resources, "monitoring")
		}
		if snapshots > 0 {
			d.components = append(d.components, "csi/snapshots")
		}
		if snapshots > 1 {
			d.components = append(d.components, "csi/freeze")
		}
		if !healthMonitor {
			d.components = append(d.components, "csi/without-health-monitor")
		}
		compare("hostpath-csi-driver", fmt.Sprintf("{snapshots: {enabled: %t, freeze: %t}, healthMonitor: %t, openshift: %t, monitoring: {enabled: %t}}",
			snapshots > 0, snapshots > 1, healthMonitor, openshift, monitoring), d)
	}
}

// at reads a field of an object, by keys and indices.
func at(from any, path ...any) any {
	for _, step := range path {
		switch step := step.(type) {
		case string:
			from = from.(map[string]any)[step]
		case int:
			from = from.([]any)[step]
		}
	}
	return from
}

func TestDriverChartValues(t *testing.T) {
	c := packed(t)["hostpath-csi-driver"]
	got, notes, err := rendered(c, "storage", `
pools:
- {name: local, path: /var/hpvolumes, snapshotPath: /var/hpvolumes/snapshots}
- {name: Fast Disks $(NODE_NAME), path: /mnt/fast, requireMount: true, overprovision: 1.5, bytesPerInode: 16384, reserve: 5%}
- {name: nfs, path: /mnt/nfs, shared: true, snapshotPath: /mnt/old}
- {name: "1", path: /mnt/one}
storageClasses:
- {name: fast, pool: Fast Disks $(NODE_NAME), reclaimPolicy: Retain, allowVolumeExpansion: false, mountOptions: [noatime], parameters: {a: b}, annotations: {c: d}}
- {name: local, pool: local, default: true}
snapshots:
  enabled: true
  freeze: true
  classes: [{name: frozen, consistency: freeze, default: true, parameters: {maxStall: 2s}}]
kubeletDirectory: /var/lib/k0s/kubelet
imageRegistry: mirror.example.com/all/
images: {livenessprobe: example.com/probe:v9}
logLevel: 5
extraArgs: [--metrics-cert-file=/tls.crt]
`)
	succeed(t, err)
	pod := at(got["DaemonSet/hostpath-csi-driver"], "spec", "template", "spec")
	containers := map[string]object{}
	for _, c := range at(pod, "containers").([]any) {
		containers[c.(map[string]any)["name"].(string)] = c.(map[string]any)
	}
	text, err := json.Marshal(pod)
	succeed(t, err)
	if bytes.Contains(text, []byte("/var/lib/kubelet")) {
		t.Error("a path of kubelet is not below its directory")
	}
	mounts := map[string]any{}
	for _, m := range containers["driver"]["volumeMounts"].([]any) {
		mounts[at(m, "name").(string)] = at(m, "mountPath")
	}
	maps.DeleteFunc(mounts, func(name string, _ any) bool {
		return !strings.HasPrefix(name, "pool-") && !strings.HasPrefix(name, "numbered-") && !strings.HasPrefix(name, "snapshots-")
	})
	for what, c := range map[string]struct{ got, want any }{
		"the pools that are mounted": {mounts, map[string]any{"pool-local": "/var/hpvolumes", "numbered-1": "/mnt/fast", "pool-nfs": "/mnt/nfs", "snapshots-2": "/mnt/old", "pool-1": "/mnt/one"}},
		// kubelet takes $$ for a dollar sign, and $(NAME) for a variable.
		"the configuration": {environment(containers["driver"])["DATADIR"], `[{"name":"local","path":"/var/hpvolumes","snapshotPath":"/var/hpvolumes/snapshots"},` +
			`{"bytesPerInode":16384,"name":"Fast Disks $$(NODE_NAME)","overprovision":1.5,"path":"/mnt/fast","requireMount":true,"reserve":"5%"},` +
			`{"name":"nfs","path":"/mnt/nfs","shared":true,"snapshotPath":"/mnt/old"},{"name":"1","path":"/mnt/one"}]`},
		"the default class": {at(got["StorageClass/local"], "metadata", "annotations"), map[string]any{"storageclass.kubernetes.io/is-default-class": "true"}},
		"the other class": {
			map[string]any{"spec": at(got["StorageClass/fast"], "parameters"), "more": []any{at(got["StorageClass/fast"], "reclaimPolicy"), at(got["StorageClass/fast"], "allowVolumeExpansion"), at(got["StorageClass/fast"], "mountOptions", 0)}},
			map[string]any{"spec": map[string]any{"storagePool": "Fast Disks $(NODE_NAME)", "a": "b"}, "more": []any{"Retain", false, "noatime"}},
		},
		"the class of snapshots":         {at(got["VolumeSnapshotClass/frozen"], "parameters"), map[string]any{"consistency": "freeze", "maxStall": "2s"}},
		"the shared pools of the policy": {at(got["ValidatingAdmissionPolicy/hostpath-csi-node"], "spec", "variables", 1, "expression"), `["nfs"]`},
		"the image from the mirror":      {containers["driver"]["image"], "mirror.example.com/all/hostpath-csi-driver:v1.2.3"},
		"the image of the freezer":       {containers["freezer"]["image"], "mirror.example.com/all/hostpath-csi-driver:v1.2.3"},
		"the image by its name":          {containers["livenessprobe"]["image"], "example.com/probe:v9"},
		// That of the other one would stay with its volume.
		"the class of the test": {at(got["PersistentVolumeClaim/hp-test"], "spec", "storageClassName"), "local"},
	} {
		if diff := cmp.Diff(c.want, c.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}
	args := fmt.Sprint(containers["driver"]["args"], containers["csi-resizer"]["args"])
	if strings.Count(args, "--v=5") != 2 || !strings.Contains(args, "--metrics-cert-file=/tls.crt") {
		t.Errorf("the arguments are %s", args)
	}
	if !strings.Contains(notes, "kubectl -n storage rollout status") || !strings.Contains(notes, "storageClassName: fast") || !strings.Contains(notes, "kubectl hostpath doctor --namespace storage") {
		t.Errorf("the notes are %s", notes)
	}
}

// environment are the values of a container's variables.
func environment(container any) map[string]any {
	env := map[string]any{}
	for _, e := range at(container, "env").([]any) {
		env[at(e, "name").(string)] = at(e, "value")
	}
	return env
}

// The definition is deleted by the uninstallation, after all objects, unless no hook runs.
func TestOperatorChartValues(t *testing.T) {
	c := packed(t)["hostpath-provisioner-operator"]
	for values, want := range map[string]struct{ policy, registry any }{
		`{}`:                      {nil, nil},
		`{keepDefinitions: true}`: {"keep", nil},
		// What the operator deploys is from the mirror too, the sidecars of others included.
		`{imageRegistry: mirror.example.com/all}`:                                           {nil, "mirror.example.com/all"},
		`{imageRegistry: mirror.example.com/all, env: {IMAGE_REGISTRY: other.example.com}}`: {nil, "other.example.com"},
	} {
		got, _, err := rendered(c, "storage", values)
		succeed(t, err)
		if policy := definitionPolicy(got); policy != want.policy {
			t.Errorf("%s: the definition has the policy %v, want %v", values, policy, want.policy)
		}
		if env := environment(at(got["Deployment/hostpath-provisioner-operator"], "spec", "template", "spec", "containers", 0)); env["IMAGE_REGISTRY"] != want.registry {
			t.Errorf("%s: the environment is %v", values, env)
		}
		for _, name := range []string{"ValidatingWebhookConfiguration/hostpath-provisioner-operator-webhook", "MutatingWebhookConfiguration/hostpath-provisioner-operator-restores"} {
			if namespace := at(got[name], "webhooks", 0, "clientConfig", "service", "namespace"); namespace != "storage" {
				t.Errorf("%s calls the namespace %v", name, namespace)
			}
		}
	}
}

func definitionPolicy(objects map[string]object) any {
	return at(objects["CustomResourceDefinition/hostpathprovisioners.hostpathprovisioner.kubevirt.io"], "metadata", "annotations", "helm.sh/resource-policy")
}

// helm uninstall runs it in a pod like the operator's, which neither the Deployment nor the Services take for one of theirs, and before anything
// is removed: it has the operator's rights.
func TestUninstallationOfTheOperatorChart(t *testing.T) {
	got, notes, err := rendered(packed(t)["hostpath-provisioner-operator"], "storage", `{imageRegistry: mirror.example.com/all, imagePullSecrets: [{name: pull}],
		tolerations: [{key: only, operator: Exists}], env: {VERBOSITY: 3}, podLabels: {team: storage}}`)
	succeed(t, err)
	job := got["Job/hostpath-provisioner-operator-uninstall"]
	wanted := map[string]any{"helm.sh/hook": "pre-delete", "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded", "helm.sh/hook-output-log-policy": "hook-failed"}
	if diff := cmp.Diff(wanted, at(job, "metadata", "annotations")); diff != "" {
		t.Errorf("the annotations (-want +got):\n%s", diff)
	}
	if spec := at(job, "spec").(map[string]any); spec["backoffLimit"] != 0.0 || at(job, "metadata", "namespace") != "storage" {
		t.Errorf("the Job is %v", job)
	}
	operators, uninstalls := at(got["Deployment/hostpath-provisioner-operator"], "spec", "template"), at(job, "spec", "template")
	labels, selected := at(uninstalls, "metadata", "labels").(map[string]any), at(operators, "metadata", "labels").(map[string]any)
	if labels["name"] != nil || selected["name"] == nil || labels["team"] != "storage" {
		t.Errorf("the labels are %v, those of the operator %v", labels, selected)
	}
	want, container := at(operators, "spec", "containers", 0).(map[string]any), at(uninstalls, "spec", "containers", 0)
	for _, key := range []string{"livenessProbe", "readinessProbe", "ports"} {
		delete(want, key)
	}
	want["args"] = []any{"uninstall"}
	if diff := cmp.Diff(want, container); diff != "" {
		t.Errorf("the container (-operator +job):\n%s", diff)
	}
	spec := at(operators, "spec").(map[string]any)
	spec["restartPolicy"] = "Never"
	if diff := cmp.Diff(spec, at(uninstalls, "spec")); diff != "" {
		t.Errorf("the pod (-operator +job):\n%s", diff)
	}
	for _, command := range []string{"kubectl -n storage logs job/hostpath-provisioner-operator-uninstall", "helm -n storage rollback hp 1"} {
		if !strings.Contains(notes, command) {
			t.Errorf("the notes do not have %q: %s", command, notes)
		}
	}
}

// What runs is ours, but for the sidecars. An image that the values name for a container is its test's too.
func TestImagesOfCharts(t *testing.T) {
	named := regexp.MustCompile(`"image":"([^"]*)"`)
	for name, c := range packed(t) {
		values := `{}`
		if name == "hostpath-csi-driver" {
			values = `{openshift: true, monitoring: {enabled: true}, snapshots: {enabled: true, freeze: true}}`
		}
		got, _, err := rendered(c, "storage", values)
		succeed(t, err)
		text, err := json.Marshal(got)
		succeed(t, err)
		images := named.FindAllSubmatch(text, -1)
		for _, image := range images {
			ours := bytes.HasPrefix(image[1], []byte("registry.example.com/storage/")) && bytes.HasSuffix(image[1], []byte(":v1.2.3"))
			if !ours && !bytes.HasPrefix(image[1], []byte("registry.k8s.io/sig-storage/")) {
				t.Errorf("%s has the image %s", name, image[1])
			}
		}
		if len(images) == 0 {
			t.Errorf("%s has no image", name)
		}
	}
	got, _, err := rendered(packed(t)["hostpath-csi-driver"], "storage", `{images: {driver: "example.com/driver:v9"}}`)
	succeed(t, err)
	if image := at(got["Pod/hp-test"], "spec", "containers", 0, "image"); image != "example.com/driver:v9" {
		t.Errorf("the test has the image %v", image)
	}
}

// Before Kubernetes 1.30 there is no kind for them.
func TestChartsOfOldClustersHaveNoPolicies(t *testing.T) {
	for name, c := range packed(t) {
		for version, want := range map[string]bool{"v1.29.9": false, "v1.30.0-rc.1": true, "v1.31.2+k3s1": true} {
			got, _, err := renderedFor(c, version, "storage", `{}`)
			succeed(t, err)
			has := false
			for key := range got {
				has = has || strings.HasPrefix(key, "ValidatingAdmissionPolicy")
			}
			if has != want {
				t.Errorf("%s for %s has policies: %t, want %t", name, version, has, want)
			}
		}
	}
}

func TestChartsRefuseWrongValues(t *testing.T) {
	all := packed(t)
	for values, want := range map[string]string{
		`{pool: []}`:                    "pool",
		`{pools: []}`:                   "pools",
		`{pools: [{name: a}]}`:          "path",
		`{pools: [{name: a, path: b}]}`: "path",
		`{pools: [{name: local, path: /a, requiremount: true}]}`:                                           "requiremount",
		`{storageClasses: [{name: a, pool: b}]}`:                                                           `StorageClass a is for pool "b"`,
		`{storageClasses: [{name: a, pool: local, reclaim: Retain}]}`:                                      "reclaim",
		`{snapshots: {enabled: true, classes: [{name: a, consistency: freeze}]}}`:                          "set snapshots.freeze",
		`{snapshots: {classes: [{name: a, consistency: maybe}]}}`:                                          "consistency",
		`{kubeletDirectory: "a: b"}`:                                                                       "kubeletDirectory",
		`{images: {driver: ""}}`:                                                                           "driver",
		`{images: {drivr: a}}`:                                                                             "drivr",
		`{logLevel: high}`:                                                                                 "logLevel",
		`{kubeletDirectory: /var/lib/k0s/kubelet/}`:                                                        "kubeletDirectory",
		`{pools: [{name: a, path: /a/}], storageClasses: []}`:                                              "path",
		`{pools: [{name: a, path: /a}, {name: a, path: /b}], storageClasses: []}`:                          `two pools are named "a"`,
		`{pools: [{name: a, path: /a}, {name: b, path: /a}], storageClasses: []}`:                          `the path of pool "b" is in that of pool "a"`,
		`{pools: [{name: a, path: /a/b}, {name: b, path: /a}], storageClasses: []}`:                        `the path of pool "a" is in that of pool "b"`,
		`{storageClasses: [{name: a, pool: local}, {name: a, pool: local}]}`:                               "two StorageClasses are named a",
		`{storageClasses: [{name: a, pool: local, default: true}, {name: b, pool: local, default: true}]}`: "one StorageClass can be the default: a or b",
		`{snapshots: {enabled: true, classes: [{name: a, consistency: verify, default: true}, {name: b, consistency: verify, default: true}]}}`: "one VolumeSnapshotClass can be the default: a or b",
	} {
		if _, _, err := rendered(all["hostpath-csi-driver"], "storage", values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", values, err, want)
		}
	}
	for values, want := range map[string]string{`{images: {operator: a}}`: "operator", `{images: {hostpath-provisioner-operator: ""}}`: "hostpath-provisioner-operator"} {
		if _, _, err := rendered(all["hostpath-provisioner-operator"], "storage", values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error that names %s", values, err, want)
		}
	}
	// Of a key without a value, as in "pools:", Helm takes away the default too.
	for name, keys := range map[string][]string{
		"hostpath-csi-driver":           {"pools", "storageClasses", "snapshots", "healthMonitor", "monitoring", "kubeletDirectory", "images", "resources", "logLevel", "extraArgs"},
		"hostpath-provisioner-operator": {"images", "resources", "env", "monitoringNamespace", "logLevel"},
	} {
		for _, key := range keys {
			_, _, err := rendered(all[name], "storage", "{"+key+": null}")
			if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("missing property '%s'", key)) {
				t.Errorf("%s of %s without a value: %v", key, name, err)
			}
		}
	}
}
