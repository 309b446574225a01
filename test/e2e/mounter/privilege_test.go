package mounter

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// needs are what each capability is for: functions that run the mounter in a pod, and check that it can do that, or that it
// cannot.
var needs = map[privilege.Capability]func(t *testing.T, p confined, can bool){
	privilege.SysAdmin:    mounts,
	privilege.DACOverride: mountsInDirectoryOfUser,
	privilege.MakeNode:    showsNameOfHost,
	privilege.SysResource: growsMounted,
}

// The mounter gives up all capabilities but four. With these it can do everything, and of these it needs each.
func TestRequiredCapabilities(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "setpriv", "mknod")
	for _, c := range privilege.ForMounter {
		t.Run(c.String(), func(t *testing.T) {
			need := needs[c]
			if need == nil {
				t.Fatal("nothing is known that needs it")
			}
			// Not even root has this one everywhere. TestDeviceMapper grows a mounted ext4 in the guest, where root does.
			need(t, newConfined(t, ""), c != privilege.SysResource || hasSysResource(t))
			need(t, newConfined(t, strings.ToLower(strings.TrimPrefix(c.String(), "CAP_"))), false)
		})
	}
}

// A confined host is one whose pods may lack a capability. They have a /dev of their own, with the claim's device and
// nothing of the host's, as containers do.
type confined struct {
	*host
	disk  *disk
	setup string
}

func newConfined(t *testing.T, lacking string) confined {
	t.Helper()
	p := confined{host: newHost(t), disk: newDisk(t, 64*mib)}
	var info unix.Stat_t
	must.Succeed(t, unix.Stat(p.disk.Path, &info))
	p.setup = fmt.Sprintf("mount -t tmpfs none /dev\nmknod -m 666 /dev/null c 1 3\nmknod /dev/pool b %d %d", unix.Major(info.Rdev), unix.Minor(info.Rdev))
	if lacking != "" {
		p.setup += "\n" + `set -- setpriv --bounding-set=-` + lacking + ` "$@"`
	}
	return p
}

// mount starts a mounter that tries once, and reports whether the pool is mounted then.
func (p confined) mount() (*pod, bool) {
	p.t.Helper()
	started := p.start(p.setup, "mount", "--device", "/dev/pool", "--fs-type", "ext4", "--check-interval", "100ms", "--patience", "0")
	return started, started.saysOrEnds(keeping)
}

func mounts(t *testing.T, p confined, can bool) {
	t.Helper()
	started, did := p.mount()
	if did != can {
		t.Fatalf("mounted: %v, want %v", did, can)
	}
	if can {
		p.wantMounted("ext4")
		started.stop(syscall.SIGTERM)
		if status, said := p.run(p.setup, "unmount", "--device", "/dev/pool", "--patience", "0"); status != 0 {
			t.Errorf("unmount: status %d, %s", status, said)
		}
	}
	p.wantUnmounted()
}

func mountsInDirectoryOfUser(t *testing.T, p confined, can bool) {
	t.Helper()
	const user = 1000
	must.Succeed(t, os.Chown(p.Path, user, user))
	must.Succeed(t, os.Chmod(p.Path, 0o700))
	mounts(t, p, can)
}

func showsNameOfHost(t *testing.T, p confined, can bool) {
	t.Helper()
	if _, did := p.mount(); !did {
		t.Fatal("not mounted")
	}
	if source := p.mounts()[0].Source; (source == p.disk.Path) != can {
		t.Errorf("the host sees %s mounted, which is to be its %s: %v", source, p.disk.Path, can)
	}
}

func growsMounted(t *testing.T, p confined, can bool) {
	t.Helper()
	started, did := p.mount()
	if !did {
		t.Fatal("not mounted")
	}
	must.Succeed(t, os.WriteFile(filepath.Join(p.Target, "file"), nil, 0o600))
	p.disk.grow(128 * mib)
	if !can {
		started.says("Failed to grow the filesystem", 1)
		p.wantMounted("ext4")
		return
	}
	started.says("bytes=134217728", 1)
	var st unix.Statfs_t
	must.Succeed(t, unix.Statfs(p.Target, &st))
	if size := st.Blocks * uint64(st.Bsize); size < 100*mib {
		t.Errorf("the filesystem has %d MiB of a device with 128", size/mib)
	}
}
