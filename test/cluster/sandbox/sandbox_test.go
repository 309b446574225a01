package sandbox_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox/sandboxtest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// messy has the test's own program make a mess in a sandbox.
const messy = "HOSTPATH_SANDBOX_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(messy) == "" {
		testenv.Main(m)
	}
	box := sandbox.Enter()
	if err := makeMess(box); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ready")
	// Until it is ended, or may end.
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// makeMess makes one of everything that a cluster could leave behind.
func makeMess(box *sandbox.Sandbox) error {
	disk := filepath.Join(box.Dir, "disk")
	if err := os.Mkdir(disk, 0o755); err != nil {
		return err
	}
	ctx := context.Background()
	cmd := exec.CommandContext(ctx, "ip", "link", "add", "hostpath-test", "type", "bridge")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", cmd.Args, err, out)
	}
	if err := loopfs.Mount(ctx, disk, "ext4", 16<<20); err != nil {
		return err
	}
	if err := attachDevice(disk); err != nil {
		return err
	}
	group, err := box.Subgroup("deep")
	if err != nil {
		return err
	}
	// No signal to its group reaches this one.
	orphan := exec.Command("sleep", "infinity")
	orphan.Dir = disk
	orphan.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := orphan.Start(); err != nil {
		return err
	}
	hierarchy := "/sys/fs/cgroup/pids"
	if sandbox.Unified() {
		hierarchy = "/sys/fs/cgroup"
	}
	return os.WriteFile(hierarchy+group+"/cgroup.procs", []byte(strconv.Itoa(orphan.Process.Pid)), 0)
}

// attachDevice makes a block volume, whose device the product leaves attached when
// it is killed.
func attachDevice(disk string) error {
	d, err := dir.Open(disk)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	file, err := loop.Create(d, "disk.img")
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	if err := file.Grow(context.Background(), 1<<20, loop.Thin); err != nil {
		return err
	}
	dev, err := dir.Open("/dev")
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	device, err := loop.NewKernel(dev).Attach(file, loop.Options{Discard: true})
	if err != nil {
		return err
	}
	// As kubelet does.
	if out, err := exec.Command("losetup", "--find", "/dev/"+device.Name).CombinedOutput(); err != nil {
		return fmt.Errorf("losetup on %s: %w: %s", device.Name, err, out)
	}
	return nil
}

// However a sandbox ends, the machine is as it was.
func TestSandboxLeavesNothingBehind(t *testing.T) {
	testenv.NeedRoot(t)
	for name, end := range map[string]func(outside *os.Process, stdin io.Closer, box sandboxtest.Sandbox) error{
		"when the program ends":     func(_ *os.Process, stdin io.Closer, _ sandboxtest.Sandbox) error { return stdin.Close() },
		"when it is interrupted":    func(p *os.Process, _ io.Closer, _ sandboxtest.Sandbox) error { return p.Signal(syscall.SIGINT) },
		"when it is terminated":     func(p *os.Process, _ io.Closer, _ sandboxtest.Sandbox) error { return p.Signal(syscall.SIGTERM) },
		"when it is killed":         func(p *os.Process, _ io.Closer, _ sandboxtest.Sandbox) error { return p.Kill() },
		"when process 1 is killed":  func(_ *os.Process, _ io.Closer, box sandboxtest.Sandbox) error { return box.Kill("init") },
		"when all inside is killed": func(_ *os.Process, _ io.Closer, box sandboxtest.Sandbox) error { return box.Kill("inside") },
	} {
		t.Run(name, func(t *testing.T) {
			tmp := t.TempDir()
			cmd := exec.Command("/proc/self/exe")
			cmd.Env = append(os.Environ(), messy+"=1", "TMPDIR="+tmp)
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			cmd.Stderr = os.Stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(stdout).ReadString('\n')
			if err != nil || line != "ready\n" {
				t.Fatalf("the program says %q, %v", line, err)
			}
			box, err := sandboxtest.Find(tmp)
			if err != nil {
				t.Fatal(err)
			}
			made, err := box.Left()
			if err != nil {
				t.Fatal(err)
			}
			for what, found := range made {
				if len(found) == 0 {
					t.Errorf("%s would not be found if they were left", what)
				}
			}
			if err := end(cmd.Process, stdin, box); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // its status differs
			box.WantNothing(t)
		})
	}
}

// Inside, what a program works with has to be what it is outside: in a repository that
// is hidden there a person would see neither the logs nor that a cluster is up.
func TestHiddenPathsAreRefused(t *testing.T) {
	hidden, err := os.MkdirTemp("/var/tmp", "hostpath-sandbox-") //nolint:usetesting // it has to be below /var
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(hidden) })
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(hidden, link); err != nil {
		t.Fatal(err)
	}
	for name, place := range map[string]struct{ dir, tmp, want string }{
		"where it is started":         {hidden, t.TempDir(), "start it from elsewhere"},
		"where temporary files are":   {t.TempDir(), hidden, "set TMPDIR"},
		"by a link, where it starts":  {link, t.TempDir(), "start it from elsewhere"},
		"by a link, of its own files": {t.TempDir(), link, "set TMPDIR"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
			cmd.Dir = place.dir
			cmd.Env = append(os.Environ(), messy+"=1", "TMPDIR="+place.tmp, "PWD="+place.dir)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || !strings.Contains(string(out), place.want) || !strings.Contains(string(out), "below /var") {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

func TestMissingControlGroupsAreReported(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "unshare", "umount")
	tmp := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", `umount --lazy --recursive /sys/fs/cgroup && exec "$0"`, "/proc/self/exe")
	// /proc/self is the shell there.
	cmd.Args[len(cmd.Args)-1] = fmt.Sprintf("/proc/%d/exe", os.Getpid())
	cmd.Env = append(os.Environ(), messy+"=1", "TMPDIR="+tmp)
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no control groups are mounted at /sys/fs/cgroup") {
		t.Errorf("%v: %s", err, out)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
