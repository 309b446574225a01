package blockdev

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// What sysfs has of volumes of LVM with snapshots is written here as the kernel and LVM do: no kernel of the tests has snapshots of device
// mapper.
func TestSnapshots(t *testing.T) {
	sys := t.TempDir()
	mapped := func(device, name, uuid string, slaves ...string) {
		at := filepath.Join(sys, device)
		for _, dir := range []string{"dm", "slaves", "holders"} {
			must.Succeed(t, os.MkdirAll(filepath.Join(at, dir), 0o700))
		}
		must.Succeed(t, os.WriteFile(filepath.Join(at, "dm", "name"), []byte(name+"\n"), 0o600))
		must.Succeed(t, os.WriteFile(filepath.Join(at, "dm", "uuid"), []byte(uuid+"\n"), 0o600))
		for _, slave := range slaves {
			must.Succeed(t, os.Symlink(filepath.Join(sys, slave), filepath.Join(at, "slaves", slave)))
			must.Succeed(t, os.Symlink(at, filepath.Join(sys, slave, "holders", device)))
		}
	}
	mapped("dm-0", "crypt", "CRYPT-LUKS2-0")
	mapped("dm-1", "vg-data-real", "LVM-v1-real", "dm-0")
	mapped("dm-2", "vg-data", "LVM-v1", "dm-1")
	mapped("dm-3", "vg-backup-cow", "LVM-v2-cow", "dm-0")
	mapped("dm-10", "vg-backup", "LVM-v2", "dm-1", "dm-3")
	mapped("dm-4", "vg-other", "LVM-v3", "dm-0")
	mapped("dm-5", "vg-pool-tpool", "LVM-v4-tpool", "dm-0")
	mapped("dm-6", "vg-thin", "LVM-v5", "dm-5")
	mapped("dm-7", "vg-thin-too", "LVM-v6", "dm-5")
	for device, want := range map[string][]string{
		"dm-2": {"dm-10 (vg-backup of device mapper, LVM)"}, "dm-10": {"dm-2 (vg-data of device mapper, LVM)"},
		"dm-4": nil, "dm-6": nil, "dm-0": nil,
	} {
		if got := snapshots(filepath.Join(sys, device)); !slices.Equal(got, want) {
			t.Errorf("those of %s are %q, want %q", device, got, want)
		}
	}
}
