package sandbox_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// messy tells the test's own program to make a mess in a sandbox.
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
	fmt.Println("ready", box.Dir, box.Cgroup, namespace("net"), namespace("mnt"))
	// Until somebody ends it, or says that it may.
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// namespace is the name of one of this program's, such as net:[4026531840].
func namespace(kind string) string {
	name, err := os.Readlink("/proc/self/ns/" + kind)
	if err != nil {
		return err.Error()
	}
	return name
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
	// Nothing that is told to its group reaches this one.
	orphan := exec.Command("sleep", "infinity")
	orphan.Dir = disk
	orphan.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := orphan.Start(); err != nil {
		return err
	}
	return os.WriteFile("/sys/fs/cgroup/pids"+group+"/cgroup.procs", []byte(strconv.Itoa(orphan.Process.Pid)), 0)
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
func TestNothingIsLeft(t *testing.T) {
	testenv.NeedRoot(t)
	for name, end := range map[string]func(outside *os.Process, stdin io.Closer, dir string) error{
		"when the program ends":     func(_ *os.Process, stdin io.Closer, _ string) error { return stdin.Close() },
		"when it is interrupted":    func(p *os.Process, _ io.Closer, _ string) error { return p.Signal(syscall.SIGINT) },
		"when it is terminated":     func(p *os.Process, _ io.Closer, _ string) error { return p.Signal(syscall.SIGTERM) },
		"when it is killed":         func(p *os.Process, _ io.Closer, _ string) error { return p.Kill() },
		"when process 1 is killed":  func(_ *os.Process, _ io.Closer, dir string) error { return killRole(dir, "init") },
		"when all inside is killed": func(_ *os.Process, _ io.Closer, dir string) error { return killRole(dir, "inside") },
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
			said := strings.Fields(line)
			if err != nil || len(said) != 5 || said[0] != "ready" {
				t.Fatalf("the program says %q, %v", line, err)
			}
			made := remains{dir: said[1], group: said[2], network: said[3], mounts: said[4]}
			for what, found := range made.all() {
				if len(found) == 0 {
					t.Errorf("%s would not be found if they were left", what)
				}
			}
			if err := end(cmd.Process, stdin, said[1]); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // its status differs
			wantNothing(t, made)
		})
	}
}

// killRole kills the process of a sandbox that has this role.
func killRole(dir, role string) error {
	for _, environ := range processesOf(dir) {
		text, err := os.ReadFile(environ)
		if err != nil || !strings.Contains(string(text), "HOSTPATH_SANDBOX_ROLE="+role+"\x00") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(environ)))
		if err != nil {
			return err
		}
		return syscall.Kill(pid, syscall.SIGKILL)
	}
	return fmt.Errorf("no process of the sandbox at %s has the role %s", dir, role)
}

// processesOf are the environments of the processes of a sandbox.
func processesOf(dir string) []string {
	return filesThatName("/proc/[0-9]*/environ", "TMPDIR="+dir+"\x00")
}

func filesThatName(pattern, mark string) []string {
	var found []string
	files, _ := filepath.Glob(pattern)
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && strings.Contains(string(text), mark) {
			found = append(found, file)
		}
	}
	return found
}

// wantNothing waits for the keeper, which outlives the program that was called.
func wantNothing(t *testing.T, made remains) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		left := made.all()
		maps.DeleteFunc(left, func(_ string, found []string) bool { return len(found) == 0 })
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: %q", left)
		}
		time.Sleep(20 * time.Millisecond) // between two looks
	}
}

// remains are what a sandbox could leave: the names of its directory, its control group
// and its namespaces.
type remains struct{ dir, group, network, mounts string }

// all lists what there is of a sandbox. Its bridge is there as long as its network is.
func (r remains) all() map[string][]string {
	directories, _ := filepath.Glob(r.dir)
	groups, _ := filepath.Glob("/sys/fs/cgroup/*" + r.group)
	return map[string][]string{
		"directories":      directories,
		"control groups":   groups,
		"processes":        processesOf(r.dir),
		"networks":         holdersOf(r.network),
		"mount namespaces": holdersOf(r.mounts),
		"mounts":           filesThatName("/proc/[0-9]*/mountinfo", " "+r.dir+"/"),
		"loop devices":     filesThatName("/sys/block/loop*/loop/backing_file", r.dir+"/"),
	}
}

// holdersOf are what keeps a namespace: processes in it, and descriptors of it.
func holdersOf(namespace string) []string {
	var found []string
	kind, _, _ := strings.Cut(namespace, ":")
	for _, pattern := range []string{"/proc/[0-9]*/ns/" + kind, "/proc/[0-9]*/fd/*"} {
		links, _ := filepath.Glob(pattern)
		for _, link := range links {
			if name, err := os.Readlink(link); err == nil && name == namespace {
				found = append(found, link)
			}
		}
	}
	return found
}
