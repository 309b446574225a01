// Package sandbox runs a program where nothing that it starts can outlive it:
// in process, mount and network namespaces of its own. Whatever ends the
// program, also SIGKILL, the kernel then ends every process, mount, bridge and
// loop device in there, and a keeper outside removes what namespaces do not
// hold: control groups and files.
//
// The program is run again three times, one below the other:
//
//	the one that was called   waits, and passes signals on
//	  keeper                  outlives it, to clean up
//	    init                  process 1 in there; reaps orphans
//	      inside              the program itself, for which Enter returns
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

// What the runs pass to each other in their environment.
const (
	roleVariable   = "HOSTPATH_SANDBOX_ROLE"
	cgroupVariable = "HOSTPATH_SANDBOX_CGROUP"
)

type role string

const (
	keeperRole role = "keeper"
	initRole   role = "init"
	insideRole role = "inside"
)

// firstFile is the descriptor of the first of the files that are handed down.
const firstFile = 3

// A Sandbox is where this program runs.
type Sandbox struct {
	// Dir is a directory for its files, which is removed at the end.
	Dir string
	// Cgroup is the path of a control group, in every hierarchy, which is
	// removed at the end with all that is below it.
	Cgroup string
	// Files are those that Enter was given.
	Files []*os.File
}

// Enter returns inside a sandbox. Outside of one it starts this program again
// inside and ends this process with the status of that one, or with 128 and the
// number of the signal that ended it. It has to be called first thing in main.
//
// The files are open inside too. A socket among them keeps its network.
func Enter(files ...*os.File) *Sandbox {
	var status int
	var err error
	switch role(os.Getenv(roleVariable)) {
	case insideRole:
		return inside()
	case initRole:
		status, err = initMain()
	case keeperRole:
		status, err = keeperMain()
	default:
		if err = CheckPaths(); err == nil {
			status, err = outside(files)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox:", err)
		status = max(status, 1)
	}
	os.Exit(status)
	return nil
}

// CheckPaths fails if the directories that a program works with would be hidden from it
// inside.
func CheckPaths() error {
	if err := Shared(os.TempDir()); err != nil {
		return fmt.Errorf("the directory for temporary files: %w: set TMPDIR", err)
	}
	dir, err := os.Getwd()
	if err != nil {
		return err
	}
	if err := Shared(dir); err != nil {
		return fmt.Errorf("the working directory: %w: start it from elsewhere", err)
	}
	return nil
}

// Shared fails if a path does not lead to the same file inside a sandbox and outside
// of one.
func Shared(path string) error {
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		resolved = path // of what is to be made the name has to do
	}
	for _, hidden := range []string{"/var", "/run"} {
		if resolved == hidden || strings.HasPrefix(resolved, hidden+"/") {
			return fmt.Errorf("%s is below %s, which a sandbox has of its own", path, hidden)
		}
	}
	return nil
}

// Outside reports whether this is the run that was called. Only there what Enter
// is given matters.
func Outside() bool { return os.Getenv(roleVariable) == "" }

func inside() *Sandbox {
	// Programs that this one starts may have sandboxes of their own.
	_ = os.Unsetenv(roleVariable)
	return &Sandbox{Dir: os.TempDir(), Cgroup: os.Getenv(cgroupVariable), Files: inheritedFiles(0)}
}

// Subgroup makes a control group below that of the sandbox and returns its path.
func (s *Sandbox) Subgroup(name string) (string, error) {
	below := cgroup(s.Cgroup + "/" + name)
	return string(below), below.make()
}

// outside starts the keeper with a pipe that ends when this process does.
func outside(files []*os.File) (int, error) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, passedOn...)
	lifeline, alive, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer alive.Close()
	cmd := again(keeperRole)
	cmd.ExtraFiles = append([]*os.File{lifeline}, files...)
	// A session of its own: a Ctrl-C at the terminal must not end the keeper.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start the keeper: %w", err)
	}
	lifeline.Close()
	return waitPassingOn(cmd, signals)
}

var passedOn = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// again is this program in another role, with the same arguments.
func again(r role) *exec.Cmd {
	// Not os.Executable: `go run` and `go test` may have removed that name.
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), roleVariable+"="+string(r))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd
}

// inheritedFiles are the files that were handed down, without the first ones.
func inheritedFiles(skip int) []*os.File {
	var files []*os.File
	for fd := uintptr(firstFile + skip); ; fd++ {
		// The runtime opens none of its own before main.
		var stat syscall.Stat_t
		if syscall.Fstat(int(fd), &stat) != nil || stat.Mode&syscall.S_IFMT != syscall.S_IFSOCK {
			return files
		}
		syscall.CloseOnExec(int(fd))
		files = append(files, os.NewFile(fd, "inherited"))
	}
}

// waitPassingOn waits for a child and passes signals on to it meanwhile.
func waitPassingOn(cmd *exec.Cmd, signals <-chan os.Signal) (int, error) {
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case s := <-signals:
				_ = cmd.Process.Signal(s) // it may have ended meanwhile
			case <-done:
				return
			}
		}
	}()
	err := cmd.Wait()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case !errors.As(err, &exit):
		return 1, fmt.Errorf("wait for %s: %w", cmd.Path, err)
	}
	return exitStatus(exit.Sys().(syscall.WaitStatus)), nil
}

func exitStatus(state syscall.WaitStatus) int {
	if state.Signaled() {
		return 128 + int(state.Signal())
	}
	return state.ExitStatus()
}

// lockThread keeps the thread that starts children: their death signal comes
// when that thread ends, not when the process does.
func lockThread() { runtime.LockOSThread() }
