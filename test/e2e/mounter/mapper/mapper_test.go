// Package mapper runs the pool mounter on what the kernel of the host may lack, in the guest of test/cmd/kernel: device mapper,
// multipath, NVMe and NFS, and the quotas of XFS and ext4.
package mapper

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib    = 1 << 20
	sector = 512
)

// program is where the guest has the mounter.
func program(t *testing.T) string {
	t.Helper()
	if !testenv.Guest() {
		t.Skip("this is not the guest of test/cmd/kernel")
	}
	return testenv.GuestVariable(t, "POOL_MOUNTER")
}

// backing is a loop device on a sparse file.
func backing(t *testing.T, bytes int64) string {
	t.Helper()
	return attach(t, sparse(t, bytes))
}

func sparse(t *testing.T, bytes int64) (file string) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "disk-")
	must.Succeed(t, err)
	must.Succeed(t, f.Truncate(bytes))
	must.Succeed(t, f.Close())
	return f.Name()
}

func attach(t *testing.T, file string) (device string) {
	t.Helper()
	loop, err := loopfs.Attach(file)
	must.Succeed(t, err)
	t.Cleanup(func() { loop.Close() })
	return loop.Name()
}

// mapped makes a device of a table until the test ends.
func mapped(t *testing.T, table string) (path string) {
	t.Helper()
	name := fmt.Sprintf("pool-%d", os.Getpid())
	run(t, table, "dmsetup", "create", "--noudevsync", "--verifyudev", name)
	t.Cleanup(func() { run(t, "", "dmsetup", "remove", "--noudevsync", "--retry", name) })
	return "/dev/mapper/" + name
}

func linear(device string, bytes int64) string {
	return fmt.Sprintf("0 %d linear %s 0", bytes/sector, device)
}

func run(t *testing.T, input, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(input)
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, output)
	}
	return string(output)
}

// target is where to mount, on a shared mount.
func target(t *testing.T) string {
	t.Helper()
	root := testenv.Tmpfs(t, 16*mib)
	must.Succeed(t, unix.Mount("", root, "", unix.MS_SHARED, ""))
	return filepath.Join(root, "csi")
}

// An XFS or ext4 on device mapper has its name on the host, enforces project quotas, and grows with the device.
func TestDeviceMapper(t *testing.T) {
	for _, kind := range []string{"xfs", "ext4"} {
		t.Run(kind, func(t *testing.T) {
			mounter, at := program(t), target(t)
			disk := backing(t, 600*mib)
			device := mapped(t, linear(disk, 400*mib))
			claim := claimOf(t, device)
			for _, bytes := range []int64{400 * mib, 600 * mib} {
				run(t, linear(disk, bytes), "dmsetup", "reload", "--noudevsync", filepath.Base(device))
				run(t, "", "dmsetup", "resume", "--noudevsync", filepath.Base(device))
				until(t, "fills the device", mounter, "mount", "--target", at, "--device", claim, "--fs-type", kind)
				wantMount(t, at, device, kind, bytes)
			}
			run(t, "", mounter, "unmount", "--target", at, "--device", claim, "--patience", "10s")
		})
	}
}

// until runs a mounter until it says something, and then ends it.
func until(t *testing.T, text, name string, args ...string) {
	t.Helper()
	p := start(t, name, args...)
	p.says(t, text)
	p.end(t)
}

// A process is a mounter at work.
type process struct {
	cmd    *exec.Cmd
	output io.Reader
	said   string
}

func start(t *testing.T, name string, args ...string) *process {
	t.Helper()
	p := &process{cmd: exec.CommandContext(t.Context(), name, args...)}
	var err error
	p.output, err = p.cmd.StderrPipe()
	must.Succeed(t, err)
	must.Succeed(t, p.cmd.Start())
	return p
}

// says waits until it has said something.
func (p *process) says(t *testing.T, text string) {
	t.Helper()
	for b := make([]byte, 4096); !strings.Contains(p.said, text); {
		n, err := p.output.Read(b)
		if p.said += string(b[:n]); err != nil {
			t.Fatalf("the mounter ends with %v, %v: %s", err, p.cmd.Wait(), p.said)
		}
	}
}

func (p *process) end(t *testing.T) {
	t.Helper()
	must.Succeed(t, p.cmd.Process.Signal(unix.SIGTERM))
	if err := p.cmd.Wait(); err != nil {
		t.Fatalf("the mounter: %v: %s", err, p.said)
	}
}

func wantMount(t *testing.T, at, device, kind string, bytes int64) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mounts") // fstab(5)
	must.Succeed(t, err)
	var found [][]string
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); fields[1] == at {
			found = append(found, fields)
		}
	}
	if len(found) != 1 || found[0][0] != device || found[0][2] != kind {
		t.Fatalf("mounted: %q; want one of %s, %s", found, device, kind)
	}
	if !strings.Contains(found[0][3], "prjquota") {
		t.Errorf("options %s, want prjquota", found[0][3])
	}
	var st unix.Statfs_t
	must.Succeed(t, unix.Statfs(at, &st))
	if size := int64(st.Blocks) * st.Bsize; size < bytes*4/5 {
		t.Errorf("the filesystem has %d MiB of a device of %d", size/mib, bytes/mib)
	}
}

// The disk below a device of device mapper is in use.
func TestDiskOfOtherDeviceIsNotFormatted(t *testing.T) {
	mounter, at := program(t), target(t)
	disk := backing(t, 400*mib)
	mapped(t, linear(disk, 400*mib))
	wantRefused(t, "in use by dm-", mounter, "mount", "--target", at, "--device", disk)
}
