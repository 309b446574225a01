package blockdev

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// What is written to a disk by another path is counted there, and so is what other parts of the disk are written.
func TestWrittenByAnotherPath(t *testing.T) {
	for name, c := range map[string]struct {
		dir string
		// files are of the device and those beside it, and written is which of them is written to.
		files   map[string]string
		written []string
		changes bool
	}{
		"a partition":                    {"sda/sda1", nil, []string{"sda/sda1", "sda"}, true},
		"its disk":                       {"sda/sda1", nil, []string{"sda"}, true},
		"its sibling":                    {"sda/sda1", nil, []string{"sda/sda2", "sda"}, false},
		"a path of a multipath device":   {"dm-0", map[string]string{"dm-0/dm/uuid": "mpath-3600a"}, []string{"sdb"}, true},
		"the disk of one that is mapped": {"dm-1", map[string]string{"dm-1/dm/uuid": "CRYPT-LUKS2-6ba1"}, []string{"sda"}, true},
		"another logical volume":         {"dm-2", map[string]string{"dm-2/dm/uuid": "LVM-a"}, []string{"sdc"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			put := func(file, content string) {
				file = filepath.Join(root, file)
				must.Succeed(t, os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte(content+"\n"), 0o600))
			}
			stat := func(device string, written int) {
				put(device+"/stat", fmt.Sprintf("9 9 9 9 %d 9 %d 9 9 9 9 1 9 2 9", written, 8*written))
			}
			for _, disk := range []string{"sda", "sdb", "sdc", "dm-0", "dm-1", "dm-2"} {
				put(disk+"/queue/iostats", "1")
				stat(disk, 5)
			}
			for _, part := range []string{"sda/sda1", "sda/sda2"} {
				put(part+"/partition", "1")
				put(part+"/dev", "8:1")
				stat(part, 1)
			}
			for mapped, device := range map[string]string{"dm-0": "sdb", "dm-1": "sda/sda1", "dm-2": "sdc"} {
				must.Succeed(t, os.MkdirAll(filepath.Join(root, mapped, "slaves"), 0o700), os.MkdirAll(filepath.Join(root, device, "holders"), 0o700),
					os.Symlink(filepath.Join(root, device), filepath.Join(root, mapped, "slaves", filepath.Base(device))),
					os.Symlink(filepath.Join(root, mapped), filepath.Join(root, device, "holders", mapped)))
			}
			for file, content := range c.files {
				put(file, content)
			}
			before := written(filepath.Join(root, c.dir))
			for _, device := range c.written {
				stat(device, map[bool]int{true: 6, false: 2}[filepath.Dir(device) == "."])
			}
			if after := written(filepath.Join(root, c.dir)); before == "" || (after != before) != c.changes {
				t.Errorf("%q was written, and before %q; want a change: %v", after, before, c.changes)
			}
		})
	}
}
