package quota_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The seccomp profile of the documentation refuses each ioctl(2) by which a user leaves a limit.
func TestDocumentedProfileRefusesWaysOutOfLimit(t *testing.T) {
	if testenv.Guest() {
		t.Skip("make test has it: the guest has no documents")
	}
	_, section, _ := strings.Cut(string(must.Value(os.ReadFile("../../../docs/quotas.md"))(t)), "## What is not enforced\n")
	for name, number := range map[string]uintptr{
		"FS_IOC_FSSETXATTR":          ioctl.SetFileAttr,
		"FS_IOC_SETFLAGS":            ioctl.Write | 8<<ioctl.Size | 'f'<<8 | 2,
		"FS_IOC32_SETFLAGS":          ioctl.Write | 4<<ioctl.Size | 'f'<<8 | 2,
		"BTRFS_IOC_SUBVOL_CREATE_V2": ioctl.CreateSubvolume,
		"BTRFS_IOC_SNAP_CREATE_V2":   ioctl.CreateSnapshot,
	} {
		if !strings.Contains(section, fmt.Sprintf("%#x", number)) {
			t.Errorf("docs/quotas.md does not name %s, %#x", name, number)
		}
	}
}
