package freezer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(roleVariable); role != "" {
		if err := play(role); err != nil {
			fmt.Fprintln(os.Stderr, role, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testenv.Main(m)
}

const uid = "0a1b2c3d-0000-4000-8000-00000000000f"

func TestPodAt(t *testing.T) {
	for path, want := range map[string]string{
		"/var/lib/kubelet/pods/" + uid + "/volumes/kubernetes.io~csi/pvc-1/mount":  uid,
		"/mnt/kubelet/pods/" + uid + "/volume-subpaths/pvc-1/main/0":               uid,
		"/var/lib/kubelet/pods/" + uid + "/volumeDevices/kubernetes.io~csi/pvc-1":  uid,
		"/srv/pods/pods/" + strings.Repeat("0f", 16) + "/volumes/x":                strings.Repeat("0f", 16),
		"/var/lib/kubelet/pods/../volumes/x":                                       "",
		"/var/lib/kubelet/pods/" + uid + "/etc-hosts":                              "",
		"/var/lib/kubelet/pods/" + uid:                                             "",
		"/mnt/by-hand":                                                             "",
		"/var/lib/kubelet/pods/" + uid + "x/volumes/kubernetes.io~csi/pvc-1/mount": "",
		"/var/lib/kubelet/pods/" + uid[1:] + "/volumes/kubernetes.io~csi/p/mount":  "",
	} {
		pod, ok := PodAt(path)
		if pod.String() != want || ok != (want != "") {
			t.Errorf("%s is of pod %q, %v; want %q", path, pod, ok, want)
		}
	}
}

// Where kubelet puts the group of a pod, with both of its cgroup drivers and each class of pods.
var places = []string{
	"kubepods/pod" + uid,
	"kubepods/burstable/pod" + uid,
	"kubelet/kubepods/besteffort/pod" + uid,
	"kubepods.slice/kubepods-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice",
	"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice",
	"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice",
}

// each of the hierarchies that this machine has.
func onEach(t *testing.T, do func(t *testing.T, hierarchy string)) {
	testenv.NeedRoot(t)
	found := 0
	for _, at := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified"} {
		_, v2 := os.Stat(at + "/cgroup.controllers")
		_, v1 := os.Stat(at + "/cgroup.clone_children")
		if v1 != nil && v2 != nil {
			continue
		}
		found++
		t.Run(filepath.Base(at), func(t *testing.T) { do(t, at) })
	}
	if found == 0 {
		t.Fatal("/sys/fs/cgroup has no control groups")
	}
}

// makeGroup makes a group for a test at a path below a hierarchy, and takes it down.
func makeGroup(t *testing.T, hierarchy, path string) (root, group string) {
	t.Helper()
	root = filepath.Join(hierarchy, fmt.Sprintf("hostpath-test-%d-%d", os.Getpid(), time.Now().UnixNano()))
	group = filepath.Join(root, path)
	must.Succeed(t, os.MkdirAll(group, 0o755))
	t.Cleanup(func() {
		for at := group; len(at) >= len(root); at = filepath.Dir(at) {
			if err := os.Remove(at); err != nil {
				t.Error(err)
			}
		}
	})
	return root, group
}

// A writer is a process that counts, in the group below one of a pod, as a container is.
func writer(t *testing.T, group string) (progress func() string) {
	t.Helper()
	container := filepath.Join(group, "container")
	must.Succeed(t, os.Mkdir(container, 0o755))
	if kind, err := os.ReadFile(group + "/cgroup.type"); err == nil && strings.TrimSpace(string(kind)) == "threaded" {
		must.Succeed(t, os.WriteFile(container+"/cgroup.type", kind, 0))
	}
	cmd := exec.Command("sh", "-c", `echo $$ >"$0/cgroup.procs" || exit 1; i=0; while :; do i=$((i+1)); echo $i; done`, container)
	out, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			select {
			case lines <- s.Text():
			default:
			}
		}
	}()
	t.Cleanup(func() {
		must.Succeed(t, cmd.Process.Kill())
		for range lines {
		}
		_ = cmd.Wait()
		must.Succeed(t, os.Remove(container))
	})
	next := func() string {
		select {
		case line := <-lines:
			return line
		case <-time.After(Limit + 2*time.Second):
			t.Error("the process does not go on")
			return ""
		}
	}
	next() // it is in its group
	return next
}

// isFrozen asks the kernel.
func isFrozen(t *testing.T, at string) bool {
	t.Helper()
	f, err := os.Open(at)
	must.Succeed(t, err)
	g, err := adopt(f)
	must.Succeed(t, err)
	defer g.close()
	stopped, err := g.stopped()
	must.Succeed(t, err)
	return stopped
}

// serve runs a watchdog until the test ends, or stop is called.
func serve(t *testing.T, root string, limit time.Duration) (c Client, stop func()) {
	t.Helper()
	w, err := NewWatchdog(root, testr.New(t))
	must.Succeed(t, err)
	if limit > 0 {
		w.limit = limit
	}
	short, err := os.MkdirTemp("", "f") //nolint:usetesting // a socket's path has 107 bytes at most
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(short)) })
	c = Client{Socket: filepath.Join(short, "freezer.sock")}
	l, err := Listen(t.Context(), c.Socket)
	must.Succeed(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.Serve(ctx, l) }()
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		cancel()
		must.Succeed(t, <-done)
		must.Succeed(t, w.Close())
	}
	t.Cleanup(stop)
	return c, stop
}

func thePod(t *testing.T) []Pod {
	t.Helper()
	pod, err := ParsePod(uid)
	must.Succeed(t, err)
	return []Pod{pod}
}

func TestFreeze(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		for _, place := range places {
			t.Run(place, func(t *testing.T) {
				root, group := makeGroup(t, hierarchy, place)
				goesOn := writer(t, group)
				c, _ := serve(t, root, 0)
				still, thaw, err := c.Freeze(t.Context(), thePod(t))
				must.Succeed(t, err)
				if !isFrozen(t, group) || still.Err() != nil {
					t.Errorf("the group stands still: %v; the answer says %v", isFrozen(t, group), context.Cause(still))
				}
				_, _, err = c.Freeze(t.Context(), thePod(t))
				if !errors.Is(err, ErrBusy) {
					t.Errorf("a second freeze: %v, want ErrBusy", err)
				}
				must.Succeed(t, thaw())
				if isFrozen(t, group) {
					t.Error("the group is frozen after all")
				}
				goesOn()
			})
		}
	})
}

// makeThreaded makes a group whose threads may be in groups of their own (cgroup v2): reading its cgroup.procs fails, those of
// the one that it is in have its processes.
func makeThreaded(t *testing.T, group string) {
	t.Helper()
	must.Succeed(t, os.Mkdir(group, 0o755))
	t.Cleanup(func() { must.Succeed(t, os.Remove(group)) })
	must.Succeed(t, os.WriteFile(group+"/cgroup.type", []byte("threaded"), 0))
	_, err := os.ReadFile(group + "/cgroup.procs")
	must.ErrorIs(t, err, unix.EOPNOTSUPP)
}

func isV2(hierarchy string) bool {
	_, err := os.Stat(hierarchy + "/cgroup.controllers")
	return err == nil
}

func TestFreezeThreaded(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		if !isV2(hierarchy) {
			return // which has no threaded groups
		}
		root, group := makeGroup(t, hierarchy, places[0])
		threads := filepath.Join(group, "threads")
		makeThreaded(t, threads)
		goesOn := writer(t, threads)
		c, _ := serve(t, root, 0)
		_, thaw, err := c.Freeze(t.Context(), thePod(t))
		must.Succeed(t, err)
		if !isFrozen(t, group) {
			t.Error("the pod goes on")
		}
		must.Succeed(t, thaw())
		goesOn()
		root, above := makeGroup(t, hierarchy, "kubepods")
		makeThreaded(t, filepath.Join(above, "pod"+uid))
		c, _ = serve(t, root, 0)
		if _, _, err := c.Freeze(t.Context(), thePod(t)); !errors.Is(err, ErrUnavailable) {
			t.Errorf("a pod whose own group is threaded: %v, want ErrUnavailable", err)
		}
	})
}

func TestFreezeRefused(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		root, group := makeGroup(t, hierarchy, places[0])
		c, stop := serve(t, root, 0)
		other, err := ParsePod(strings.Repeat("0", 32))
		must.Succeed(t, err)
		if _, _, err := c.Freeze(t.Context(), []Pod{other}); !errors.Is(err, ErrUnavailable) {
			t.Errorf("a pod without a group: %v, want ErrUnavailable", err)
		}
		// A group that another program has frozen is not ours.
		f, err := os.Open(group)
		must.Succeed(t, err)
		g, err := adopt(f)
		must.Succeed(t, err)
		defer g.close()
		must.Succeed(t, g.set(true))
		if _, _, err := c.Freeze(t.Context(), thePod(t)); !errors.Is(err, ErrBusy) {
			t.Errorf("a pod that others have frozen: %v, want ErrBusy", err)
		}
		if asked, err := g.asked(); err != nil || !asked {
			t.Errorf("it was thawed: %v", err)
		}
		must.Succeed(t, g.set(false))
		stop()
		if _, _, err := c.Freeze(t.Context(), thePod(t)); !errors.Is(err, ErrUnavailable) {
			t.Errorf("without a watchdog: %v, want ErrUnavailable", err)
		}
	})
}

// A watchdog that froze the pod that it is in could thaw nothing.
func TestOwnPodIsNotFrozen(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		root, group := makeGroup(t, hierarchy, places[1])
		container := filepath.Join(group, "container")
		must.Succeed(t, os.Mkdir(container, 0o755))
		before, err := os.ReadFile("/proc/self/cgroup")
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(container+"/cgroup.procs", []byte("0"), 0))
		t.Cleanup(func() {
			must.Succeed(t, os.WriteFile(cameFrom(hierarchy, string(before))+"/cgroup.procs", []byte("0"), 0))
			must.Succeed(t, os.Remove(container))
		})
		c, _ := serve(t, root, 0)
		if _, _, err := c.Freeze(t.Context(), thePod(t)); !errors.Is(err, ErrUnavailable) {
			t.Errorf("%v, want ErrUnavailable", err)
		}
		if !isV2(hierarchy) {
			return
		}
		threads := filepath.Join(container, "threads")
		makeThreaded(t, threads)
		must.Succeed(t, os.WriteFile(threads+"/cgroup.procs", []byte("0"), 0))
		t.Cleanup(func() { must.Succeed(t, os.WriteFile(container+"/cgroup.procs", []byte("0"), 0)) })
		if _, _, err := c.Freeze(t.Context(), thePod(t)); !errors.Is(err, ErrUnavailable) {
			t.Errorf("in a threaded group: %v, want ErrUnavailable", err)
		}
	})
}

// cameFrom is the group in a hierarchy that /proc/self/cgroup names.
func cameFrom(hierarchy, groups string) string {
	for line := range strings.Lines(groups) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		v2 := parts[1] == ""
		if v2 != strings.HasSuffix(hierarchy, "/freezer") && (v2 || parts[1] == "freezer") {
			return hierarchy + parts[2]
		}
	}
	return hierarchy
}

func TestThawed(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		for name, test := range map[string]struct {
			limit time.Duration
			cause func(t *testing.T, group string, stop func())
			want  error
		}{
			"at the limit":                          {limit: time.Second, cause: func(*testing.T, string, func()) {}, want: ErrThawed},
			"at the end of the watchdog":            {cause: func(_ *testing.T, _ string, stop func()) { stop() }, want: ErrThawed},
			"by another process, which is reported": {cause: thawByHand, want: ErrThawed},
		} {
			t.Run(name, func(t *testing.T) {
				root, group := makeGroup(t, hierarchy, places[1])
				goesOn := writer(t, group)
				c, stop := serve(t, root, test.limit)
				still, thaw, err := c.Freeze(t.Context(), thePod(t))
				must.Succeed(t, err)
				test.cause(t, group, stop)
				if name != "by another process, which is reported" {
					<-still.Done()
				}
				goesOn()
				if err := thaw(); !errors.Is(err, test.want) {
					t.Errorf("%v, want %v", err, test.want)
				}
			})
		}
	})
}

// What the client does between freezing and thawing may be blocked in the kernel: the end of its context alone lets the pods
// go on.
func TestEndOfContextThaws(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		root, group := makeGroup(t, hierarchy, places[1])
		goesOn := writer(t, group)
		c, _ := serve(t, root, 0)
		ctx, end := context.WithCancelCause(t.Context())
		still, thaw, err := c.Freeze(ctx, thePod(t))
		must.Succeed(t, err)
		ended := errors.New("the time is over")
		end(ended)
		goesOn()
		if still.Err() == nil {
			t.Error("the pods stand still by the answer, and go on")
		}
		if err := thaw(); !errors.Is(err, ended) || errors.Is(err, ErrThawed) {
			t.Errorf("%v, want %v, and not that they went on at the limit of the watchdog", err, ended)
		}
	})
}

func thawByHand(t *testing.T, at string, _ func()) {
	t.Helper()
	f, err := os.Open(at)
	must.Succeed(t, err)
	g, err := adopt(f)
	must.Succeed(t, err)
	defer g.close()
	must.Succeed(t, g.set(false))
}

// Two drivers may have one directory of sockets while one is replaced by the other. Whichever of their watchdogs ends first, the
// other is still reached.
func TestSocketOfWatchdogThatServesIsKept(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		root, _ := makeGroup(t, hierarchy, places[1])
		c, stop := serve(t, root, 0)
		if second, err := Listen(t.Context(), c.Socket); err == nil {
			t.Error("a second watchdog has taken the socket")
			must.Succeed(t, second.Close())
		}
		_, thaw, err := c.Freeze(t.Context(), thePod(t))
		must.Succeed(t, err)
		must.Succeed(t, thaw())
		stop()
		second, err := Listen(t.Context(), c.Socket)
		must.Succeed(t, err)
		must.Succeed(t, second.Close())
	})
}

// A watchdog that starts thaws what an earlier one has left, and nothing else.
func TestWatchdogThawsWhatIsLeft(t *testing.T) {
	onEach(t, func(t *testing.T, hierarchy string) {
		for _, ours := range []bool{true, false} {
			root, at := makeGroup(t, hierarchy, places[4])
			f, err := os.Open(at)
			must.Succeed(t, err)
			g, err := adopt(f)
			must.Succeed(t, err)
			if ours {
				must.Succeed(t, g.claim())
				must.Succeed(t, g.stop(t.Context()))
				g.unlock() // as at the end of a process
				g.unlock = nil
			} else {
				must.Succeed(t, g.set(true))
			}
			serve(t, root, 0)
			if asked, err := g.asked(); err != nil || asked == ours {
				t.Errorf("ours %v: frozen %v, %v", ours, asked, err)
			}
			must.Succeed(t, g.set(false))
			g.close()
		}
	})
}
