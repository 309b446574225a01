package cases_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/cluster/example"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const (
	freezeClass = "hostpath-csi-freeze" // in docs/snapshots.md
	writtenTo   = 50                    // files
)

// The pod writes a number into each of many files, one after the other, then the next. So at each
// moment no two files are more than one apart, and those that come first are not behind.
const steadyWriter = `trap exit TERM; cd /volume; i=0
while :; do i=$((i+1)); f=0; while [ $f -lt %d ]; do echo $i >f$f.new && mv f$f.new f$f; f=$((f+1)); done; done`

// The class of docs/snapshots.md freezes a pod that never stops writing: the snapshot is of one moment, on a filesystem
// that copies too, and the pod goes on.
func TestFreeze(t *testing.T) {
	s := begin(t)
	s.withFreezeClass()
	for storage := range poolPaths {
		t.Run(storage, func(t *testing.T) { s.in(t).freezes(storage) })
	}
}

// A pod that is frozen while the driver and the freezer are killed at the same instant goes on as soon as kubelet has started
// the freezer again.
func TestFrozenPodOutlivesDriverAndFreezer(t *testing.T) {
	const (
		name         = "writer"
		frozenAtMost = 10 * time.Second
	)
	s := begin(t)
	s.withFreezeClass()
	s.claim(name, "64Mi", ofClass("hostpath-csi-plain"))
	// All of a file changes all the time, and has to be copied again while the pod is frozen.
	s.pod(name, with(name, "/volume"), doing(`trap exit TERM; while :; do dd if=/dev/zero of=/volume/large bs=1M count=48 conv=notrunc; date >/volume/f0; done`))
	pod := s.ready(name)
	group := s.groupOf(pod)
	driver := s.driverOn(pod.Spec.NodeName)
	processes := s.processesOf(driver, "driver", "freezer")
	held := false
	for n := 1; !held; n++ {
		snapshot := fmt.Sprint(name, "-", n)
		s.snapshotOfClass(freezeClass, snapshot, name)
		held = s.stopWhileFrozen(group, processes, snapshot)
		defer func() {
			// The snapshot-controller may leave one for ever that is deleted while it is made.
			s.snapshotReady(snapshot)
			s.removeSnapshot(snapshot)
			s.wantSnapshotGone(snapshot)
		}()
	}
	began := time.Now()
	for _, p := range processes {
		must.Succeed(t, p.Kill())
	}
	s.until("the pod to go on", func(context.Context) (string, error) {
		if isFrozen(group) {
			return "it is frozen", nil
		}
		return "", nil
	})
	took := time.Since(began)
	if t.Logf("the pod was frozen for %s", took); took > frozenAtMost {
		t.Errorf("the pod was frozen for %s, at most %s are allowed", took, frozenAtMost)
	}
	s.mustRun(name, "echo goes on >/volume/after")
	must.Succeed(t, c.DriverReady(t.Context()))
	s.remove(name)
}

// groupOf is the control group of a pod that can be frozen.
func (s *scene) groupOf(pod *corev1.Pod) string {
	s.Helper()
	group := s.anyGroupOf(pod)
	if group == "" {
		s.Fatalf("pod %s has no control group that can be frozen", pod.Name)
	}
	return group
}

// anyGroupOf is groupOf, or empty for a pod that has ended.
func (s *scene) anyGroupOf(pod *corev1.Pod) string {
	s.Helper()
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/freezer"} {
		for _, class := range []string{"", "*"} {
			found, err := filepath.Glob(filepath.Join(hierarchy, c.Nodes[pod.Spec.NodeName].Cgroup, "kubepods", class, "pod"+string(pod.UID)))
			must.Succeed(s, err)
			if len(found) == 1 && (exists(found[0]+"/freezer.state") || exists(found[0]+"/cgroup.freeze")) {
				return found[0]
			}
		}
	}
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// isFrozen reports whether all processes of a group stand still.
func isFrozen(group string) bool {
	for file, has := range map[string]string{"cgroup.events": "frozen 1", "freezer.state": "FROZEN"} {
		if data, err := os.ReadFile(filepath.Join(group, file)); err == nil && strings.Contains(string(data), has) {
			return true
		}
	}
	return false
}

// driverOn is the pod of the driver on a node.
func (s *scene) driverOn(node string) *corev1.Pod {
	s.Helper()
	for _, name := range s.driverPods() {
		pod, err := c.Client.CoreV1().Pods(cluster.Namespace).Get(s.Context(), name, metav1.GetOptions{})
		must.Succeed(s, err)
		if pod.Spec.NodeName == node {
			return pod
		}
	}
	s.Fatalf("no driver on %s", node)
	return nil
}

// processesOf are those of containers of a pod.
func (s *scene) processesOf(pod *corev1.Pod, containers ...string) (all []*os.Process) {
	s.Helper()
	for _, status := range pod.Status.ContainerStatuses {
		if !slices.Contains(containers, status.Name) {
			continue
		}
		_, id, _ := strings.Cut(status.ContainerID, "://")
		numbers, err := os.ReadFile(filepath.Join(s.groupOf(pod), id, "cgroup.procs"))
		must.Succeed(s, err)
		for number := range strings.FieldsSeq(string(numbers)) {
			pid, err := strconv.Atoi(number)
			must.Succeed(s, err)
			p, err := os.FindProcess(pid)
			must.Succeed(s, err)
			all = append(all, p)
		}
	}
	if len(all) != len(containers) {
		s.Fatalf("%d processes in the containers %q of %s", len(all), containers, pod.Name)
	}
	return all
}

// killProcesses kills what runs in the containers of a pod, and reports whether anything did.
func (s *scene) killProcesses(pod *corev1.Pod) (did bool) {
	s.Helper()
	for _, status := range pod.Status.ContainerStatuses {
		_, id, _ := strings.Cut(status.ContainerID, "://")
		numbers, err := os.ReadFile(filepath.Join(s.anyGroupOf(pod), id, "cgroup.procs"))
		if id == "" || errors.Is(err, fs.ErrNotExist) { // it has ended
			continue
		}
		must.Succeed(s, err)
		for number := range strings.FieldsSeq(string(numbers)) {
			pid, err := strconv.Atoi(number)
			must.Succeed(s, err)
			switch err := syscall.Kill(pid, syscall.SIGKILL); {
			case err == nil:
				did = true
			case !errors.Is(err, syscall.ESRCH):
				s.Fatalf("kill process %d of %s: %v", pid, pod.Name, err)
			}
		}
	}
	return did
}

// stopWhileFrozen stops processes while a group is frozen for a snapshot, and reports whether it could: the snapshot may be
// made before.
func (s *scene) stopWhileFrozen(group string, processes []*os.Process, snapshot string) bool {
	s.Helper()
	signal := func(what os.Signal) {
		for _, p := range processes {
			must.Succeed(s, p.Signal(what))
		}
	}
	client := s.snapshots()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for n := 1; ; n++ {
		if isFrozen(group) {
			if signal(syscall.SIGSTOP); isFrozen(group) {
				return true
			}
			signal(syscall.SIGCONT)
		}
		if n%200 == 0 {
			made, err := client.Get(s.Context(), snapshot, metav1.GetOptions{})
			must.Succeed(s, err)
			if ready, _, _ := unstructured.NestedBool(made.Object, "status", "readyToUse"); ready {
				return false
			}
		}
		<-tick.C
	}
}

// withFreezeClass makes the class of docs/snapshots.md.
func (s *scene) withFreezeClass() {
	s.Helper()
	class := filepath.Join(s.TempDir(), "class.yaml")
	must.Succeed(s, os.WriteFile(class, []byte(strings.Join(example.FreezeClass.Lines(s.T), "\n")), 0o600))
	s.kubectl("apply", "-f", class)
	s.Cleanup(func() {
		if out, err := c.Kubectl(context.Background(), "delete", "volumesnapshotclass", freezeClass); err != nil {
			s.Error(out, err)
		}
	})
}

// freezes makes a snapshot of a volume of a class of which a pod writes all the time.
func (s *scene) freezes(storage string) {
	s.Helper()
	name := "writer-" + storage
	s.claim(name, "64Mi", ofClass(storage))
	s.pod(name, with(name, "/volume"), doing(fmt.Sprintf(steadyWriter, writtenTo)))
	s.ready(name)
	// Not ls(1), which fails when a file is renamed between its name and its stat.
	isThere := fmt.Sprintf("[ -e /volume/f%d ] && echo yes || echo no", writtenTo-1)
	s.until("the pod to write", func(context.Context) (string, error) {
		answer, err := s.run(name, isThere)
		if err != nil || strings.TrimSpace(answer) == "yes" {
			return "", err
		}
		return "it has not written all its files", nil
	})

	s.snapshotOfClass(freezeClass, name, name)
	made := s.snapshotReady(name)
	after := s.written(name)
	s.until("the pod to go on", func(context.Context) (string, error) {
		if now := s.written(name); now <= after {
			return fmt.Sprintf("it is at %d still", now), nil
		}
		return "", nil
	})
	pod, err := c.Client.CoreV1().Pods(s.namespace).Get(s.Context(), name, metav1.GetOptions{})
	must.Succeed(s, err)
	if restarts := pod.Status.ContainerStatuses[0].RestartCount; restarts > 0 {
		s.Errorf("the pod was started again %d times", restarts)
	}
	own := filepath.Join(c.Nodes[pod.Spec.NodeName].Disk(pathOf(storage)), ".hostpath-provisioner")
	s.wantFrozen(own, s.handleOf(made))
	s.remove(name)
	s.removeSnapshot(name)
	s.wantSnapshotGone(name)
}

// written is the number at which a writer is.
func (s *scene) written(pod string) int {
	s.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(s.mustRun(pod, "cat /volume/f0")))
	must.Succeed(s, err)
	return n
}

// handleOf is the id that the driver gave a snapshot, without its node.
func (s *scene) handleOf(made volumeSnapshot) string {
	s.Helper()
	handle, _, err := unstructured.NestedString(s.contentOf(made).Object, "status", "snapshotHandle")
	must.Succeed(s, err)
	name, _, _ := strings.Cut(handle, "@")
	return name
}

// wantFrozen says that a snapshot is recorded as one of a moment, and that its files are.
func (s *scene) wantFrozen(own, snapshot string) {
	s.Helper()
	var record struct {
		Origin struct{ Consistency, Method string }
	}
	text, err := os.ReadFile(filepath.Join(own, "volumes", "~"+snapshot+".json"))
	if err == nil {
		err = json.Unmarshal(text, &record)
	}
	if err != nil || record.Origin.Consistency != "point-in-time" {
		s.Errorf("the snapshot is recorded as %s (%v), want a point in time", text, err)
	}
	first, before := 0, 0
	for i := range writtenTo {
		data, err := os.ReadFile(filepath.Join(own, "snapshots", "~"+snapshot, fmt.Sprint("f", i)))
		must.Succeed(s, err)
		n, err := strconv.Atoi(strings.TrimSpace(string(data)))
		switch {
		case err != nil:
			s.Fatal(err)
		case i == 0:
			first = n
		case n > before || n < first-1:
			s.Fatalf("file %d has %d, the one before %d, the first %d: not of one moment", i, n, before, first)
		}
		before = n
	}
}
