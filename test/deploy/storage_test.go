package deploy_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"kubevirt.io/hostpath-provisioner/test/deploy/manifest"
)

// A poolConfig is one entry of --datadir, with every key that there is.
type poolConfig struct {
	Name             string  `json:"name"`
	Path             string  `json:"path"`
	Shared           bool    `json:"shared"`
	SnapshotPath     string  `json:"snapshotPath"`
	SnapshotProvider string  `json:"snapshotProvider"`
	Enforcement      string  `json:"enforcement"`
	Overprovision    float64 `json:"overprovision"`
	Allocation       string  `json:"allocation"`
	Reserve          string  `json:"reserve"`
	BytesPerInode    int64   `json:"bytesPerInode"`
	Relabel          string  `json:"relabel"`
	RequireMount     bool    `json:"requireMount"`
}

// poolsOf are the pools that the driver is started with.
func poolsOf(t *testing.T, objs manifest.Objects) []poolConfig {
	t.Helper()
	c := container(t, daemonSet(t, objs).Spec.Template.Spec, driver)
	i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == "DATADIR" })
	if i < 0 || c.Env[i].ValueFrom == nil || c.Env[i].ValueFrom.ConfigMapKeyRef == nil {
		t.Fatal("DATADIR does not come from a ConfigMap")
	}
	ref := c.Env[i].ValueFrom.ConfigMapKeyRef
	for _, cm := range manifest.All[corev1.ConfigMap](t, objs, "ConfigMap") {
		value, ok := cm.Data[ref.Key]
		if cm.Name != ref.Name || !ok {
			continue
		}
		var pools []poolConfig
		d := json.NewDecoder(bytes.NewBufferString(value))
		d.DisallowUnknownFields()
		if err := d.Decode(&pools); err != nil {
			t.Fatalf("decode the pools: %v", err)
		}
		return pools
	}
	t.Fatalf("there is no ConfigMap %s with a key %s", ref.Name, ref.Key)
	return nil
}

// checkPools says what is wrong with the pools, and with how the driver sees them.
func checkPools(pod corev1.PodSpec, c corev1.Container, pools []poolConfig) error {
	var errs []error
	for i, p := range pools {
		if p.Name == "" {
			errs = append(errs, fmt.Errorf("pool %d has no name", i))
		}
		if !path.IsAbs(p.Path) || path.Clean(p.Path) != p.Path {
			errs = append(errs, fmt.Errorf("pool %s: the path %q is not a clean absolute one", p.Name, p.Path))
		}
		for _, q := range pools[:i] {
			if p.Name == q.Name {
				errs = append(errs, fmt.Errorf("two pools are named %s", p.Name))
			}
			if strings.HasPrefix(p.Path+"/", q.Path+"/") || strings.HasPrefix(q.Path+"/", p.Path+"/") {
				errs = append(errs, fmt.Errorf("pools %s and %s share a directory", q.Name, p.Name))
			}
		}
		host, err := onHost(pod, c, p.Path)
		if err != nil {
			errs = append(errs, fmt.Errorf("pool %s: %w", p.Name, err))
			continue
		}
		if host != p.Path {
			errs = append(errs, fmt.Errorf("pool %s: %s is %s on the host", p.Name, p.Path, host))
		}
		m, _ := mountAt(c, p.Path)
		if got := ptr(m.MountPropagation); got != corev1.MountPropagationHostToContainer {
			errs = append(errs, fmt.Errorf("pool %s: the propagation of %s is %q", p.Name, m.MountPath, got))
		}
	}
	if len(pools) == 0 {
		errs = append(errs, errors.New("there is no pool"))
	}
	return errors.Join(errs...)
}

func TestDriverMountsPools(t *testing.T) {
	objs := manifest.Render(t, csiDir)
	pod := daemonSet(t, objs).Spec.Template.Spec
	if err := checkPools(pod, container(t, pod, driver), poolsOf(t, objs)); err != nil {
		t.Error(err)
	}
}

// This is the overlay that the comment in deploy/csi/kustomization.yaml shows.
func TestOverlayAddsPool(t *testing.T) {
	objs := overlay(t, map[string]string{
		"kustomization.yaml": `
resources:
- $csi
configMapGenerator:
- name: hostpath-csi-pools
  behavior: replace
  files: [pools.json]
patches:
- patch: |-
    apiVersion: apps/v1
    kind: DaemonSet
    metadata:
      name: hostpath-csi-driver
    spec:
      template:
        spec:
          containers:
          - name: driver
            volumeMounts:
            - name: pool-fast
              mountPath: /mnt/fast
              mountPropagation: HostToContainer
          volumes:
          - name: pool-fast
            hostPath:
              path: /mnt/fast
              type: Directory
`,
		"pools.json": `[{"name":"local","path":"/var/hpvolumes"},{"name":"fast","path":"/mnt/fast"}]`,
	})
	pod := daemonSet(t, objs).Spec.Template.Spec
	pools := poolsOf(t, objs)
	if len(pools) != 2 {
		t.Errorf("the driver has %d pools, want 2", len(pools))
	}
	if err := checkPools(pod, container(t, pod, driver), pools); err != nil {
		t.Error(err)
	}
}

func TestPoolChangeRollsDaemonSet(t *testing.T) {
	before := daemonSet(t, manifest.Render(t, csiDir))
	after := daemonSet(t, overlay(t, map[string]string{
		"kustomization.yaml": `
resources: [$csi]
configMapGenerator:
- {name: hostpath-csi-pools, behavior: replace, files: [pools.json]}
`,
		"pools.json": `[{"name":"local","path":"/var/hpvolumes","reserve":"10%"}]`,
	}))
	if reflect.DeepEqual(before.Spec.Template, after.Spec.Template) {
		t.Error("the pod is the same, and would keep its old pools")
	}
}

func TestOverlayChangesImage(t *testing.T) {
	ds := manifest.Only[appsv1.DaemonSet](t, overlay(t, map[string]string{"kustomization.yaml": `
resources: [$csi]
images:
- {name: quay.io/kubevirt/hostpath-csi-driver, newName: registry.example/hpp, newTag: v9.9.9}
`}), "DaemonSet")
	if got, want := container(t, ds.Spec.Template.Spec, driver).Image, "registry.example/hpp:v9.9.9"; got != want {
		t.Errorf("the image is %s, want %s", got, want)
	}
}

func TestCSIDriver(t *testing.T) {
	d := manifest.Only[storagev1.CSIDriver](t, manifest.Render(t, csiDir), "CSIDriver")
	is := func(got *bool, want bool) bool { return got != nil && *got == want }
	tests := []struct {
		name string
		ok   bool
	}{
		{"has the driver's name", d.Name == driverName},
		{"attaches nothing", is(d.Spec.AttachRequired, false)},
		{"reports its capacity to the scheduler", is(d.Spec.StorageCapacity, true)},
		{"gets the pod's information", is(d.Spec.PodInfoOnMount, true)},
		{"leaves fsGroup to kubelet", ptr(d.Spec.FSGroupPolicy) == storagev1.FileFSGroupPolicy},
		{"does not change the SELinux context of its filesystem", is(d.Spec.SELinuxMount, false)},
		{"is not asked again for what it published", is(d.Spec.RequiresRepublish, false)},
		{"wants no token", len(d.Spec.TokenRequests) == 0},
		{"has persistent and inline volumes", slices.Equal(
			slices.Sorted(slices.Values(d.Spec.VolumeLifecycleModes)),
			[]storagev1.VolumeLifecycleMode{storagev1.VolumeLifecycleEphemeral, storagev1.VolumeLifecyclePersistent})},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !tt.ok {
				t.Errorf("%+v", d.Spec)
			}
		})
	}
}

func TestStorageClass(t *testing.T) {
	objs := manifest.Render(t, csiDir)
	sc := manifest.Only[storagev1.StorageClass](t, objs, "StorageClass")
	csi := manifest.Only[storagev1.CSIDriver](t, objs, "CSIDriver")
	tests := []struct {
		name string
		ok   bool
	}{
		{"has the name that the example and the texts use", sc.Name == "hostpath-csi"},
		{"is the driver's", sc.Provisioner == csi.Name},
		{"names a pool that the driver has", slices.ContainsFunc(poolsOf(t, objs), func(p poolConfig) bool {
			return p.Name == sc.Parameters["storagePool"]
		})},
		{"has no other parameter", len(sc.Parameters) == 1},
		{"waits for the pod", ptr(sc.VolumeBindingMode) == storagev1.VolumeBindingWaitForFirstConsumer},
		{"deletes what is no longer claimed", ptr(sc.ReclaimPolicy) == corev1.PersistentVolumeReclaimDelete},
		{"lets volumes grow", ptr(sc.AllowVolumeExpansion)},
		{"is not the default", sc.Annotations["storageclass.kubernetes.io/is-default-class"] == ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !tt.ok {
				t.Errorf("%+v", sc)
			}
		})
	}
}
