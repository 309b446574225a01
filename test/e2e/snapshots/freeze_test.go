package snapshots

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

const (
	podUID = "0a1b2c3d-0000-4000-8000-00000000000f"
	// published is what the path of a target has in it, as kubelet makes it.
	published = "pods/" + podUID + "/volumes/kubernetes.io~csi/pvc-1"
	// frozenAtMost is what no pod may exceed, whatever is killed.
	frozenAtMost = 10 * time.Second
)

// hierarchies are those of this machine that can freeze.
func hierarchies(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, at := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(at + "/cgroup.controllers"); err == nil {
			found["cgroup v2"] = at
		} else if _, err := os.Stat(at + "/cgroup.clone_children"); err == nil {
			found["cgroup v1"] = at
		}
	}
	if len(found) == 0 {
		t.Fatal("no control groups are mounted at /sys/fs/cgroup")
	}
	return found
}

// A pod is a process that writes to a volume, in the control group of a pod.
type pod struct {
	*harness
	hierarchy, root, group string
	data                   string
	files                  int
}

// startPod makes the control groups of a pod, as kubelet and the runtime do, publishes the volume
// and writes to it: a number into each of many files, one after the other, then the next. So at
// each moment no two files are more than one apart, and those that come first are not behind.
// A file of some bytes, of which a copy takes a while where blocks are not shared, changes with each
// number.
func startPod(h *harness, hierarchy string, files int, bytes int64) *pod {
	h.Helper()
	p := &pod{harness: h, files: files, hierarchy: hierarchy, root: filepath.Join(hierarchy, fmt.Sprintf("hostpath-test-%d-%d", os.Getpid(), time.Now().UnixNano()))}
	p.group = filepath.Join(p.root, "kubepods.slice", "kubepods-burstable.slice", "kubepods-burstable-pod"+strings.ReplaceAll(podUID, "-", "_")+".slice")
	container := filepath.Join(p.group, "container")
	h.Must(os.MkdirAll(container, 0o755))
	h.Cleanup(func() {
		for at := container; len(at) >= len(p.root); at = filepath.Dir(at) {
			h.Eventually("the control group is empty", func() bool {
				err := os.Remove(at)
				if !errors.Is(err, syscall.EBUSY) {
					must.Succeed(h, err)
				}
				return err == nil
			})
		}
	})
	v := directory("pvc-1", size)
	h.MustCreate(v)
	h.Must(h.Publish(h.Context(), v, published))
	p.data = h.Target(published)
	h.Must(os.WriteFile(filepath.Join(p.data, "large"), make([]byte, bytes), 0o600))
	script := `cd "$1" && echo $$ >"$0/cgroup.procs" || exit 1
i=0; while :; do i=$((i+1)); echo $i >>large; f=0; while [ $f -lt ` + strconv.Itoa(files) + ` ]; do echo $i >f$f.new && mv f$f.new f$f; f=$((f+1)); done; done`
	cmd := exec.Command("sh", "-c", script, container, p.data)
	h.Must(cmd.Start())
	h.Cleanup(func() {
		if p.frozen() { // and would not die
			h.Errorf("the pod was left frozen; thawing it: %v", p.thaw())
		}
		must.Succeed(h, cmd.Process.Kill())
		_ = cmd.Wait()
		if h.Failed() {
			return
		}
		h.Eventually("the pod has ended", func() bool { // with what the shell had started
			left, err := os.ReadFile(container + "/cgroup.procs")
			return err == nil && len(left) == 0
		})
		ended := context.Background() // that of the test has
		// What is ending is in no control group any more, and its directory is busy for a moment.
		h.Eventually("the volume is unpublished", func() bool {
			err := h.Unpublish(ended, v.ID, published)
			if status.Code(err) != codes.FailedPrecondition {
				must.Succeed(h, err)
			}
			return err == nil
		})
		must.Succeed(h, h.Delete(ended, v.ID))
	})
	h.Eventually("the pod writes", func() bool {
		_, err := os.Stat(filepath.Join(p.data, "f"+strconv.Itoa(files-1)))
		return err == nil
	})
	return p
}

// thaw is for pods that should not be frozen.
func (p *pod) thaw() error {
	if p.v1() {
		return os.WriteFile(filepath.Join(p.group, "freezer.state"), []byte("THAWED"), 0)
	}
	return os.WriteFile(filepath.Join(p.group, "cgroup.freeze"), []byte("0"), 0)
}

func (p *pod) v1() bool {
	_, err := os.Stat(filepath.Join(p.group, "freezer.state"))
	return err == nil
}

func (p *pod) frozen() bool {
	p.Helper()
	for file, has := range map[string]string{"cgroup.events": "frozen 1", "freezer.state": "FROZEN"} {
		if data, err := os.ReadFile(filepath.Join(p.group, file)); err == nil && strings.Contains(string(data), has) {
			return true
		}
	}
	return false
}

// wantMoment expects the files of a directory to be of one moment.
func (p *pod) wantMoment(at string) {
	p.Helper()
	before, first := 0, 0
	for i := range p.files {
		data, err := os.ReadFile(filepath.Join(at, fmt.Sprint("f", i)))
		p.Must(err)
		n, err := strconv.Atoi(strings.TrimSpace(string(data)))
		p.Must(err)
		if i == 0 {
			first = n
		} else if n > before || n < first-1 {
			p.Fatalf("file %d has %d, the one before %d, the first %d: not of one moment", i, n, before, first)
		}
		before = n
	}
}

// startFreezer runs the watchdog beside the driver, as the second container does.
func startFreezer(h *harness, binary string, p *pod) *exec.Cmd {
	h.Helper()
	socket := filepath.Join(filepath.Dir(strings.TrimPrefix(h.Process.Endpoint(), "unix://")), "freezer.sock")
	if err := os.Remove(socket); !errors.Is(err, os.ErrNotExist) { // of one that was killed
		h.Must(err)
	}
	cmd := exec.Command(binary, "freezer", "--socket="+socket, "--cgroups="+p.root)
	cmd.Stderr = os.Stderr
	h.Must(cmd.Start())
	h.Eventually("the freezer serves", func() bool {
		conn, err := net.Dial("unixpacket", socket) // there is a socket a moment before the freezer listens
		if err == nil {
			h.Must(conn.Close())
		}
		return err == nil
	})
	h.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have been already
		_ = cmd.Wait()
		_ = os.Remove(socket)
	})
	return cmd
}

func (p *pod) freezeSnapshot(name string) error {
	return must.Err(p.Snapshot(p.Context(), name, "pvc-1", "freeze"))
}

// TestFreeze makes snapshots of a volume whose pod never stops writing, on each filesystem and with
// each kind of control groups.
func TestFreeze(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	for _, fs := range filesystems {
		for version, hierarchy := range hierarchies(t) {
			if testing.Short() && version != "cgroup v2" && fs.name != "xfs" {
				continue // the freezer's own tests have both
			}
			t.Run(fs.name+" with "+version, func(t *testing.T) {
				h := newHarness(t, driver, fs.mount(t), fs.enforcement)
				h.copies = fs.copies
				p := startPod(h, hierarchy, 100, mib)
				h.Eventually("a snapshot without a freezer is refused, once the pod writes while it is made", func() bool {
					err := p.freezeSnapshot("without")
					if err == nil {
						h.Must(h.DeleteSnapshot(h.Context(), "without@"+drivertest.NodeName))
						return false
					}
					h.WantCode("without a freezer", err, codes.FailedPrecondition)
					return true
				})
				startFreezer(h, driver, p)
				h.Must(p.freezeSnapshot("s-1"))
				if p.frozen() {
					t.Error("the pod is frozen after all")
				}
				p.wantMoment(h.pool.Own("snapshots", "~s-1"))
				record := must.Value(h.pool.Record("~s-1"))(h)
				if record.Origin.Consistency != "point-in-time" {
					t.Errorf("it is recorded as %+v", record.Origin)
				}
				h.Must(h.DeleteSnapshot(h.Context(), "s-1@"+drivertest.NodeName))
			})
		}
	}
}

// TestFrozenPodsGoOn kills the driver or the freezer while a pod is frozen, and stops them, which
// is worse. Nothing stays frozen for longer than ten seconds.
func TestFrozenPodsGoOn(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	pool := testenv.LoopFS(t, "ext4", 1<<30)
	for version, hierarchy := range hierarchies(t) {
		for name, strike := range map[string]func(driver, freezer *os.Process) error{
			"driver killed":   func(d, _ *os.Process) error { return d.Kill() },
			"driver stopped":  func(d, _ *os.Process) error { return d.Signal(syscall.SIGSTOP) },
			"freezer killed":  func(_, f *os.Process) error { return f.Kill() },
			"freezer stopped": func(_, f *os.Process) error { return f.Signal(syscall.SIGSTOP) },
		} {
			// A client that is stopped keeps the pod frozen up to the limit, which takes its time.
			if strings.HasSuffix(name, "stopped") && testing.Short() && (name != "driver stopped" || version != "cgroup v2") {
				continue
			}
			t.Run(name+" with "+version, func(t *testing.T) {
				h := newHarness(t, driver, pool, "")
				p := startPod(h, hierarchy, 100, 64*mib)
				f := startFreezer(h, driver, p)
				own := must.Value(os.FindProcess(h.Process.Pid()))(h)
				done := p.freezeUntilSeen("s-1")
				began := time.Now()
				h.Must(strike(own, f.Process))
				h.Eventually("the pod goes on", func() bool { return !p.frozen() })
				if took := time.Since(began); took > frozenAtMost {
					t.Errorf("the pod was frozen for %s", took)
				}
				_ = own.Signal(syscall.SIGCONT)
				_ = f.Process.Signal(syscall.SIGCONT)
				t.Logf("the call was answered with %v", <-done)
				h.Crash()
				if _, err := os.Stat(h.pool.Own("snapshots", "~s-1")); err == nil {
					p.wantMoment(h.pool.Own("snapshots", "~s-1"))
				}
				h.Must(h.DeleteSnapshot(h.Context(), "s-1@"+drivertest.NodeName))
			})
		}
	}
}

// freezeUntilSeen makes a snapshot until the pod is seen frozen for it, which a busy machine may miss, and returns the answer to come.
func (p *pod) freezeUntilSeen(name string) (made <-chan error) {
	p.Helper()
	for seen := false; ; {
		done := make(chan error, 1)
		go func() { done <- p.freezeSnapshot(name) }()
		p.Eventually("the pod is frozen, or was", func() bool {
			seen = p.frozen()
			return seen || len(done) > 0
		})
		if seen {
			return done
		}
		p.Must(<-done)
		p.Must(p.DeleteSnapshot(p.Context(), name+"@"+drivertest.NodeName))
	}
}

// TestFrozenPodsGoOnAtEachStep kills the driver before each system call by which a snapshot is made
// while the pod is frozen for it: of files that share blocks, and of copied ones.
func TestFrozenPodsGoOnAtEachStep(t *testing.T) {
	testenv.NeedRoot(t)
	driver := drivertest.Built(t)
	self, err := os.Executable() // which launches the driver
	must.Succeed(t, err)
	for _, fs := range filesystems {
		for version, hierarchy := range hierarchies(t) {
			every, least := 1, 10
			if testing.Short() {
				if every, least = 9, 1; version != "cgroup v2" || fs.name == "btrfs" {
					continue
				}
			}
			t.Run(fs.name+" with "+version, func(t *testing.T) {
				steps := trap.New(t, driver)
				h := newHarness(t, self, fs.mount(t), fs.enforcement)
				h.copies = fs.copies
				p := startPod(h, hierarchy, 4, 4096)
				startFreezer(h, driver, p)
				longest, kills := time.Duration(0), 0
				for at, killed := 1, true; killed; at += every {
					var frozen time.Duration
					if frozen, killed = p.killedAt(steps, at); killed {
						kills++
						longest = max(longest, frozen)
					}
				}
				if t.Logf("killed %d times; after that the pod was frozen for %s at most", kills, longest); longest > frozenAtMost || kills < least {
					t.Errorf("killed %d times; the pod was frozen for %s", kills, longest)
				}
			})
		}
	}
}

// killedAt has the driver killed before a step of making a snapshot, unless that has fewer, and answers
// for how long the pod was frozen after that.
func (p *pod) killedAt(steps *trap.Trap, at int) (frozen time.Duration, killed bool) {
	p.Helper()
	p.AwaitNoTrash(p.pool.Path) // or steps of the reaper count
	err := drivertest.Repeat(p.Context(), func() error {
		steps.Arm(at)
		return p.freezeSnapshot("s-1")
	})
	began := time.Now()
	if _, killed = steps.Disarm(); killed {
		p.Eventually("the pod goes on", func() bool { return !p.frozen() })
		frozen = time.Since(began)
		p.Must(errors.Join(p.Process.Kill(), p.Process.Restart(p.Context())))
		p.AwaitServing()
	} else {
		p.Must(err)
	}
	if _, err := os.Stat(p.pool.Own("snapshots", "~s-1")); err == nil {
		p.wantMoment(p.pool.Own("snapshots", "~s-1"))
	}
	p.Must(p.DeleteSnapshot(p.Context(), "s-1@"+drivertest.NodeName))
	return frozen, killed
}
