package testenv

import (
	"fmt"
	"testing"
)

func TestMain(m *testing.M) { Main(m) }

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
