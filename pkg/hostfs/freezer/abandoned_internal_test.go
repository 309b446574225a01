package freezer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// roleVariable makes the test binary a watchdog or a client, as processes that can be killed.
const roleVariable = "FREEZER_TEST_ROLE"

// ready is what such a process says when it is.
const ready = "ready"

// play is the main function of such a process: "watchdog ROOT SOCKET" or "client SOCKET".
func play(role string) error {
	what, arguments, _ := strings.Cut(role, " ")
	if what == "client" {
		return playClient(arguments)
	}
	root, socket, _ := strings.Cut(arguments, " ")
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	w, err := NewWatchdog(root, logr.Discard())
	if err != nil {
		return err
	}
	w.longest = eventually
	l, err := Listen(ctx, socket)
	if err != nil {
		return err
	}
	fmt.Println(ready)
	return errors.Join(w.Serve(ctx, l), w.Close())
}

// playClient freezes once, when it gets a line, and lets go when the input ends.
func playClient(socket string) error {
	fmt.Println(ready)
	input := bufio.NewReader(os.Stdin)
	if _, err := input.ReadString('\n'); err != nil {
		return err
	}
	pods, err := bothPods()
	if err != nil {
		return err
	}
	_, thaw, err := Client{Socket: socket}.Freeze(context.Background(), pods)
	if err != nil {
		return nil //nolint:nilerr // its watchdog may be killed too
	}
	_, err = io.Copy(io.Discard, input)
	return errors.Join(err, thaw())
}

const otherUID = "0a1b2c3d-0000-4000-8000-0000000000ff"

func bothPods() ([]Pod, error) {
	a, err := ParsePod(uid)
	b, other := ParsePod(otherUID)
	return []Pod{a, b}, errors.Join(err, other)
}

// An arena has two pods, and a watchdog that is a process of its own.
type arena struct {
	*testing.T
	root, socket string
	groups       []*group
	pods         []Pod
	watchdog     *process
}

type process struct {
	*exec.Cmd
	input io.WriteCloser
}

// start runs the test binary in a role, until it is ready.
func (a *arena) start(role string) *process {
	a.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	input, err := cmd.StdinPipe()
	must.Succeed(a, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(a, err)
	must.Succeed(a, cmd.Start())
	line, err := bufio.NewReader(output).ReadString('\n')
	if err != nil || strings.TrimSpace(line) != ready {
		a.Fatalf("%s did not start: %q, %v", role, line, err)
	}
	return &process{cmd, input}
}

// kill ends a process and waits until it has.
func (p *process) kill(with os.Signal) {
	_ = p.Process.Signal(with) // it may have ended
	_ = p.Wait()
}

func (a *arena) startWatchdog() { a.watchdog = a.start("watchdog " + a.root + " " + a.socket) }

// eventually is how long something may take on a machine with much else to do.
const eventually = time.Minute

// client is one whose watchdog may get no processor for a while.
func (a *arena) client() Client { return Client{Socket: a.socket, patience: eventually} }

func newArena(t *testing.T, hierarchy string) *arena {
	t.Helper()
	a := &arena{T: t}
	var at string
	a.root, at = makeGroup(t, hierarchy, places[1])
	second := filepath.Join(filepath.Dir(at), "pod"+otherUID)
	must.Succeed(t, os.Mkdir(second, 0o755))
	t.Cleanup(func() { must.Succeed(t, os.Remove(second)) })
	for _, path := range []string{at, second} {
		writer(t, path)
		f, err := os.Open(path)
		must.Succeed(t, err)
		g, err := adopt(f)
		must.Succeed(t, err)
		t.Cleanup(func() {
			must.Succeed(t, g.set(false)) // or what is in it cannot be ended
			g.close()
		})
		a.groups = append(a.groups, g)
	}
	var err error
	a.pods, err = bothPods()
	must.Succeed(t, err)
	a.socket = filepath.Join(testenv.SocketDir(t), "f.sock")
	a.startWatchdog()
	t.Cleanup(func() { a.watchdog.kill(syscall.SIGTERM) })
	return a
}

// anyFrozen asks the kernel.
func (a *arena) anyFrozen() bool {
	a.Helper()
	return slices.ContainsFunc(a.groups, func(g *group) bool {
		asked, err := g.asked()
		must.Succeed(a, err)
		return asked
	})
}

// wantThawed expects that the pods go on, at once or within a time.
func (a *arena) wantThawed(within time.Duration, what string) {
	a.Helper()
	for began := time.Now(); a.anyFrozen(); time.Sleep(100 * time.Microsecond) {
		if time.Since(began) > within {
			a.Fatalf("%s: a pod is frozen still after %s", what, time.Since(began))
		}
	}
}

// Ways to abandon a freeze, some time after it was asked for. Each returns when those who are left
// have had their say.
var abandon = []struct {
	name string
	// within is how long a pod may stay frozen after that.
	within time.Duration
	do     func(a *arena, after time.Duration)
}{
	{"the client gives up", 0, (*arena).giveUp},
	{"the client gives up again", 0, (*arena).giveUp},
	{"the client is killed", Limit, func(a *arena, after time.Duration) {
		c := a.start("client " + a.socket)
		a.ask(c)
		time.Sleep(after)
		c.kill(syscall.SIGKILL)
		a.untilIdle()
	}},
	{"the watchdog is killed", 0, func(a *arena, after time.Duration) { a.loseWatchdog(after, syscall.SIGKILL) }},
	{"the watchdog is told to end", 0, func(a *arena, after time.Duration) { a.loseWatchdog(after, syscall.SIGTERM) }},
	{"both are killed, and a watchdog starts", 0, func(a *arena, after time.Duration) {
		c := a.start("client " + a.socket)
		a.ask(c)
		time.Sleep(after)
		must.Succeed(a, a.watchdog.Process.Kill())
		c.kill(syscall.SIGKILL)
		_ = a.watchdog.Wait()
		a.startWatchdog()
	}},
	{"both are told to end", 0, func(a *arena, after time.Duration) {
		go func(w *process) { _ = w.Process.Signal(syscall.SIGTERM) }(a.watchdog)
		a.giveUp(after)
		a.watchdog.kill(syscall.SIGTERM)
		a.startWatchdog()
	}},
}

// untilIdle waits for the watchdog to notice that a client has ended.
func (a *arena) untilIdle() {
	for began := time.Now(); ; {
		_, thaw, err := a.client().Freeze(a.Context(), a.pods)
		if err == nil {
			err = thaw()
		}
		if !errors.Is(err, ErrBusy) || time.Since(began) > eventually {
			must.Succeed(a, err)
			return
		}
	}
}

func (a *arena) ask(c *process) {
	must.Succeed(a, must.Err(io.WriteString(c.input, "\n")))
}

func (a *arena) giveUp(after time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), after)
	defer cancel()
	_, thaw, err := a.client().Freeze(ctx, a.pods)
	if errors.Is(err, ErrBusy) {
		a.Errorf("after a pod was thawed: %v", err)
	}
	if err == nil {
		<-ctx.Done()
		_ = thaw() // it may have been too long
	}
}

// loseWatchdog ends the watchdog while a client waits for it, or holds the pods.
func (a *arena) loseWatchdog(after time.Duration, by os.Signal) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		time.Sleep(after)
		a.watchdog.kill(by)
	}()
	still, thaw, err := a.client().Freeze(context.Background(), a.pods)
	if err == nil {
		<-still.Done()
		if err := thaw(); !errors.Is(err, ErrThawed) {
			a.Errorf("the watchdog has ended: %v, want ErrThawed", err)
		}
	}
	<-ended
	if a.anyFrozen() {
		a.Error("the client has let go, and a pod is frozen still")
	}
	a.startWatchdog()
}

// TestAbandonedFreezeThaws has freezes abandoned at each instant, by who asks and by who freezes. No pod
// stays frozen.
func TestAbandonedFreezeThaws(t *testing.T) {
	attempts := 10_000
	if testing.Short() {
		attempts = 42
	}
	onEach(t, func(t *testing.T, hierarchy string) {
		a := newArena(t, hierarchy)
		longest := a.duration()
		t.Logf("a freeze takes %s", longest)
		for i := range attempts {
			way := abandon[i%len(abandon)]
			// All instants from before the first step to after the last.
			after := longest * 3 / 2 * time.Duration(i) / time.Duration(attempts)
			way.do(a, after)
			a.wantThawed(way.within, fmt.Sprintf("attempt %d: %s after %s", i, way.name, after))
		}
		for _, g := range a.groups {
			marked, err := g.marked()
			must.Succeed(t, err)
			if marked {
				t.Errorf("%s has its mark still", g.dir.Name())
			}
		}
	})
}

// duration is how long a freeze takes, of several.
func (a *arena) duration() (longest time.Duration) {
	a.Helper()
	var took []time.Duration
	for range 21 {
		began := time.Now()
		_, thaw, err := a.client().Freeze(a.Context(), a.pods)
		must.Succeed(a, err)
		must.Succeed(a, thaw())
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)/2]
}

// A watchdog that is stopped neither thaws nor ends. The client acts alone, and the watchdog leaves nothing
// frozen when it goes on.
func TestStoppedWatchdogLeavesNothingFrozen(t *testing.T) {
	attempts := 30
	if testing.Short() {
		attempts = 3
	}
	onEach(t, func(t *testing.T, hierarchy string) {
		a := newArena(t, hierarchy)
		longest := a.duration()
		for i := range attempts {
			ctx, giveUp := context.WithCancel(t.Context())
			stopped := make(chan struct{})
			go func() {
				defer close(stopped)
				time.Sleep(longest * time.Duration(i) / time.Duration(attempts))
				a.stopWatchdog()
				giveUp()
			}()
			_, thaw, err := Client{Socket: a.socket}.Freeze(ctx, a.pods)
			if <-stopped; err == nil {
				if err := thaw(); !errors.Is(err, ErrThawed) {
					t.Errorf("%v, want ErrThawed", err)
				}
			}
			a.wantThawed(0, fmt.Sprintf("attempt %d, while the watchdog is stopped", i))
			must.Succeed(t, a.watchdog.Process.Signal(syscall.SIGCONT))
			a.untilIdle()
			a.wantThawed(0, fmt.Sprintf("attempt %d, after the watchdog went on", i))
		}
	})
}

// stopWatchdog returns when each of its threads has stopped: one may still answer after kill(2) has returned.
func (a *arena) stopWatchdog() {
	a.Helper()
	err := a.watchdog.Process.Signal(syscall.SIGSTOP)
	if err := errors.Join(err, unix.Waitid(unix.P_PID, a.watchdog.Process.Pid, nil, unix.WSTOPPED, nil)); err != nil {
		a.Error("stop the watchdog:", err)
	}
}

// While a driver is replaced two watchdogs may serve a node. What one has frozen is its own, until it ends.
func TestSecondWatchdogThawsWhatTheFirstLeaves(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		a := newArena(t, hierarchy)
		c := a.start("client " + a.socket)
		a.ask(c)
		a.await("the pods are frozen", a.anyFrozen)
		second := a.start("watchdog " + a.root + " " + a.socket + "2")
		defer second.kill(syscall.SIGTERM)
		if !a.anyFrozen() {
			t.Error("the second watchdog has thawed what the first has frozen")
		}
		_, _, err := Client{Socket: a.socket + "2"}.Freeze(t.Context(), a.pods)
		if !errors.Is(err, ErrBusy) {
			t.Errorf("freeze by the second: %v, want ErrBusy", err)
		}
		must.Succeed(t, a.watchdog.Process.Kill())
		c.kill(syscall.SIGKILL)
		_ = a.watchdog.Wait()
		a.wantThawed(Limit, "the first watchdog and its client are killed")
		a.startWatchdog()
	})
}

func (a *arena) await(what string, is func() bool) {
	a.Helper()
	for began := time.Now(); !is(); time.Sleep(time.Millisecond) {
		if time.Since(began) > eventually {
			a.Fatalf("not after %s: %s", eventually, what)
		}
	}
}

// Pods and their containers come and go while the groups of others are searched.
func TestVanishingGroupsAreNoError(t *testing.T) {
	attempts := 2000
	if testing.Short() {
		attempts = 200
	}
	onEach(t, func(t *testing.T, hierarchy string) {
		a := newArena(t, hierarchy)
		ctx, stop := context.WithCancel(t.Context())
		var churn sync.WaitGroup
		defer churn.Wait()
		defer stop()
		for i := range 4 {
			churn.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					in := filepath.Dir(a.groups[0].dir.Name())
					if i%2 == 0 {
						in = a.groups[0].dir.Name() // a container of the pod itself
					}
					pod := filepath.Join(in, fmt.Sprintf("pod%08x-0000-4000-8000-%012x", i, n))
					if err := os.Mkdir(pod, 0o755); err != nil {
						t.Error(err)
						return
					}
					_ = os.Mkdir(pod+"/container", 0o755)
					_ = os.Remove(pod + "/container")
					if err := os.Remove(pod); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		root := openHierarchy(t, a.root)
		for range attempts {
			groups, err := find(root, a.pods)
			must.Succeed(t, err)
			closeAll(groups)
		}
	})
}

func openHierarchy(t *testing.T, root string) *dir.Dir {
	t.Helper()
	d, err := open(root)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	return d
}
