package render

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Each example is read as a whole, and its class is of a pool that one of them makes.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../../deploy/operator/example/*.yaml")
	more, moreErr := filepath.Glob("../../../deploy/operator/example/snapshots/*.yaml")
	if err := errors.Join(err, moreErr); err != nil || len(files) == 0 || len(more) == 0 {
		t.Fatalf("there are %d and %d examples: %v", len(files), len(more), err)
	}
	files = append(files, more...)
	pools, classes := map[string]bool{hppv1.LegacyPool: true}, map[string]string{}
	for _, file := range files {
		content, err := os.ReadFile(file)
		must.Succeed(t, err)
		switch {
		case strings.Contains(string(content), "\nkind: HostPathProvisioner\n"):
			object := &hppv1.HostPathProvisioner{}
			if err := yaml.UnmarshalStrict(content, object); err != nil {
				t.Errorf("%s: %v", file, err)
			}
			for _, pool := range object.Spec.StoragePools {
				pools[pool.Name] = true
			}
		case strings.Contains(string(content), "\nkind: StorageClass\n"):
			class := &storagev1.StorageClass{}
			if err := yaml.UnmarshalStrict(content, class); err != nil {
				t.Errorf("%s: %v", file, err)
			}
			classes[file] = class.Parameters[PoolParameter]
		case strings.Contains(string(content), "\nkind: VolumeSnapshotClass\n"):
			var class struct{ Driver string }
			if err := yaml.Unmarshal(content, &class); err != nil || class.Driver != DriverName {
				t.Errorf("%s is for the driver %q, %v", file, class.Driver, err)
			}
		}
	}
	for file, pool := range classes {
		if !pools[pool] {
			t.Errorf("%s is for the pool %s, which no example makes", file, pool)
		}
	}
}
