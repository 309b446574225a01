package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) { Main(m) }

func TestFilesystemsAreRemovedAfterTest(t *testing.T) {
	for kind, mount := range map[string]func(testing.TB) string{
		"tmpfs":             func(t testing.TB) string { return Tmpfs(t, 16<<20) },
		"ext4":              func(t testing.TB) string { return LoopFS(t, "ext4", 16<<20) },
		"xfs":               func(t testing.TB) string { return LoopFS(t, "xfs", 300<<20, "noatime") },
		"btrfs":             func(t testing.TB) string { return LoopFS(t, "btrfs", 128<<20) },
		"btrfs with quotas": func(t testing.TB) string { return CountingBtrfs(t, 128<<20) },
	} {
		var dir string
		ran := t.Run(kind, func(t *testing.T) {
			dir = mount(t)
			wantMounts(t, dir, 1)
			if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
				t.Error(err)
			}
		})
		if ran && dir != "" {
			wantMounts(t, dir, 0)
		}
	}
}

func TestTmpfsSize(t *testing.T) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(Tmpfs(t, 3<<20), &fs); err != nil {
		t.Fatal(err)
	}
	if got := fs.Blocks * uint64(fs.Bsize); got != 3<<20 {
		t.Errorf("a tmpfs of 3 MiB has %d bytes", got)
	}
}

func TestMissingFailsInCI(t *testing.T) {
	for _, test := range []struct{ name, ci, want string }{
		{"skipped on a person's machine", "", "skipped: this test needs the program no-such-program"},
		{"failed in CI", "true", "failed: this test needs the program no-such-program, and in CI nothing is skipped"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("CI", test.ci)
			var spy spy
			NeedPrograms(&spy, "sh", "no-such-program")
			if spy.said != test.want {
				t.Errorf("NeedPrograms: %q, want %q", spy.said, test.want)
			}
		})
	}
}

// spy notes how a test would have ended.
type spy struct {
	testing.TB
	said string
}

func (s *spy) Helper()                           {}
func (s *spy) Skipf(format string, args ...any)  { s.note("skipped: " + fmt.Sprintf(format, args...)) }
func (s *spy) Fatalf(format string, args ...any) { s.note("failed: " + fmt.Sprintf(format, args...)) }

// note keeps the first end only, because the real one would not have returned.
func (s *spy) note(end string) {
	if s.said == "" {
		s.said = end
	}
}

func wantMounts(t *testing.T, dir string, want int) {
	t.Helper()
	found, err := mountns.Below(dir)
	if err != nil || len(found) != want {
		t.Errorf("mounts at %s: %s (%v), want %d", dir, strings.Join(found, " "), err, want)
	}
}
