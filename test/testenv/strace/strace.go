// Package strace lists the system calls that a test makes in phases of its own.
package strace

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// in is the directory that the traced process has, which is this program once more.
const in = "HOSTPATH_TRACED"

// Traced returns the directory that Calls was called with, in the process that is traced, and otherwise nothing.
func Traced() string { return os.Getenv(in) }

// marker begins the name of a file that is searched for where a phase begins, and alone where it ends.
const marker = "/hostpath-traced/"

// Mark begins a phase, in the process that is traced, and ends the last. An empty one is none.
func Mark(phase string) { _, _ = os.Lstat(marker + phase) }

// ofRuntime are calls that Go makes when it likes.
var ofRuntime = regexp.MustCompile(`^(futex|nanosleep|clock_nanosleep|epoll_\w+|sched_\w+|madvise|mmap|munmap|mprotect|rt_\w+|tgkill|gettid|getpid|clone3?|sigaltstack|prctl|rseq|set_robust_list|exit|restart_syscall)\(`)

// call is a line of strace -f that begins one.
var call = regexp.MustCompile(`^\d+\s+(\w+\(.*)`)

// Calls runs the test that calls it in a process of its own with a directory, and returns what that calls meanwhile, for each
// time and phase.
func Calls(t *testing.T, dir string) map[string][][]string {
	t.Helper()
	testenv.NeedPrograms(t, "strace")
	self, err := os.Executable()
	must.Succeed(t, err)
	trace := filepath.Join(t.TempDir(), "trace")
	// -y names the files of descriptors.
	cmd := exec.CommandContext(t.Context(), "strace", "-f", "-qq", "-y", "-o", trace, self, "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), in+"="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f, err := os.Open(trace)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, f.Close()) }()
	calls := make(map[string][][]string)
	var phase string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		begun := call.FindStringSubmatch(lines.Text())
		switch {
		case begun == nil, ofRuntime.MatchString(begun[1]):
		case strings.Contains(begun[1], `"`+marker):
			_, next, _ := strings.Cut(begun[1], marker)
			if phase, _, _ = strings.Cut(next, `"`); phase != "" {
				calls[phase] = append(calls[phase], nil)
			}
		case phase != "":
			last := &calls[phase][len(calls[phase])-1]
			*last = append(*last, begun[1])
		}
	}
	return calls
}
