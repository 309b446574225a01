package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/cmd/kernel/guest"
)

func TestExitStatusIsHighest(t *testing.T) {
	results := []guest.Result{{Status: 1}, {Status: 7}, {Status: 0}}
	for _, test := range []struct {
		err  error
		want int
	}{
		{nil, 7},
		{fmt.Errorf("%w after 1s", errTimeout), 124},
		{errors.New("no machine"), 125},
		{interrupted{syscall.SIGTERM}, 143},
	} {
		if got := exitStatus(results, test.err); got != test.want {
			t.Errorf("exitStatus with %v = %d, want %d", test.err, got, test.want)
		}
	}
}

func TestOutcome(t *testing.T) {
	result := guest.Message{Result: &guest.Result{Run: 0, Status: 3}}
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(errTimeout)
	for what, test := range map[string]struct {
		ctx  context.Context
		got  received
		want string
	}{
		"all done":              {t.Context(), received{messages: []guest.Message{result, {Done: true}}}, ""},
		"done at the last":      {ended, received{messages: []guest.Message{result, {Done: true}}}, ""},
		"too late":              {ended, received{messages: []guest.Message{result}}, errTimeout.Error()},
		"ended halfway":         {t.Context(), received{messages: []guest.Message{result}, console: tail{[]byte("a panic")}}, "a panic"},
		"trouble in the guest":  {t.Context(), received{messages: []guest.Message{{Trouble: "no disk"}}}, "no disk"},
		"nowhere to put things": {t.Context(), received{messages: []guest.Message{result, {Done: true}}, errs: [4]error{3: errors.New("disk full")}}, "disk full"},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := test.got.outcome(test.ctx, nil)
			if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
				t.Errorf("outcome = %v, want %q", err, test.want)
			}
		})
	}
}

func TestReadMessagesReportsTruncation(t *testing.T) {
	messages, err := readMessages(strings.NewReader(`{"Result":{"Run":0,"Status":2}}` + "\n" + `{"Done":tr`))
	if err == nil || len(messages) != 1 || messages[0].Result.Status != 2 {
		t.Errorf("readMessages = %+v, %v", messages, err)
	}
}

func TestTailKeepsEnd(t *testing.T) {
	var end tail
	for n := range 2000 {
		fmt.Fprintf(&end, "line %d\n", n)
	}
	if s := end.String(); len(s) > 4<<10 || !strings.HasSuffix(s, "line 1998\nline 1999") {
		t.Errorf("the tail has %d bytes and ends with %q", len(s), s[len(s)-30:])
	}
}

func TestSummarize(t *testing.T) {
	var text strings.Builder
	runs := []program{{Run: guest.Run{Args: []string{"a", "-v"}}}, {Run: guest.Run{Args: []string{"b"}}}, {Run: guest.Run{Args: []string{"c"}}}, {Run: guest.Run{Args: []string{"d"}}}}
	summarize(&text, runs, []guest.Result{{Run: 0, Duration: 1500e6}, {Run: 1, Status: 2}, {Run: 2, Status: 137}})
	want := `kernel:    1.5 s  passed              a -v
kernel:    0.0 s  exit status 2       b
kernel:    0.0 s  ended by killed     c
kernel: did not end                   d
`
	if got := text.String(); got != want {
		t.Errorf("the summary is\n%s\nwant\n%s", got, want)
	}
}
