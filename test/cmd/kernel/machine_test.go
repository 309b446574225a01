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
