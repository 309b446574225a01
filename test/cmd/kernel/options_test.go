package main

import (
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// program makes a file that may be run.
func programFile(t *testing.T, name, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestParseTakesOneProgramWithAllItsArguments(t *testing.T) {
	t.Setenv("PASSED", "on")
	file := programFile(t, "a.test", "")
	t.Chdir(t.TempDir())
	if err := os.Mkdir("testdata", 0o755); err != nil {
		t.Fatal(err)
	}
	o, err := parse([]string{"--env=A=b c", "--env", "PASSED", "--env", "NOT_SET_ANYWHERE", "--timeout=1m", "--selinux=off",
		"--add", "testdata:/data", "--add", "testdata:b.test/testdata", file, "-test.v", "--run=x", "a b"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if got := o.runs[0].Args; !slices.Equal(got, []string{"/work/a.test/a.test", "-test.v", "--run=x", "a b"}) || o.runs[0].file != file {
		t.Errorf("runs %q, brings %s", got, o.runs[0].file)
	}
	if !slices.Equal(o.env, []string{"A=b c", "PASSED=on"}) || o.timeout != time.Minute || o.selinux {
		t.Errorf("environment %q, timeout %v, SELinux %v", o.env, o.timeout, o.selinux)
	}
	want := []addition{{"testdata", "/data"}, {"testdata", "/work/b.test/testdata"}, {"testdata", "/work/a.test/testdata"}}
	if !slices.Equal(o.adds, want) {
		t.Errorf("adds %q, want %q", o.adds, want)
	}
}

func TestParseTakesSeveralPrograms(t *testing.T) {
	file := programFile(t, "a.test", "")
	o, err := parse([]string{"--run", "POOL=/mnt/xfs " + file + "  -test.run=A=b", "--run", "true"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	first, second := o.runs[0], o.runs[1]
	if !slices.Equal(first.Env, []string{"POOL=/mnt/xfs"}) || !slices.Equal(first.Args, []string{"/work/a.test/a.test", "-test.run=A=b"}) {
		t.Errorf("the first is %q with %q", first.Args, first.Env)
	}
	if got, want := first.String(), "POOL=/mnt/xfs "+file+" -test.run=A=b"; got != want {
		t.Errorf("the first is called %q, want %q", got, want)
	}
	if second.file != "" || !slices.Equal(second.Args, []string{"true"}) {
		t.Errorf("the second is %q of file %q", second.Args, second.file)
	}
	if !o.selinux || o.timeout <= 0 || o.memory <= 0 || o.cpus <= 0 {
		t.Errorf("the defaults are %+v", o)
	}
}

func TestParseRefuses(t *testing.T) {
	file, namesake := programFile(t, "a.test", ""), programFile(t, "a.test", "")
	for what, test := range map[string]struct{ args, want string }{
		"no program":            {"", "no program"},
		"an empty --run":        {"--run= ", "no program"},
		"both ways":             {"--run true false", "no other program"},
		"a file that is absent": {"./no-such-program", "no such file"},
		"a directory":           {"/tmp", "not a program"},
		"an addition's target":  {"--add /tmp true", "FILE:PATH"},
		"an absent addition":    {"--add /no/such/file:/x true", "no such file"},
		"a nameless variable":   {"--env =x true", "no name"},
		"an SELinux mode":       {"--selinux maybe true", "none of on, off"},
		"labelled containers":   {"--containers true", "--selinux off"},
		"an accelerator":        {"--accel abacus true", "none of auto, kvm, tcg"},
		"no processor":          {"--cpus 0 true", "positive"},
		"no time":               {"--timeout 0 true", "positive"},
		"a variable in front":   {"A=b true", "use --env"},
		"namesakes":             {"--run " + file + " --run " + namesake, "same name"},
		"an unknown option":     {"--no-such-option", "not defined"},
	} {
		t.Run(what, func(t *testing.T) {
			args := strings.Fields(test.args)
			if what == "an empty --run" {
				args = []string{"--run", " "}
			}
			if _, err := parse(args, io.Discard); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("parse(%q) = %v, want %q", args, err, test.want)
			}
		})
	}
}

func TestHelpNamesEveryOption(t *testing.T) {
	var text strings.Builder
	if _, err := parse([]string{"--help"}, &text); !errors.Is(err, flag.ErrHelp) {
		t.Error(err)
	}
	for _, option := range []string{"usage: kernel", "-run", "-add", "-env", "-out", "-timeout", "-selinux", "-containers", "-memory", "-cpus"} {
		if !strings.Contains(text.String(), option) {
			t.Errorf("the help lacks %s:\n%s", option, text.String())
		}
	}
}
