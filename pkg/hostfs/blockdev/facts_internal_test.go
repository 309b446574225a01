package blockdev

import (
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A vendor may give all its disks one name, and kpartx gives a partition its number. By such a thing a disk is not known again, and all that
// have it are left alone together.
func TestWhatOthersHaveTooIsNoIdentity(t *testing.T) {
	const qemu = "t10.ATA     QEMU HARDDISK                           QM00001             "
	const ata = "t10.ATA     DISK OF A MAKER                         4711-A              "
	page80 := func(serial string) string { return "\x00\x80\x00" + string(rune(len(serial))) + serial }
	for name, c := range map[string]struct {
		files map[string]string
		dir   string
		alike string
		is    bool
	}{
		"a world wide name":                    {map[string]string{"device/wwid": "naa.600a"}, "", "wwid=naa.600a", true},
		"nothing":                              {nil, "", "", false},
		"a name with the serial number":        {map[string]string{"device/wwid": ata, "device/vpd_pg80": page80("4711-A              ")}, "", "wwid=t10.ATA     DISK OF A MAKER                         4711-A", true},
		"a name with its place in QEMU":        {map[string]string{"device/wwid": qemu, "device/vpd_pg80": page80("QM00001             ")}, "", "wwid=t10.ATA     QEMU HARDDISK                           QM00001", false},
		"a name of the vendor":                 {map[string]string{"device/wwid": "t10.VENDOR  DISK"}, "", "wwid=t10.VENDOR  DISK", false},
		"a name without the serial number":     {map[string]string{"device/wwid": "t10.VENDOR  DISK", "device/vpd_pg80": page80("4711")}, "", "wwid=t10.VENDOR  DISK", false},
		"a serial number of zeroes":            {map[string]string{"device/wwid": "t10.VENDOR  0000", "device/vpd_pg80": page80("0000")}, "", "wwid=t10.VENDOR  0000", false},
		"a partition of a disk with a number":  {map[string]string{"device/wwid": ata, "device/vpd_pg80": page80("4711-A"), "sda2/partition": "2"}, "sda2", "wwid=t10.ATA     DISK OF A MAKER                         4711-A#2", true},
		"a partition of one of a vendor":       {map[string]string{"device/wwid": "t10.VENDOR  DISK", "sda2/partition": "2"}, "sda2", "wwid=t10.VENDOR  DISK#2", false},
		"multipath":                            {map[string]string{"dm/uuid": "mpath-3600a"}, "", "uuid=mpath-3600a", true},
		"multipath with the serial number":     {map[string]string{"dm/uuid": "mpath-1ATA_DISK_4711-A", "slaves/sda/device/vpd_pg80": page80("4711-A  ")}, "", "uuid=mpath-1ATA_DISK_4711-A", true},
		"multipath of disks with a name alike": {map[string]string{"dm/uuid": "mpath-1VENDOR_DISK", "slaves/sda/device/vpd_pg80": page80("4711")}, "", "uuid=mpath-1VENDOR_DISK", false},
		"a world wide name of zeroes":          {map[string]string{"device/wwid": "naa.0000000000000000"}, "", "wwid=naa.0000000000000000", false},
		"a card without a number":              {map[string]string{"device/serial": "0x00000000"}, "", "serial=0x00000000", false},
		"a logical volume":                     {map[string]string{"dm/uuid": "LVM-vEi3SUw4gKPpfhwJOJ7ZAmZdGzFIXpHCMYLjV5vMbUjQ1qJFpaIPTYPW2dZqqa3o"}, "", "uuid=LVM-vEi3SUw4gKPpfhwJOJ7ZAmZdGzFIXpHCMYLjV5vMbUjQ1qJFpaIPTYPW2dZqqa3o", true},
		"LUKS":                                 {map[string]string{"dm/uuid": "CRYPT-LUKS2-6ba1bc3c0b3e4a9bb8e4c4b2ea2e1a0f-data"}, "", "uuid=CRYPT-LUKS2-6ba1bc3c0b3e4a9bb8e4c4b2ea2e1a0f-data", true},
		"encrypted, known by its name":         {map[string]string{"dm/uuid": "CRYPT-PLAIN-data"}, "", "uuid=CRYPT-PLAIN-data", false},
		"integrity, known by its name":         {map[string]string{"dm/uuid": "CRYPT-INTEGRITY-data"}, "", "uuid=CRYPT-INTEGRITY-data", false},
		"of another program of device mapper":  {map[string]string{"dm/uuid": "data"}, "", "uuid=data", false},
		"a loop device":                        {map[string]string{"loop/backing_file": "/disk.img"}, "", "backing_file=/disk.img", false},
		"a partition of a loop device":         {map[string]string{"loop/backing_file": "/disk.img", "loop0p2/partition": "2"}, "loop0p2", "backing_file=/disk.img#2", false},
		"a partition of kpartx":                {map[string]string{"dm/uuid": "part2-mpath-3600a"}, "", "uuid=part2-mpath-3600a", false},
	} {
		t.Run(name, func(t *testing.T) {
			disk := t.TempDir()
			for file, content := range c.files {
				file = filepath.Join(disk, file)
				must.Succeed(t, os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(content+"\n"), 0o600))
			}
			dir := filepath.Join(disk, c.dir)
			alike := likeness(dir)
			if is := isIdentity(dir, alike); alike != c.alike || is != c.is {
				t.Errorf("it is known by %q, an identity: %v; want %q, %v", alike, is, c.alike, c.is)
			}
		})
	}
}
