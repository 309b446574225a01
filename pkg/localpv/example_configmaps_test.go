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

// disks are names that udev gives to whole disks, of which the examples are.
var disks = map[string]string{
	"block.yaml":      "pci-0000:00:10.0-scsi-0:0:1:0",
	"filesystem.yaml": "nvme-eui.0025388b710116a1",
}

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
		config, err := devices.ParseConfig(example.Data)
		must.Succeed(t, err)
		disk := disks[filepath.Base(file)]
		if !config.Filter.MatchString(disk) || config.Filter.MatchString(disk+"-part1") {
			t.Errorf("%s: the filter %s is to match the disk %q, and none of its partitions", file, config.Filter, disk)
		}
	}
}
