package testenv_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Whose signal ends .ci/run, a runner that is cancelled for one, ends what its stage has started too.
func TestSignalEndsStageOfCI(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "bash", "ip", "losetup", "findmnt", "setpriv", "unshare", "chrt", "flock")
	root := t.TempDir()
	started := filepath.Join(root, "started")
	must.Succeed(t, syscall.Mkfifo(started, 0o600))
	for name, script := range map[string]string{
		"test/tools/install-deps": "",
		"programs/go":             "",
		// The stage, and what it has started, which outlives its parent.
		"programs/make": `[ "$1" = lint ] || exit 0; sleep 1000 & echo $$ $! > ` + started + `; wait`,
	} {
		must.Succeed(t, os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(root, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	must.Succeed(t, os.Mkdir(filepath.Join(root, ".ci"), 0o755))
	for _, name := range []string{".ci/run", "test/tools/beside"} {
		text, err := os.ReadFile(filepath.Join("../..", name))
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(filepath.Join(root, name), text, 0o755))
	}
	ci := exec.CommandContext(t.Context(), filepath.Join(root, ".ci/run"))
	ci.Env = append(os.Environ(), "PATH="+filepath.Join(root, "programs")+":"+os.Getenv("PATH"))
	pids, err := os.OpenFile(started, os.O_RDWR|syscall.O_NONBLOCK, 0)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, pids.Close()) }()
	must.Succeed(t, pids.SetReadDeadline(time.Now().Add(time.Minute)))
	must.Succeed(t, ci.Start())
	line, err := bufio.NewReader(pids).ReadString('\n')
	must.Succeed(t, err)
	var stage, child int
	_, err = fmt.Sscan(line, &stage, &child)
	must.Succeed(t, err)
	must.Succeed(t, ci.Process.Signal(syscall.SIGTERM))
	if err := ci.Wait(); err == nil {
		t.Error("it succeeds after a signal")
	}
	for _, pid := range []int{stage, child} {
		// Without a command line it has ended, and waits for the machine's first process to notice.
		if command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err == nil && len(command) > 0 {
			t.Errorf("process %d still runs", pid)
			must.Succeed(t, syscall.Kill(pid, syscall.SIGKILL))
		}
	}
}
