package guest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strings"
	"syscall"
	"time"
)

// The statuses with which a shell says that it could not run a program.
const (
	notExecutable = 126
	notFound      = 127
)

// carryOut runs the programs of the plan one after another, reports how each
// ended, and hands over what they left in Out.
func carryOut(plan Plan, ports ports, report *json.Encoder) error {
	if err := os.MkdirAll(Out, 0o777); err != nil {
		return err
	}
	for i, r := range plan.Runs {
		if len(plan.Runs) > 1 {
			say(ports.stdout, ">>> %s", strings.Join(r.Args, " "))
		}
		started := time.Now()
		status := execute(r, ports)
		result := Result{Run: i, Status: status, Duration: time.Since(started)}
		if err := report.Encode(Message{Result: &result}); err != nil {
			return err
		}
	}
	if plan.Archive {
		return Pack(ports.archive, Out)
	}
	return nil
}

// execute runs a program until it has ended, and with it all that it started: the
// next one finds a machine where nothing else runs.
func execute(r Run, ports ports) int {
	dir := Directory(r.Args[0])
	if err := os.MkdirAll(dir, 0o755); err != nil {
		say(ports.stderr, "kernel: %v", err)
		return notExecutable
	}
	// Not exec.Command: as the first process, this one also has to wait for the
	// orphans of others, in one loop with the program itself.
	program, err := exec.LookPath(r.Args[0])
	if err != nil {
		say(ports.stderr, "kernel: %v", err)
		return notFound
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		say(ports.stderr, "kernel: %v", err)
		return notExecutable
	}
	defer null.Close()
	pid, err := syscall.ForkExec(program, append([]string{path.Base(program)}, r.Args[1:]...), &syscall.ProcAttr{
		Dir:   dir,
		Env:   append([]string{"PATH=" + os.Getenv("PATH")}, r.Env...),
		Files: []uintptr{null.Fd(), uintptr(ports.stdout), uintptr(ports.stderr)},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		say(ports.stderr, "kernel: run %s: %v", program, err)
		return notExecutable
	}
	status := waitFor(pid)
	if n := endOthers(); n > 0 {
		say(ports.stderr, "kernel: %s left processes running, which were killed: %d", path.Base(program), n)
	}
	return exitStatus(status)
}

// waitFor waits until the process has ended, and takes the orphans that have ended
// meanwhile out of the process table.
func waitFor(pid int) syscall.WaitStatus {
	for {
		var status syscall.WaitStatus
		if ended, err := syscall.Wait4(-1, &status, 0, nil); err == nil && ended == pid {
			return status
		}
	}
}

// endOthers kills all other processes, and returns how many there were.
func endOthers() int {
	for {
		if ended, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || ended <= 0 {
			break
		}
	}
	if err := syscall.Kill(-1, syscall.SIGKILL); err != nil {
		return 0
	}
	for n := 0; ; n++ {
		if _, err := syscall.Wait4(-1, nil, 0, nil); err != nil {
			return n
		}
	}
}

func exitStatus(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// say writes a line where a program's output goes. There is no one else to inform if
// that fails.
func say(port int, format string, args ...any) {
	_, _ = syscall.Write(port, fmt.Appendf(nil, format+"\n", args...))
}
