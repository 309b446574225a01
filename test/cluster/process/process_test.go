package process_test

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster/process"
)

func start(t *testing.T, script string) (*process.Process, string) {
	t.Helper()
	logs := t.TempDir()
	p, err := process.Start("shell", logs, exec.Command("sh", "-c", script))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			t.Error(err)
		}
	})
	return p, filepath.Join(logs, "shell.log")
}

func notYet(context.Context) error { return errors.New("not yet") }

func TestReadyWhenCheckSucceeds(t *testing.T) {
	p, log := start(t, "echo listening; exec sleep infinity")
	err := p.UntilReady(t.Context(), func(context.Context) error {
		if !strings.Contains(process.Tail(log, 1), "listening") {
			return errors.New("not listening")
		}
		return nil
	})
	if err != nil || p.Err() != nil {
		t.Errorf("not ready: %v, %v", err, p.Err())
	}
	if err := p.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestNotReadyWhenProcessExits(t *testing.T) {
	p, _ := start(t, "echo last words; exit 3")
	err := p.UntilReady(t.Context(), notYet)
	if err == nil || !strings.Contains(err.Error(), "last words") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("the error is %v, want how it ended and what it said", err)
	}
}

func TestReadyTimeout(t *testing.T) {
	p, _ := start(t, "exec sleep infinity")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := p.UntilReady(ctx, notYet); err == nil || !strings.Contains(err.Error(), "not yet") {
		t.Errorf("the error is %v, want why it is not ready", err)
	}
}

func TestStopKillsProcessThatIgnoresSIGTERM(t *testing.T) {
	p, log := start(t, "trap '' TERM; echo deaf; while :; do sleep 1; done")
	if err := p.UntilReady(t.Context(), func(context.Context) error {
		if process.Tail(log, 1) != "deaf" {
			return errors.New("not deaf")
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := p.Stop(ctx); err == nil {
		t.Error("it has not ended by itself, and that is no error")
	}
	if p.Err() == nil {
		t.Error("it still runs")
	}
}

func TestExitOfOtherProcess(t *testing.T) {
	cmd := exec.Command("sleep", "infinity")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	seen := make(chan struct{})
	err := process.OnEnd(cmd.Process.Pid, func() { close(seen) })
	select {
	case <-seen:
		t.Error("it is seen to end while it runs")
	default:
	}
	if err := errors.Join(err, cmd.Process.Kill()); err != nil {
		t.Fatal(err)
	}
	<-seen
}
