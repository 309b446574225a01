package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A mover is the container of a pod that kubelet runs, as a process.
type mover struct {
	pod     string
	command string
	line    []string
	env     []string
	files   *files
	cmd     *exec.Cmd
	exited  chan struct{}
	err     error
	// restarts are how often it was run again, and last how it has ended before.
	restarts int32
	last     *corev1.ContainerStateTerminated
	since    time.Time // when it ended, or was told to

	mu             sync.Mutex
	stdout, stderr bytes.Buffer
	told           bool // to end
}

// Write is of the standard output.
func (m *mover) Write(p []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stdout.Write(p)
}

func (m *mover) said() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stdout.String()
}

// failed is what it wrote as errors.
func (m *mover) failed() string {
	if m.runs() {
		return ""
	}
	return m.stderr.String()
}

func (m *mover) runs() bool {
	select {
	case <-m.exited:
		return false
	default:
		return true
	}
}

// launches says whether the process is still the one that becomes the program in a trap.
func (m *mover) launches() bool {
	self, selfErr := os.Readlink("/proc/self/exe")
	is, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", m.cmd.Process.Pid))
	return selfErr == nil && err == nil && is == self
}

// start runs the container.
func (m *mover) start() error {
	m.mu.Lock()
	m.stdout.Reset()
	m.mu.Unlock()
	m.stderr.Reset()
	m.exited = make(chan struct{})
	m.cmd = exec.Command(m.line[0], m.line[1:]...)
	m.cmd.Env = append(append(os.Environ(), "GORACE=atexit_sleep_ms=0"), m.env...)
	m.cmd.Stdout, m.cmd.Stderr = m, &m.stderr
	return drivertest.Spawn(m.cmd, func() {
		m.err = m.cmd.Wait()
		close(m.exited)
	})
}

func (m *mover) kill() {
	_ = m.cmd.Process.Kill() // it may have ended
	<-m.exited
}

// graceful is how long kubelet lets a mover end.
const graceful = 10 * time.Second

// ends has the container end, and says whether it has.
func (m *mover) ends() bool {
	switch {
	case !m.runs():
		return true
	case m.launches(): // a program is not killed while it gets into the trap
	case !m.told:
		m.told, m.since = true, time.Now()
		_ = m.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	case time.Since(m.since) > graceful:
		m.kill()
	}
	return false
}

// backOff is for how long kubelet waits before it runs again what has failed; a real one waits for ten seconds and more.
const backOff = 50 * time.Millisecond

// state is that of the container, which is run again if it has failed.
func (m *mover) state() (corev1.PodPhase, corev1.ContainerStatus, error) {
	var err error
	status := corev1.ContainerStatus{Name: "mover"}
	phase := corev1.PodRunning
	switch {
	case m.runs():
		m.since = time.Time{}
		status.State.Running = &corev1.ContainerStateRunning{}
	case m.err == nil:
		phase = corev1.PodSucceeded
		status.State.Terminated = &corev1.ContainerStateTerminated{}
	case m.since.IsZero():
		m.since = time.Now()
		m.last = m.ending()
		status.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}
	case time.Since(m.since) > backOff:
		m.restarts++
		m.since = time.Time{}
		err = m.start()
		status.State.Running = &corev1.ContainerStateRunning{}
	default:
		status.State.Waiting = &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}
	}
	status.RestartCount, status.LastTerminationState.Terminated = m.restarts, m.last
	return phase, status, err
}

// ending is how a container has failed.
func (m *mover) ending() *corev1.ContainerStateTerminated {
	ended := &corev1.ContainerStateTerminated{ExitCode: 137, Message: m.stdout.String() + m.stderr.String()}
	var exit *exec.ExitError
	if errors.As(m.err, &exit) && exit.ExitCode() > 0 {
		ended.ExitCode = int32(exit.ExitCode())
	}
	return ended
}

// runMovers is what the kubelets do with the pods of movers.
func (c *cluster) runMovers() {
	c.Helper()
	pods := &corev1.PodList{}
	must.Succeed(c, c.api.List(c.Context(), pods, client.InNamespace(storage), client.HasLabels{moveLabel}))
	for i := range pods.Items {
		pod := &pods.Items[i]
		m := c.movers[pod.UID]
		switch {
		case pod.Spec.NodeName == c.cut || m == nil && pod.Status.Phase == corev1.PodSucceeded && pod.DeletionTimestamp == nil:
			continue
		case pod.DeletionTimestamp != nil:
			if m == nil || m.ends() {
				c.drop(pod, running)
			}
			continue
		case m == nil:
			if m = c.container(pod); m == nil {
				continue // a Secret is missing
			}
			c.movers[pod.UID] = m
			must.Succeed(c, m.start())
			c.Cleanup(m.kill)
		}
		before := pod.DeepCopy()
		phase, status, err := m.state()
		must.Succeed(c, err, m.files.shows(pod))
		pod.Status.Phase, pod.Status.ContainerStatuses = phase, []corev1.ContainerStatus{status}
		if pod.Status.PodIP == "" {
			pod.Status.PodIP = "192.0.2." + map[string]string{nodeA: "1", nodeB: "2"}[pod.Spec.NodeName]
		}
		if !equality.Semantic.DeepEqual(before.Status, pod.Status) {
			c.status(pod)
		}
	}
}

// container is that of a pod: its paths are those of the node, and all addresses the one where the target listens.
func (c *cluster) container(pod *corev1.Pod) *mover {
	c.Helper()
	n := c.nodes[pod.Spec.NodeName]
	spec := pod.Spec.Containers[0]
	m := &mover{pod: pod.Name, command: spec.Args[0], line: []string{c.programs[spec.Args[0]]}, env: n.env}
	if m.files = c.mounted(pod); m.files == nil {
		return nil
	}
	pools, err := json.Marshal([]drivertest.PoolConfig{n.pool.PoolConfig})
	must.Succeed(c, err)
	for _, arg := range spec.Args {
		name, value, _ := strings.Cut(arg, "=")
		switch name {
		case "--endpoint":
			arg = name + "=" + n.socket
		case "--datadir":
			arg = name + "=" + string(pools)
		case "--address":
			arg = name + "=" + c.address
		case "--cert-file", "--key-file", "--ca-file", "--may-fence":
			arg = name + "=" + m.files.at(value)
		}
		m.line = append(m.line, arg)
	}
	return m
}

// Files are those of the volume that a pod has of objects, in a directory.
type files struct {
	directory string
	fields    []corev1.DownwardAPIVolumeFile
}

func (f *files) at(path string) string { return filepath.Join(f.directory, filepath.Base(path)) }

// write makes a file, or replaces it, at once.
func (f *files) write(path string, data []byte) error {
	return errors.Join(os.WriteFile(f.at(path+".new"), data, 0o400), os.Rename(f.at(path+".new"), f.at(path)))
}

// shows has the files show what the pod is annotated with now.
func (f *files) shows(pod *corev1.Pod) error {
	var err error
	for _, field := range f.fields {
		key := strings.TrimSuffix(strings.TrimPrefix(field.FieldRef.FieldPath, "metadata.annotations['"), "']")
		err = errors.Join(err, f.write(field.Path, []byte(pod.Annotations[key])))
	}
	return err
}

// mounted has the files of the pod's volume; nil if its Secret is not there.
func (c *cluster) mounted(pod *corev1.Pod) *files {
	c.Helper()
	f := &files{directory: c.TempDir()}
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, source := range v.Projected.Sources {
			if source.DownwardAPI != nil {
				f.fields = append(f.fields, source.DownwardAPI.Items...)
				continue
			}
			secret := &corev1.Secret{}
			secret.Namespace, secret.Name = pod.Namespace, source.Secret.Name
			if !c.has(secret) {
				return nil
			}
			for _, item := range source.Secret.Items {
				must.Succeed(c, f.write(item.Path, secret.Data[item.Key]))
			}
		}
	}
	must.Succeed(c, f.shows(pod))
	return f
}

// Lines are those of a pod's log.
func (c *cluster) Lines(ctx context.Context, namespace, name string) (string, error) {
	pod := &corev1.Pod{}
	if err := c.api.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, pod); err != nil {
		return "", err
	}
	if m := c.movers[pod.UID]; m != nil {
		return m.said() + m.failed(), nil // of a container both are one
	}
	return "", nil
}
