// Package sandboxtest finds what a sandbox has on this machine, and what it has
// left there when it has ended.
package sandboxtest

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
)

// A Sandbox is a running one, or what is left of it.
type Sandbox struct {
	dir             string
	network, mounts string
}

// Find finds the sandbox of a program whose directory for temporary files is
// this one. Its program has to run inside already.
func Find(tmp string) (Sandbox, error) {
	dirs, err := filepath.Glob(filepath.Join(tmp, "hostpath-cluster-*"))
	if err != nil {
		return Sandbox{}, err
	}
	if len(dirs) != 1 {
		return Sandbox{}, fmt.Errorf("want one sandbox below %s, there is %q", tmp, dirs)
	}
	s := Sandbox{dir: dirs[0]}
	inside, err := s.process("inside")
	if err != nil {
		return Sandbox{}, err
	}
	s.network, err = os.Readlink(fmt.Sprintf("/proc/%d/ns/net", inside))
	if err != nil {
		return Sandbox{}, err
	}
	s.mounts, err = os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", inside))
	return s, err
}

// Kill kills its process that has a role: init or inside.
func (s Sandbox) Kill(role string) error {
	pid, err := s.process(role)
	if err != nil {
		return err
	}
	return syscall.Kill(pid, syscall.SIGKILL)
}

func (s Sandbox) process(role string) (int, error) {
	for _, environ := range s.processes() {
		text, err := os.ReadFile(environ)
		if err == nil && strings.Contains(string(text), "HOSTPATH_SANDBOX_ROLE="+role+"\x00") {
			return strconv.Atoi(filepath.Base(filepath.Dir(environ)))
		}
	}
	return 0, fmt.Errorf("no process of the sandbox at %s has the role %s", s.dir, role)
}

// processes are the environments of the processes that it has started.
func (s Sandbox) processes() []string {
	return filesThatName("/proc/[0-9]*/environ", "TMPDIR="+s.dir+"\x00")
}

// Glob lists files in its directory, as those inside see it: with what is mounted.
func (s Sandbox) Glob(pattern string) ([]string, error) {
	inside, err := s.process("inside")
	if err != nil {
		return nil, err
	}
	return filepath.Glob(filepath.Join(fmt.Sprintf("/proc/%d/root", inside), s.dir, pattern))
}

// Left lists what there is of it, by what it is. While it runs that is what it
// could leave.
func (s Sandbox) Left() (map[string][]string, error) {
	directories, err := filepath.Glob(s.dir)
	if err != nil {
		return nil, err
	}
	pattern := "/sys/fs/cgroup/*/"
	if sandbox.Unified() {
		pattern = "/sys/fs/cgroup/"
	}
	groups, err := filepath.Glob(pattern + filepath.Base(s.dir))
	return map[string][]string{
		"directories":      directories,
		"control groups":   groups,
		"processes":        s.processes(),
		"networks":         holdersOf(s.network), // with all bridges in there
		"mount namespaces": holdersOf(s.mounts),
		"mounts":           filesThatName("/proc/[0-9]*/mountinfo", " "+s.dir+"/"),
		"loop devices":     filesThatName("/sys/block/loop*/loop/backing_file", s.dir+"/"),
	}, err
}

// WantNothing waits until nothing is left: what cleans up outlives the program
// that was called if that is killed.
func (s Sandbox) WantNothing(t *testing.T) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		left, err := s.Left()
		if err != nil {
			t.Fatal(err)
		}
		maps.DeleteFunc(left, func(_ string, found []string) bool { return len(found) == 0 })
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left behind: %q", left)
		}
		time.Sleep(20 * time.Millisecond) // between two checks
	}
}

// filesThatName are those of the files that have a text in them. What is gone
// meanwhile is not among them.
func filesThatName(pattern, text string) []string {
	var found []string
	files, _ := filepath.Glob(pattern) // the patterns are right
	for _, file := range files {
		if content, err := os.ReadFile(file); err == nil && strings.Contains(string(content), text) {
			found = append(found, file)
		}
	}
	return found
}

// holdersOf are what keeps a namespace, such as net:[4026531840]: processes in it,
// and descriptors of it.
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
