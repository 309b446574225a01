package cmdline_test

import (
	"bytes"
	"errors"
	"flag"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
)

func flags() (*flag.FlagSet, *bytes.Buffer, *int) {
	var output bytes.Buffer
	set := flag.NewFlagSet("program", flag.ContinueOnError)
	set.SetOutput(&output)
	return set, &output, set.Int("number", 0, "a number")
}

func TestParseAllReportsEveryProblem(t *testing.T) {
	set, output, number := flags()
	err := cmdline.ParseAll(set, []string{"--number=x", "argument", "--unknown", "--number=7"})
	for _, word := range []string{`"x"`, `"argument"`, "-unknown"} {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%v does not say %s", err, word)
		}
	}
	if *number != 7 || output.Len() > 0 {
		t.Errorf("the number is %d, printed was %q", *number, output)
	}
}

func TestParseAllPrintsHelp(t *testing.T) {
	set, output, _ := flags()
	if err := cmdline.ParseAll(set, []string{"--help"}); !errors.Is(err, flag.ErrHelp) || !strings.Contains(output.String(), "a number") {
		t.Errorf("%v, printed was %q", err, output)
	}
}

func TestCheckAddress(t *testing.T) {
	for address, good := range map[string]bool{"": true, ":8443": true, "127.0.0.1:http": true, "8443": false, ":": false, ":port": false} {
		if err := cmdline.CheckAddress(address); (err == nil) != good {
			t.Errorf("%q: %v", address, err)
		}
	}
}
