package cases_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// killEvery thins out the steps before which programs are killed: 1 for all of them.
var killEvery int

// A victim is hostpath-provisioner, run on a node without a pod, that is killed before one of its steps: system calls
// that change something, and lines that it prints.
type victim struct {
	*harness
	*trap.Trap
	node        string
	environment []string
	args        []string
}

func (h *harness) victim(node string, environment []string, args ...string) victim {
	h.Helper()
	return victim{h, trap.New(h.T, program(h.T, "hostpath-provisioner")), node, environment, append(args, "--kubeconfig="+c.Kubeconfig)}
}

// program is one of the programs as it was built for the images.
func program(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(c.Programs, "..", "linux_"+runtime.GOARCH, name)
	if _, err := os.Stat(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// A started is one run of a victim.
type started struct {
	cmd    *exec.Cmd
	output *bytes.Buffer
	ended  chan struct{}
	err    error
}

func (v victim) start(args ...string) *started {
	v.Helper()
	self, err := os.Executable() // which the trap makes the program
	must.Succeed(v, err)
	r := &started{output: new(bytes.Buffer), ended: make(chan struct{})}
	r.cmd = c.Nodes[v.node].Command(v.Context(), self, append(v.args, args...)...)
	r.cmd.Env = append(os.Environ(), v.environment...)
	r.cmd.Stdout, r.cmd.Stderr = r.output, r.output
	must.Succeed(v, r.cmd.Start())
	go func() {
		r.err = r.cmd.Wait()
		close(r.ended)
	}()
	return r
}

// kill ends the process, if it is not dead already.
func (r *started) kill() error {
	err := r.cmd.Process.Kill()
	<-r.ended
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// The pool is on the nodes' filesystem with quotas, beside that of the driver. The killed process is not asked again: what
// is half done has to be finished, or undone, by the next one itself.
func TestProvisionerKilledBeforeEachStep_nothingIsHalfDone(t *testing.T) {
	h := begin(t)
	p := killedProvisioner{victim: h.victim(nodeA, []string{"NODE_NAME=" + nodeA, "PV_DIR=/var/hpvolumes/.killed"},
		"--health-address="+probes, "--metrics-address=", "--v=2")}
	p.pool = c.Nodes[nodeA].Disk("/var/hpvolumes/.killed")
	h.Cleanup(func() { must.Succeed(h, os.RemoveAll(p.pool)) })
	immediate := storagev1.VolumeBindingImmediate
	_, err := c.Client.StorageV1().StorageClasses().Create(t.Context(), &storagev1.StorageClass{
		ObjectMeta: metav1.ObjectMeta{Name: p.namespace}, Provisioner: "kubevirt.io/hostpath-provisioner", VolumeBindingMode: &immediate}, metav1.CreateOptions{})
	must.Succeed(h, err)
	h.Cleanup(func() { h.removeClass(p.namespace) })

	p.restart()
	defer func() { must.Succeed(h, p.process.kill()) }()
	for n := 1; ; n += max(1, killEvery/4) { // one takes a second or two
		name := fmt.Sprintf("killed-%d", n)
		created := p.killedCreating(n, name, false)
		p.hostPath(name)
		p.wantOneVolume(name)
		deleted := p.killedDeleting(n, name)
		p.wantNothing()
		if n == 1 && (!created || !deleted) {
			t.Fatalf("no process was killed before the first step: creating %t, deleting %t", created, deleted)
		}
		if !created && !deleted {
			return // there are fewer steps
		}
		p.killedCreating(n, name+"-given-up", true)
		p.wantNothing()
	}
}

// probes is where a provisioner that runs without a pod answers them: on the address that all of the cluster share.
const probes = "127.0.0.1:19808"

type killedProvisioner struct {
	victim
	pool    string
	process *started
}

// restart starts the next process, which is not killed, and waits until it serves.
func (p *killedProvisioner) restart() {
	p.Helper()
	p.process = p.start()
	p.until("the provisioner to serve", func(ctx context.Context) (string, error) {
		select {
		case <-p.process.ended:
			return "", fmt.Errorf("it has ended: %w\n%s", p.process.err, p.process.output)
		default:
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+probes+"/readyz", nil)
		if err != nil {
			return "", err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return "", err // refused, as long as it does not listen
		}
		return strings.TrimPrefix(response.Status, "200 OK"), response.Body.Close()
	})
}

// killedCreating kills the process before a step by which it makes the volume of a claim, and starts the next. A claim that
// is given up is deleted in between. If there are fewer steps, no process is killed.
func (p *killedProvisioner) killedCreating(n int, claim string, givenUp bool) (died bool) {
	p.Helper()
	p.Arm(n)
	p.claim(claim, "10Mi", ofClass(p.namespace), madeOn(p.node))
	p.until("the volume to be made, or the provisioner killed", func(ctx context.Context) (string, error) {
		if p.HasKilled() {
			return "", nil
		}
		made, err := c.Client.CoreV1().PersistentVolumeClaims(p.namespace).Get(ctx, claim, metav1.GetOptions{})
		if err != nil || made.Status.Phase == corev1.ClaimBound {
			return "", err
		}
		return string(made.Status.Phase), nil
	})
	return p.next("create", func() {
		if givenUp {
			p.kubectl("delete", "pvc", "-n", p.namespace, claim)
		}
	})
}

func (p *killedProvisioner) killedDeleting(n int, claim string) (died bool) {
	p.Helper()
	volume := p.volume(claim).Name
	p.Arm(n)
	p.kubectl("delete", "pvc", "-n", p.namespace, claim)
	p.until("the volume to be removed, or the provisioner killed", func(ctx context.Context) (string, error) {
		if p.HasKilled() {
			return "", nil
		}
		_, err := c.Client.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return p.left(), nil
		}
		return "still there", err
	})
	return p.next("delete", func() {})
}

// next checks what a process that was killed has left, and starts the next.
func (p *killedProvisioner) next(what string, between func()) (died bool) {
	p.Helper()
	steps, died := p.Disarm()
	if !died {
		between()
		return false
	}
	must.Succeed(p, p.process.kill())
	p.Logf("%s: killed before step %d, %s", what, len(steps), steps[len(steps)-1])
	p.wantWhole()
	between()
	p.restart()
	return true
}

// directories are what is visible in the pool.
func (p *killedProvisioner) directories() (names []string) {
	p.Helper()
	entries, err := os.ReadDir(p.pool)
	must.Succeed(p, err)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names
}

func (p *killedProvisioner) recorded(name string) bool {
	_, err := os.Stat(filepath.Join(p.pool, ".hostpath-provisioner/volumes", name+".json"))
	return err == nil
}

// wantWhole expects each directory to have its record and mode, and each PersistentVolume that is in use its directory.
func (p *killedProvisioner) wantWhole() {
	p.Helper()
	names := p.directories()
	for _, name := range names {
		info, err := os.Stat(filepath.Join(p.pool, name))
		if err != nil || info.Mode().Perm() != 0o777 || !p.recorded(name) {
			p.Errorf("%s has the mode %v and a record: %t (%v)", name, info.Mode(), p.recorded(name), err)
		}
	}
	volumes, err := c.Client.CoreV1().PersistentVolumes().List(p.Context(), metav1.ListOptions{})
	must.Succeed(p, err)
	for _, v := range volumes.Items {
		if v.Spec.StorageClassName == p.namespace && v.Status.Phase == corev1.VolumeBound && v.DeletionTimestamp == nil && !slices.Contains(names, v.Name) {
			p.Errorf("%s is %s, and its directory is missing", v.Name, v.Status.Phase)
		}
	}
}

func (p *killedProvisioner) wantOneVolume(claim string) {
	p.Helper()
	if name := p.volume(claim).Name; !slices.Equal(p.directories(), []string{name}) || !p.recorded(name) {
		p.Errorf("the pool has %v, want %s with its record", p.directories(), name)
	}
}

// wantNothing waits until nothing is left, in the cluster and on the disk.
func (p *killedProvisioner) wantNothing() {
	p.Helper()
	p.until("nothing to be left", func(ctx context.Context) (string, error) {
		volumes, err := c.Client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return "", err
		}
		for _, v := range volumes.Items {
			if v.Spec.StorageClassName == p.namespace {
				return v.Name + " " + string(v.Status.Phase), nil
			}
		}
		return p.left(), nil
	})
}

// left is what the pool has of volumes, whole, being made or being removed.
func (p *killedProvisioner) left() string {
	var found []string
	for _, pattern := range []string{"[a-z]*", ".hostpath-provisioner/*/*/*", ".hostpath-provisioner/volumes/*"} {
		matches, err := filepath.Glob(filepath.Join(p.pool, pattern))
		must.Succeed(p, err)
		found = append(found, matches...)
	}
	return strings.Join(found, " ")
}

// Each run is killed before a step, and the same command, or the one that goes back, is given again.
func TestMigrationKilledBeforeEachStep_goesOnBothWays(t *testing.T) {
	tests := map[string]struct{ provisioner, source, directory string }{
		"hostPath of the provisioner, moved": {"kubevirt.io/hostpath-provisioner", "hostPath", "/var/plain/.killed"},
		"local of local-path, in place":      {"rancher.io/local-path", "local", "/var/plain"},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			h := begin(t)
			const name = "pvc-33333333-2222-3333-4444-555555555555"
			from := filepath.Join(tt.directory, name)
			h.Cleanup(func() {
				if tt.directory != "/var/plain" {
					must.Succeed(h, os.RemoveAll(c.Nodes[nodeA].Disk(tt.directory)))
				}
			})
			h.oldVolume(nodeA, tt.provisioner, tt.source, from, "data")
			if got := h.wrote("data", "before"); got != "before\n" {
				t.Fatalf("the pod reads %q", got)
			}

			m := killedMigration{places: []string{c.Nodes[nodeA].Disk(from), c.Nodes[nodeA].Disk("/var/plain/" + name)}}
			m.victim = h.victim(nodeA, []string{
				"NODE_NAME=" + nodeA, "TO_CLASS=hostpath-csi-plain", "FROM_DIR=" + tt.directory, `DATADIR=[{"name":"plain","path":"/var/plain"}]`,
			}, "migrate", "--claim="+h.namespace+"/data", "--apply", "--save-dir="+t.TempDir(),
				"--socket=/var/lib/kubelet/plugins/kubevirt.io.hostpath-provisioner/csi.sock")
			for n, goOn := 1, true; goOn; n += killEvery {
				goOn = m.killed(n)
				m.complete()
				if now := h.volume("data"); now.Spec.CSI == nil || now.Spec.CSI.VolumeHandle != name {
					t.Fatalf("after step %d: PersistentVolume %+v", n, now.Spec)
				}
				back := m.killed(n, "--undo")
				if n == 1 && (!goOn || !back) {
					t.Fatalf("no process was killed before the first step: forward %t, back %t", goOn, back)
				}
				goOn = goOn || back
				m.complete("--undo")
				if now := h.volume("data"); now.Spec.CSI != nil || now.Name != name {
					t.Fatalf("after step %d back: PersistentVolume %+v", n, now.Spec)
				}
			}
			m.complete()
			if got := h.wrote("data", "after"); got != "before\nafter\n" {
				t.Errorf("the pod reads %q", got)
			}
			h.removeClaim("data")
		})
	}
}

type killedMigration struct {
	victim
	// places are where the directory may be.
	places []string
}

// killed runs the command, which is killed before a step. If it has fewer steps it is through.
func (m *killedMigration) killed(n int, args ...string) (died bool) {
	m.Helper()
	m.Arm(n)
	r := m.start(args...)
	<-r.ended
	steps, died := m.Disarm()
	if !died && r.err != nil {
		m.Fatalf("%q: %v\n%s", args, r.err, r.output)
	}
	if died {
		m.Logf("%q: killed before step %d, %s", args, n, steps[n-1])
	}
	m.wantData()
	return died
}

// complete runs the command to its end.
func (m *killedMigration) complete(args ...string) {
	m.Helper()
	r := m.start(args...)
	if <-r.ended; r.err != nil {
		m.Fatalf("%q: %v\n%s", args, r.err, r.output)
	}
	m.wantData()
}

// wantData expects the directory in one of its places, with what the pod has written.
func (m *killedMigration) wantData() {
	m.Helper()
	found := 0
	for _, place := range slices.Compact(slices.Clone(m.places)) {
		text, err := os.ReadFile(filepath.Join(place, "file"))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil || string(text) != "before\n" {
			m.Errorf("%s has %q (%v)", place, text, err)
		}
		found++
	}
	if found != 1 {
		m.Errorf("the directory is in %d of %v", found, m.places)
	}
}
