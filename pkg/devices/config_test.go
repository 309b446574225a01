package devices_test

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestConfiguration(t *testing.T) {
	dir := t.TempDir()
	data := map[string]string{"volumeMode": "Filesystem", "fsType": "xfs", "deviceDir": dir, "deviceNameFilter": "^sd[b-z]$"}
	c, err := devices.ParseConfig(data)
	must.Succeed(t, err)
	if c.StorageClass != "local-storage" || c.FSType != "xfs" || c.Partitions != devices.RefusePartitions || c.Wipe != devices.WipeSignatures ||
		!c.Filter.MatchString("sdb") || c.Filter.MatchString("sda") {
		t.Errorf("parsed %+v", c)
	}
	other := maps.Clone(data)
	maps.Copy(other, map[string]string{"storageClassName": "fast", "volumeMode": "Block", "fsType": "", "partitions": "offer", "wipe": "zero", "else": "x"})
	c, err = devices.ParseConfig(other)
	must.Succeed(t, err)
	if c.StorageClass != "fast" || c.FSType != "" || c.Partitions != devices.OfferPartitions || c.Wipe != devices.WipeZero {
		t.Errorf("parsed %+v", c)
	}
}

func TestConfigurationReportsAllProblems(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	for _, c := range []struct {
		data map[string]string
		want []string
	}{
		{nil, []string{"volumeMode is missing", "deviceDir is missing", "deviceNameFilter is missing"}},
		{map[string]string{"volumeMode": "Filesystem", "deviceDir": "dev", "deviceNameFilter": "(", "wipe": "shred", "existingData": "keep", "devicedir": "x"},
			[]string{"fsType is missing", "absolute", `"("`, `wipe is "shred"`, "existingData is not known any more", "blkdiscard --zeroout", "the key is deviceDir"}},
		{map[string]string{"volumeMode": "Filesystem", "fsType": "ntfs", "deviceDir": file, "deviceNameFilter": "."},
			[]string{`fsType is "ntfs"`, "not a directory"}},
		{map[string]string{"volumeMode": "Block", "fsType": "ext4", "deviceDir": filepath.Dir(file), "deviceNameFilter": ".", "partitions": "all"},
			[]string{`fsType is "ext4"`, `partitions is "all"`}},
		{map[string]string{"volumeMode": "Raw", "deviceDir": file + "/none", "deviceNameFilter": "."}, []string{`volumeMode is "Raw"`, "deviceDir"}},
	} {
		_, err := devices.ParseConfig(c.data)
		if err == nil {
			t.Errorf("%v is accepted", c.data)
			continue
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%v: %v; want it to say %q", c.data, err, want)
			}
		}
	}
}

func TestVolumeName(t *testing.T) {
	long := strings.Repeat("n", 240)
	for _, c := range []struct{ node, path, taken, want string }{
		{"n1", "/dev/disk/by-path/pci-0000:3c:00.0-lun-0", "", "local-n1-pci-0000-3c-00.0-lun-0"},
		{"Node", "/dev/SDB", "", "local-node-sdb"},
		{"n1", "/dev/a--_b", "", "local-n1-a-b"},
		{"n1", "/dev/b/lun-0", "local-n1-lun-0", "local-n1-lun-0-dbfeeb0eb2"},
		{"n1", "/dev/a.:.b_", "", "local-n1-a-b"},
		{long, "/dev/sda-and-more-of-it", "", ""},
	} {
		got := devices.VolumeName(c.node, c.path, func(name string) bool { return name == c.taken })
		if c.want == "" {
			free := func(string) bool { return false }
			if len(got) != 253 || got == devices.VolumeName(long, "/dev/else/sda-and-more-of-it", free) || got == devices.VolumeName(long+"n", c.path, free) {
				t.Errorf("the name of a long one is %s", got)
			}
			continue
		}
		if got != c.want {
			t.Errorf("the name of %s is %s, want %s", c.path, got, c.want)
		}
	}
}
