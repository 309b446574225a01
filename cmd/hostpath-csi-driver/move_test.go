package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const onePoolAtSrv = `[{"name":"local","path":"/srv/pool"}]`

func TestParseMoving(t *testing.T) {
	required := []string{"--volume=pvc-1", "--move=3e3a4f6c-7cbb-4b9e-a9b6-0a4f1a5b0a11", "--peer=node-2"}
	identity := []string{"--cert-file=c", "--key-file=k", "--ca-file=a"}
	toCopy := slices.Concat(required, identity, []string{"--datadir=" + onePoolAtSrv})
	for name, c := range map[string]struct {
		command string
		args    []string
		wants   string // in the error; empty for none
	}{
		"copy from here":             {moveOutCommand, append(toCopy, "--address=10.0.0.1:8444"), ""},
		"copy to here":               {moveInCommand, toCopy, ""},
		"undo":                       {moveOutCommand, append(required, "--step=undo"), ""},
		"give up":                    {moveOutCommand, append(required, "--step=give-up"), ""},
		"give up where it goes":      {moveInCommand, append(required, "--step=give-up"), "--step"},
		"remove":                     {moveOutCommand, append(required, "--step=remove"), ""},
		"remove what is vouched for": {moveOutCommand, slices.Concat(required, identity, []string{"--step=remove", "--address=:1"}), ""},
		"ask without certificates":   {moveOutCommand, append(required, "--step=remove", "--address=:1"), "--cert-file"},
		"undo, and tell":             {moveOutCommand, slices.Concat(required, identity, []string{"--step=undo", "--address=:1"}), ""},
		"tell without certificates":  {moveOutCommand, append(required, "--step=undo", "--address=:1"), "--cert-file"},
		"abort what is undone":       {moveInCommand, slices.Concat(required, identity, []string{"--step=abort-undone"}), ""},
		"abort without certificates": {moveInCommand, append(required, "--step=abort-undone"), "--cert-file"},
		"vouch":                      {moveInCommand, slices.Concat(required, identity, []string{"--step=vouch", "--fence=f"}), ""},
		"vouch without a fence":      {moveInCommand, slices.Concat(required, identity, []string{"--step=vouch"}), "--fence"},
		"vouch without certificates": {moveInCommand, append(required, "--step=vouch", "--fence=f"), "--cert-file"},
		"vouch where it was":         {moveOutCommand, slices.Concat(required, identity, []string{"--step=vouch", "--address=:1"}), "--step"},
		"abort":                      {moveInCommand, append(required, "--step=abort"), ""},
		"confirm":                    {moveInCommand, append(required, "--step=confirm", "--fence=f"), ""},
		"confirm without a fence":    {moveInCommand, append(required, "--step=confirm"), "--fence"},
		"confirm where it was":       {moveOutCommand, append(required, "--step=confirm"), "--step"},
		"remove where it goes":       {moveInCommand, append(required, "--step=remove"), "--step"},
		"copy without an address":    {moveOutCommand, toCopy, "--address"},
		"copy to no address":         {moveOutCommand, append(toCopy, "--address=nowhere"), "--address"},
		"copy without certificates":  {moveOutCommand, append(required, "--datadir="+onePoolAtSrv, "--address=:1"), "--cert-file"},
		"copy without pools":         {moveInCommand, slices.Concat(required, identity), "--datadir"},
		"no volume":                  {moveOutCommand, append(required[1:], "--step=undo"), "--volume"},
		"a volume outside the pools": {moveOutCommand, append(required, "--step=undo", "--volume=../x"), "--volume"},
		"no move":                    {moveOutCommand, []string{"--volume=pvc-1", "--peer=node-2", "--step=undo"}, "--move"},
		"no peer":                    {moveOutCommand, append(required[:2:2], "--step=undo"), "--peer"},
		"an unknown comparison":      {moveOutCommand, append(toCopy, "--address=:1", "--verify=some"), "--verify"},
		"a negative size":            {moveOutCommand, append(toCopy, "--address=:1", "--bytes=-1"), "--bytes"},
		"no socket":                  {moveOutCommand, append(required, "--step=undo", "--endpoint=tcp://x"), "--endpoint"},
	} {
		_, err := parseMoving(c.command, slices.Clone(c.args), func(string) string { return "" }, io.Discard)
		if (err == nil) != (c.wants == "") || err != nil && !strings.Contains(err.Error(), c.wants) {
			t.Errorf("%s: the error is %v, want one of %q", name, err, c.wants)
		}
	}
	m, err := parseMoving(moveOutCommand, append(toCopy, "--address=:1", "--verify=changed"), func(string) string { return "" }, io.Discard)
	if err != nil || m.verify != transfer.VerifyChanged || m.step != stepCopy {
		t.Errorf("%+v (%v)", m, err)
	}
	if _, err := parseMoving(moveInCommand, []string{"--help"}, func(string) string { return "" }, io.Discard); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("the help is an error: %v", err)
	}
}

// The leave of another move is none, nor is the file that kubelet makes before there is any.
func TestLeaveToFence(t *testing.T) {
	m := moving{move: "move-1", mayFence: filepath.Join(t.TempDir(), "may-fence")}
	want := func(what string, want bool) {
		t.Helper()
		if given, err := m.hasLeave(); err != nil || given != want {
			t.Errorf("%s: %v (%v)", what, given, err)
		}
	}
	want("no file", false)
	for content, given := range map[string]bool{"": false, "move-2": false, "move-1 move-2": false, "move-1": true, "move-1\n": true} {
		must.Succeed(t, os.WriteFile(m.mayFence, []byte(content), 0o600))
		want(content, given)
	}
	m.mayFence = t.TempDir()
	if given, err := m.hasLeave(); given || err == nil {
		t.Error("what cannot be read is leave, or no error")
	}
}

// What is only progress is written once a second, and all else at once.
func TestReporter(t *testing.T) {
	var out bytes.Buffer
	report := reporter(&out)
	for range 3 {
		report(mover.Event{Event: mover.Passing, Bytes: 1})
		report(mover.Event{Event: mover.Passed, Pass: 1})
	}
	lines := out.String()
	if passing, passed := strings.Count(lines, `"event":"passing"`), strings.Count(lines, `"event":"passed","pass":1`); passing != 1 || passed != 3 {
		t.Errorf("there are %d and %d events:\n%s", passing, passed, lines)
	}
}

// In the log of a pod both outputs are one: what a pod called a file must not be an event there.
func TestNamesAreNoEvents(t *testing.T) {
	const forged, kept = `{"event":"handed-over","fence":"f","promisedBytes":1}`, 2048
	var log bytes.Buffer
	args := []string{
		"--volume=pvc-1", "--move=3e3a4f6c-7cbb-4b9e-a9b6-0a4f1a5b0a11", "--peer=node-2", "--datadir=" + onePoolAtSrv, "--address=127.0.0.1:1",
		"--cert-file=none\n" + forged + "\n" + strings.Repeat("long", 600), "--key-file=none", "--ca-file=none",
	}
	if exit := runMove(moveOutCommand, args, func(string) string { return "" }, &log, &log); exit != failed || !strings.Contains(log.String(), "handed-over") {
		t.Fatalf("it exits with %d:\n%s", exit, &log)
	}
	for line := range strings.Lines(log.String()) {
		var e mover.Event
		if json.Unmarshal([]byte(line), &e) == nil && e.Event != mover.Failed {
			t.Errorf("a name is the event %+v", e)
		}
	}
	if text := log.String(); !strings.Contains(text[max(0, len(text)-kept):], `"event":"failed"`) {
		t.Errorf("kubelet does not keep the event of an error that is long:\n%s", text)
	}
}
