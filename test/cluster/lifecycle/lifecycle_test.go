// Package lifecycle_test starts clusters as a person does, ends them in the ways
// that a person can, and checks what they say, keep and leave behind.
//
// Whatever ends the tests themselves ends their clusters.
package lifecycle_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster/example"
	"kubevirt.io/hostpath-provisioner/test/cluster/progress"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox/sandboxtest"
)

// repository is where its commands are typed.
const repository = "../../.."

var programs = flag.String("programs", repository+"/bin/cluster", "directory with the programs of the cluster and cases.test")

// A terminal runs programs with directories of their own.
type terminal struct {
	*testing.T
	programs, tmp, state, logs string
}

func open(t *testing.T) *terminal {
	t.Helper()
	dir, err := filepath.Abs(*programs)
	if err != nil {
		t.Fatal(err)
	}
	// Kept when the test fails, also by the last check.
	kept := filepath.Join(dir, "lifecycle", t.Name())
	if err := os.RemoveAll(kept); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log("logs of all programs and containers:", kept)
		} else if err := os.RemoveAll(kept); err != nil {
			t.Error(err)
		}
	})
	// Short: there are sockets below it.
	tmp, err := os.MkdirTemp("", "up-") //nolint:usetesting // the name of t.TempDir is long
	if err != nil {
		t.Fatal(err)
	}
	// Nothing may be left in it.
	t.Cleanup(func() {
		if err := os.Remove(tmp); err != nil {
			t.Error(err)
		}
	})
	return &terminal{T: t, programs: dir, tmp: tmp, state: filepath.Join(kept, "run"), logs: filepath.Join(kept, "logs")}
}

// cluster is the command for a cluster.
func (t *terminal) cluster(args ...string) *exec.Cmd {
	flags := []string{"-programs", t.programs, "-state", t.state, "-logs", t.logs, "-while", strconv.Itoa(os.Getpid())}
	return t.command(repository, "cluster", append(flags, args...)...)
}

// command is one of the cluster's programs in a directory. It is asked to end when
// the tests end without it.
func (t *terminal) command(dir, program string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(t.programs, program), args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+t.tmp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	return cmd
}

// A session is a program at work, whose lines are checked.
type session struct {
	*terminal
	cmd    *exec.Cmd
	lines  *bufio.Scanner
	output bytes.Buffer
	ended  bool
}

func (t *terminal) start(cmd *exec.Cmd) *session {
	t.Helper()
	s := &session{terminal: t, cmd: cmd}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	s.lines = bufio.NewScanner(io.TeeReader(out, &s.output))
	s.lines.Buffer(nil, 1<<20) // a summary has long lines
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !s.ended {
			s.interrupt()
			s.wait()
		}
		if t.Failed() {
			t.Logf("%s says:\n%s", filepath.Base(cmd.Path), s.output.String())
		}
	})
	return s
}

// until reads on to a line with some words.
func (s *session) until(words string) {
	s.Helper()
	for s.lines.Scan() {
		if strings.Contains(s.lines.Text(), words) {
			return
		}
	}
	s.Fatalf("it ends without %q (%v)", words, s.lines.Err())
}

// interrupt does what a Ctrl-C does: all that the program has started is in other
// sessions.
func (s *session) interrupt() {
	s.Helper()
	if err := s.cmd.Process.Signal(os.Interrupt); err != nil {
		s.Error(err)
	}
}

// wait reads what is left to be read, and returns the status of its end.
func (s *session) wait() int {
	s.Helper()
	for s.lines.Scan() {
		continue
	}
	s.ended = true
	err := s.cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		s.Fatal(err)
	}
	return s.cmd.ProcessState.ExitCode()
}

// sandbox finds that of the cluster.
func (t *terminal) sandbox() sandboxtest.Sandbox {
	t.Helper()
	box, err := sandboxtest.Find(t.tmp)
	if err != nil {
		t.Fatal(err)
	}
	return box
}

// shell runs what a person types, at the repository's root, and returns what it
// prints.
func (t *terminal) shell(kubeconfig, script string) (string, error) {
	cmd := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = repository
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "PATH="+os.Getenv("PATH")+":"+t.programs)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", script, err, out)
	}
	return string(out), nil
}

// A person starts a cluster, does there what the document says, and ends it.
func TestClusterUpAndDown(t *testing.T) {
	term := open(t)
	up := term.start(term.cluster("up"))
	t.Cleanup(func() {
		// Also when something has failed. It is down usually.
		if out, err := term.cluster("down").CombinedOutput(); err != nil {
			t.Errorf("down: %v: %s", err, out)
		}
	})
	up.until("The cluster is up")
	box := term.sandbox()
	if status := up.wait(); status != 0 {
		t.Fatalf("up ends with %d", status)
	}
	exported := regexp.MustCompile(`export KUBECONFIG=(\S+) `).FindSubmatch(up.output.Bytes())
	if exported == nil {
		t.Fatalf("up does not say how to reach the cluster: %s", up.output.String())
	}
	kubectl := func(script string) string {
		t.Helper()
		out, err := term.shell(string(exported[1]), script)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	// First what up says, then what the document does.
	said := regexp.MustCompile(`(?m)^  (kubectl .*)$`).FindAllSubmatch(up.output.Bytes(), -1)
	if len(said) != 2 {
		t.Fatalf("up says to type %q, want two commands of kubectl", said)
	}
	term.await("both nodes and capacities to be listed", func(context.Context) (string, error) {
		out, err := term.shell(string(exported[1]), string(said[0][1]))
		if strings.Contains(out, "node-a") && strings.Contains(out, "node-b") && strings.Contains(out, "csistoragecapacity") {
			return "", err
		}
		return out, err
	})
	kubectl(string(said[1][1]))
	kubectl(strings.Join(example.PodAndClaim.Lines(t), "\n"))
	kubectl("kubectl wait --for=condition=Ready pod/hostpath-csi-example --timeout=2m")
	// More than 1Gi is refused, until the claim has more.
	commands := example.WriteAndGrow.Lines(t)
	write, grow := commands[0], commands[1]
	if out, err := term.shell(string(exported[1]), write); err == nil || !strings.Contains(out, "Disk quota exceeded") {
		t.Errorf("%s: %v, want it refused for want of space", write, err)
	}
	kubectl(grow)
	kubectl("kubectl wait --for=jsonpath='{.status.capacity.storage}'=4Gi pvc/hostpath-csi-example --timeout=2m")
	kubectl(write)

	if out, err := term.cluster("up").CombinedOutput(); err == nil || !strings.Contains(string(out), "up already") {
		t.Errorf("a second up: %v: %s", err, out)
	}
	if out, err := term.cluster("down").CombinedOutput(); err != nil || !strings.Contains(string(out), "the cluster is gone") {
		t.Errorf("down: %v: %s", err, out)
	}
	box.WantNothing(t)
	term.wantLogs(filepath.Join(term.state, "logs"), append(ofCluster, ofDriver...)...)
	if out, err := term.cluster("down").CombinedOutput(); err != nil || !strings.Contains(string(out), "no cluster is up") {
		t.Errorf("a second down: %v: %s", err, out)
	}
}

// await checks until there is nothing left to wait for, as package progress has it.
func (t *terminal) await(what string, check func(context.Context) (string, error)) {
	t.Helper()
	if err := progress.New(io.Discard).Until(t.Context(), 2*time.Minute, what, check); err != nil {
		t.Fatal(err)
	}
}

// The logs that there are, as patterns.
var (
	ofCluster = []string{
		"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler",
		"node-a-containerd", "node-a-kubelet", "node-b-containerd", "node-b-kubelet",
	}
	ofDriver = containers("driver", "csi-provisioner", "csi-resizer", "node-driver-registrar", "livenessprobe", "health-monitor")
)

func containers(names ...string) (patterns []string) {
	for _, name := range names {
		for _, node := range []string{"node-a", "node-b"} {
			patterns = append(patterns, node+"-pods/hostpath-provisioner_*/"+name+"/*")
		}
	}
	return patterns
}

// wantLogs says that programs have left logs. Not all have had anything to say.
func (t *terminal) wantLogs(dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		files, err := filepath.Glob(filepath.Join(dir, name+".log"))
		if err != nil || len(files) == 0 {
			t.Errorf("no log %s.log in %s (%v)", name, dir, err)
		}
	}
}
