package localpv

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestExampleConfigMaps(t *testing.T) {
	files, err := filepath.Glob("../../deploy/devices/example/*.yaml")
	must.Succeed(t, err)
	if len(files) != 2 {
		t.Errorf("the examples are %q, want two", files)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must.Succeed(t, err)
		var example corev1.ConfigMap
		must.Succeed(t, yaml.UnmarshalStrict(text, &example))
		if example.Namespace != "local-pv-provisioner" || !strings.HasPrefix(example.Data[devices.KeyDeviceDir], "/dev/disk/") {
			t.Errorf("%s: %+v", file, example)
		}
		example.Data[devices.KeyDeviceDir] = "/dev" // has to exist, and udev makes the example's
		if _, err := devices.ParseConfig(example.Data); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
