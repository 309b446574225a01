// Package lab tests that the virtual machine of test/cmd/kernel is what that promises
// to the tests which run in it.
package lab

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// needGuest skips a test on the host, where the tests of package kernel see to it
// that this one is run in the guest.
func needGuest(t *testing.T) {
	t.Helper()
	if !testenv.Guest() {
		t.Skip("this is not the guest of test/cmd/kernel")
	}
}

func needSELinux(t *testing.T) {
	t.Helper()
	needGuest(t)
	if os.Getenv("HOSTPATH_KERNEL_SELINUX") == "" {
		t.Skip("the guest was started without SELinux")
	}
}

// A filesystem is one of the guest's disks.
type filesystem struct {
	kind string
	path string
	// full is the error of a program that wants more than its limit.
	full string
}

func filesystems() []filesystem {
	return []filesystem{
		{"xfs", os.Getenv("HOSTPATH_KERNEL_XFS"), "No space left on device"},
		{"ext4", os.Getenv("HOSTPATH_KERNEL_EXT4"), "Disk quota exceeded"},
	}
}

// A mount is a line of /proc/1/mounts.
type mount struct {
	device, kind string
	options      []string
}

func mountAt(t *testing.T, path string) mount {
	t.Helper()
	file, err := os.Open("/proc/1/mounts")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if f := strings.Fields(lines.Text()); f[1] == path {
			return mount{f[0], f[2], strings.Split(f[3], ",")}
		}
	}
	t.Fatalf("nothing is mounted on %q", path)
	return mount{}
}

func freshDirectory(t *testing.T, in string) string {
	t.Helper()
	dir, err := os.MkdirTemp(in, "lab-") //nolint:usetesting // t.TempDir is on one filesystem
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestProjectQuotaOnXFSAndExt4(t *testing.T) {
	needGuest(t)
	for _, fs := range filesystems() {
		t.Run(fs.kind, func(t *testing.T) {
			m := mountAt(t, fs.path)
			if m.kind != fs.kind || !slices.Contains(m.options, "prjquota") {
				t.Fatalf("%s has %+v, want %s with prjquota", fs.path, m, fs.kind)
			}
			dir, other := freshDirectory(t, fs.path), freshDirectory(t, fs.path)
			const limit = 4 << 20
			setProject(t, dir, 4711)
			setLimit(t, m.device, 4711, limit)
			fill(t, dir, 2, "")
			fill(t, dir, 4, fs.full)
			fill(t, other, 8, "")

			var s syscall.Statfs_t
			if err := syscall.Statfs(dir, &s); err != nil || s.Blocks*uint64(s.Bsize) != limit {
				t.Errorf("statfs shows %d bytes, %v; want %d", s.Blocks*uint64(s.Bsize), err, limit)
			}
		})
	}
}

// fill writes megabytes into a directory, and wants dd to say that, or success. Not
// root does it: ext4 lets that exceed any limit.
func fill(t *testing.T, dir string, megabytes int, complaint string) {
	t.Helper()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	file, err := os.CreateTemp(dir, "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd := exec.CommandContext(t.Context(), "dd", "if=/dev/zero", "bs=64k", "conv=fsync", "count="+strconv.Itoa(megabytes*16))
	cmd.Stdout = file
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	var said strings.Builder
	cmd.Stderr = &said
	err = cmd.Run()
	if complaint == "" && err != nil || complaint != "" && !strings.Contains(said.String(), complaint) {
		t.Errorf("dd of %d MiB: %v: %s; want %q", megabytes, err, said.String(), complaint)
	}
}

func TestXFSClonesFiles(t *testing.T) {
	needGuest(t)
	dir := freshDirectory(t, os.Getenv("HOSTPATH_KERNEL_XFS"))
	from, err := os.Create(filepath.Join(dir, "from"))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	if _, err := from.WriteString("content"); err != nil {
		t.Fatal(err)
	}
	to, err := os.Create(filepath.Join(dir, "to"))
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if err := ioctl(to, ficlone, from.Fd()); err != nil {
		t.Fatal(err)
	}
	if content, err := os.ReadFile(to.Name()); err != nil || string(content) != "content" {
		t.Errorf("the clone has %q, %v", content, err)
	}
}

func TestFilesystemsOnLoopDevices(t *testing.T) {
	needGuest(t)
	for _, kind := range []string{"xfs", "ext4", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			dir := testenv.LoopFS(t, kind, 512<<20)
			if err := os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestModulesLoadOnDemand(t *testing.T) {
	needGuest(t)
	for _, device := range []string{"/dev/fuse", "/dev/loop-control", "/dev/mapper/control", "/dev/btrfs-control"} {
		file, err := os.OpenFile(device, os.O_RDWR, 0)
		if err != nil {
			t.Error(err)
			continue
		}
		file.Close()
	}
	dir := testenv.Tmpfs(t, 1<<20)
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	merged := filepath.Join(dir, "merged")
	options := strings.ReplaceAll("lowerdir=DIR/lower,upperdir=DIR/upper,workdir=DIR/work", "DIR", dir)
	if err := syscall.Mount("overlay", merged, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Unmount(merged, 0); err != nil {
		t.Error(err)
	}
}

func TestNodeFacilities(t *testing.T) {
	needGuest(t)
	if kind := mountAt(t, "/tmp").kind; kind != "tmpfs" {
		t.Errorf("/tmp is %s", kind)
	}
	mounts, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	// The fifth field is where a mount is, and the optional ones say whether it is shared; see
	// proc_pid_mountinfo(5).
	if !regexp.MustCompile(`(?m)^\S+ \S+ \S+ \S+ / .* shared:`).Match(mounts) {
		t.Errorf("/ is not shared:\n%s", mounts)
	}
	testenv.NeedPrograms(t, "sh", "busybox", "mount", "umount", "findmnt", "losetup",
		"mkfs.xfs", "mkfs.ext4", "mkfs.btrfs", "btrfs", "setfattr", "chcon", "runcon")
}

// label labels a path with a type and a level.
func label(t *testing.T, path, kind, level string) {
	t.Helper()
	if err := syscall.Setxattr(path, "security.selinux", []byte("system_u:object_r:"+kind+":"+level), 0); err != nil {
		t.Fatalf("label %s: %v", path, err)
	}
}

func TestSELinuxConfinesContainersToTheirCategories(t *testing.T) {
	needSELinux(t)
	for _, in := range []string{os.Getenv("HOSTPATH_KERNEL_XFS"), os.Getenv("HOSTPATH_KERNEL_EXT4"), os.TempDir()} {
		t.Run(in, func(t *testing.T) {
			dir := freshDirectory(t, in)
			if err := os.Chmod(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			for name, test := range map[string]struct {
				kind, level string
				want        string
			}{
				"own":       {"container_file_t", "s0:c1,c1023", "allowed"},
				"shared":    {"container_file_t", "s0", "allowed"},
				"part":      {"container_file_t", "s0:c1", "allowed"},
				"other":     {"container_file_t", "s0:c2,c3", "denied"},
				"too much":  {"container_file_t", "s0:c1,c2,c1023", "denied"},
				"pool":      {"var_t", "s0", "denied"},
				"unlabeled": {"unlabeled_t", "s0", "denied"},
			} {
				path := filepath.Join(dir, name)
				makeLabelled(t, path, test.kind, test.level)
				for act, got := range actAsContainer(t, path, "s0:c1,c1023") {
					if got != test.want {
						t.Errorf("%s in %s was %s, want %s", act, name, got, test.want)
					}
				}
			}
		})
	}
}

// acts are what a container may try in a directory of makeLabelled.
var acts = []string{"ls", "cat old", "echo >>old", "echo >new", "mkdir newer", "chmod 700 old", "mv doomed moved", "rm old"}

// makeLabelled makes a directory with files, all of one label.
func makeLabelled(t *testing.T, dir, kind, level string) {
	t.Helper()
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"old", "doomed"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("content"), 0o666); err != nil {
			t.Fatal(err)
		}
		label(t, filepath.Join(dir, name), kind, level)
	}
	label(t, dir, kind, level)
}

// actAsContainer returns which of the acts were "allowed" and which "denied".
func actAsContainer(t *testing.T, dir, level string) map[string]string {
	t.Helper()
	// One process for all of them: to start one takes a tenth of a second here.
	var script strings.Builder
	for _, act := range acts {
		script.WriteString("{ " + act + "; } >/dev/null 2>&1 && echo allowed || echo denied\n")
	}
	cmd := exec.CommandContext(t.Context(), "runcon", "-t", "container_t", "-l", level, "sh", "-c", script.String())
	cmd.Dir = dir
	output, err := cmd.CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(output)), "\n")
	if err != nil || len(lines) != len(acts) {
		t.Fatalf("run as a container: %v: %s", err, output)
	}
	results := map[string]string{}
	for i, act := range acts {
		results[act] = lines[i]
	}
	return results
}

func TestSELinuxEnforcesButTestIsUnconfined(t *testing.T) {
	needSELinux(t)
	if enforcing, err := os.ReadFile("/sys/fs/selinux/enforce"); err != nil || string(enforcing) != "1" {
		t.Errorf("enforce is %q, %v", enforcing, err)
	}
	if domain, err := os.ReadFile("/proc/self/attr/current"); err != nil || strings.TrimRight(string(domain), "\x00\n") != "system_u:system_r:spc_t:s0" {
		t.Errorf("this process is %q, %v", domain, err)
	}
	file := filepath.Join(freshDirectory(t, os.Getenv("HOSTPATH_KERNEL_XFS")), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if got := labelOf(t, file); got != "system_u:object_r:unlabeled_t:s0" {
		t.Errorf("a new file is %s", got)
	}
	misspelt := []byte("system_u:object_r:containers_file_t:s0")
	if err := syscall.Setxattr(file, "security.selinux", misspelt, 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a misspelt label: %v", err)
	}
}

func TestSELinuxLabelOfNewFiles(t *testing.T) {
	needSELinux(t)
	dir := freshDirectory(t, os.Getenv("HOSTPATH_KERNEL_EXT4"))
	label(t, dir, "container_file_t", "s0:c1,c2")
	ours, theirs := filepath.Join(dir, "ours"), filepath.Join(dir, "theirs")
	if err := os.WriteFile(ours, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if output, err := exec.CommandContext(t.Context(), "runcon", "-t", "container_t", "-l", "s0:c1,c2", "touch", theirs).CombinedOutput(); err != nil {
		t.Fatalf("touch: %v: %s", err, output)
	}
	if got, want := labelOf(t, ours), "system_u:object_r:container_file_t:s0"; got != want {
		t.Errorf("a file of ours is %s, want %s", got, want)
	}
	if got, want := labelOf(t, theirs), "system_u:object_r:container_file_t:s0:c1,c2"; got != want {
		t.Errorf("a file of a container is %s, want %s", got, want)
	}
}

func labelOf(t *testing.T, path string) string {
	t.Helper()
	buffer := make([]byte, 256)
	n, err := syscall.Getxattr(path, "security.selinux", buffer)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimRight(string(buffer[:n]), "\x00")
}

func TestSELinuxDisabled(t *testing.T) {
	needGuest(t)
	if os.Getenv("HOSTPATH_KERNEL_SELINUX") != "" {
		t.Skip("the guest was started with SELinux")
	}
	if _, err := os.Stat("/sys/fs/selinux/enforce"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stat enforce: %v", err)
	}
}
