package privilege_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// child makes this test binary a program that drops its capabilities and prints what
// each of its threads has left.
const child = "PRIVILEGE_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(child) != "" {
		os.Exit(giveUp())
	}
	os.Exit(m.Run())
}

// fields are the lines of /proc/self/status about privileges.
var fields = []string{"CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:", "NoNewPrivs:"}

func giveUp() int {
	started, end := make(chan struct{}), make(chan struct{})
	defer close(end)
	for range 8 {
		go func() {
			runtime.LockOSThread()
			started <- struct{}{}
			<-end
		}()
		<-started
	}
	missing, err := privilege.Keep(privilege.Needed)
	if errors.Is(err, errors.ErrUnsupported) {
		fmt.Println("unsupported")
	} else if err != nil {
		fmt.Println(err)
		return 1
	}
	for _, c := range missing {
		fmt.Println("missing", c)
	}
	threads, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(threads) < 8 {
		fmt.Println(len(threads), "threads", err)
		return 1
	}
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println("thread", privileges(status))
	}
	return 0
}

func privileges(status []byte) string {
	var found []string
	for line := range strings.Lines(string(status)) {
		if words := strings.Fields(line); len(words) == 2 && slices.Contains(fields, words[0]) {
			found = append(found, words[0]+words[1])
		}
	}
	return strings.Join(found, " ")
}

// run runs a program as the child, and returns its distinct lines.
func run(t *testing.T, program string, wrapper ...string) []string {
	t.Helper()
	command := slices.Concat(wrapper, []string{program})
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Env = append(os.Environ(), child+"=1")
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	lines := make(map[string]bool)
	for line := range bytes.Lines(output) {
		lines[strings.TrimSpace(string(line))] = true
	}
	return slices.Sorted(maps.Keys(lines))
}

// static builds this package's test binary without cgo, like the driver. If this binary has
// cgo, it first checks that Keep drops nothing.
func static(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	must.Succeed(t, err)
	got := run(t, self)
	if !slices.Contains(got, "unsupported") {
		return self
	}
	here, err := os.ReadFile("/proc/self/status")
	must.Succeed(t, err)
	wantLines(t, got, "thread "+privileges(here), "unsupported")
	program := filepath.Join(t.TempDir(), "static.test")
	cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the test without cgo: %v\n%s", err, output)
	}
	return program
}

// left is the line of a thread with these permitted and effective capabilities.
func left(kept, bounding string) string {
	const none = "0000000000000000"
	return fmt.Sprintf("thread CapInh:%s CapPrm:%s CapEff:%s CapBnd:%s CapAmb:%s NoNewPrivs:1", none, kept, kept, bounding, none)
}

func TestKeep(t *testing.T) {
	if os.Geteuid() != 0 {
		testenv.Missing(t, "root")
	}
	testenv.NeedPrograms(t, "setpriv")
	program := static(t)
	// CAP_DAC_OVERRIDE is bit 1, CAP_FOWNER 3, CAP_KILL 5, CAP_SYS_ADMIN 21.
	const needed, fowner, fownerAndKill = "000000000020000a", "0000000000000008", "0000000000000028"
	without := []string{"missing CAP_DAC_OVERRIDE", "missing CAP_SYS_ADMIN"}
	t.Run("all threads keep what is needed", func(t *testing.T) {
		wantLines(t, run(t, program), left(needed, needed))
	})
	t.Run("missing capabilities are returned", func(t *testing.T) {
		got := run(t, program, "setpriv", "--bounding-set=-all,+fowner,+setpcap,+kill", "--inh-caps=-all,+kill", "--ambient-caps=+kill")
		wantLines(t, got, append(without, left(fowner, fowner))...)
	})
	t.Run("bounding set stays without CAP_SETPCAP", func(t *testing.T) {
		got := run(t, program, "setpriv", "--bounding-set=-all,+fowner,+kill")
		wantLines(t, got, append(without, left(fowner, fownerAndKill))...)
	})
}

func TestCapability_String(t *testing.T) {
	for c, want := range map[privilege.Capability]string{
		privilege.DACOverride: "CAP_DAC_OVERRIDE",
		privilege.Fowner:      "CAP_FOWNER",
		privilege.SysAdmin:    "CAP_SYS_ADMIN",
		40:                    "capability 40",
	} {
		if got := c.String(); got != want {
			t.Errorf("%d is called %s, want %s", int(c), got, want)
		}
	}
}

func wantLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("the program printed\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
