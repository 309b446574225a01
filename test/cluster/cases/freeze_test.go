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
	h := begin(t)
	h.withFreezeClass()
	for storage := range poolPaths {
		t.Run(storage, func(t *testing.T) { h.in(t).freezes(storage) })
	}
}

// A pod that is frozen while the driver and the freezer are killed at the same instant goes on as soon as kubelet has started
// the freezer again.
func TestFrozenPodOutlivesDriverAndFreezer(t *testing.T) {
	const (
		name         = "writer"
		frozenAtMost = 10 * time.Second
	)
	h := begin(t)
	h.withFreezeClass()
	h.claim(name, "64Mi", ofClass("hostpath-csi-plain"))
	// All of a file changes all the time, and has to be copied again while the pod is frozen.
	h.pod(name, with(name, "/volume"), doing(`trap exit TERM; while :; do dd if=/dev/zero of=/volume/large bs=1M count=48 conv=notrunc; date >/volume/f0; done`))
	pod := h.ready(name)
	group := h.groupOf(pod)
	driver := h.driverOn(pod.Spec.NodeName)
	processes := h.processesOf(driver, "driver", "freezer")
	held := false
	for n := 1; !held; n++ {
		snapshot := fmt.Sprint(name, "-", n)
		h.snapshotOfClass(freezeClass, snapshot, name)
		held = h.stopWhileFrozen(group, processes, snapshot)
		defer func() {
			// The snapshot-controller may leave one for ever that is deleted while it is made.
			h.snapshotReady(snapshot)
			h.removeSnapshot(snapshot)
			h.wantSnapshotGone(snapshot)
		}()
	}
	began := time.Now()
	for _, p := range processes {
		must.Succeed(t, p.Kill())
	}
	h.until("the pod to go on", func(context.Context) (string, error) {
		if isFrozen(group) {
			return "it is frozen", nil
		}
		return "", nil
	})
	took := time.Since(began)
	if t.Logf("the pod was frozen for %s", took); took > frozenAtMost {
		t.Errorf("the pod was frozen for %s, at most %s are allowed", took, frozenAtMost)
	}
	h.mustRun(name, "echo goes on >/volume/after")
	must.Succeed(t, c.DriverReady(t.Context()))
	h.remove(name)
}

// groupOf is the control group of a pod that can be frozen.
func (h *harness) groupOf(pod *corev1.Pod) string {
	h.Helper()
	group := h.anyGroupOf(pod)
	if group == "" {
		h.Fatalf("pod %s has no control group that can be frozen", pod.Name)
	}
	return group
}

// anyGroupOf is groupOf, or empty for a pod that has ended.
func (h *harness) anyGroupOf(pod *corev1.Pod) string {
	h.Helper()
	for _, hierarchy := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/freezer"} {
		for _, class := range []string{"", "*"} {
			found, err := filepath.Glob(filepath.Join(hierarchy, c.Nodes[pod.Spec.NodeName].Cgroup, "kubepods", class, "pod"+string(pod.UID)))
			must.Succeed(h, err)
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
func (h *harness) driverOn(node string) *corev1.Pod {
	h.Helper()
	for _, name := range h.driverPods() {
		pod, err := c.Client.CoreV1().Pods(cluster.Namespace).Get(h.Context(), name, metav1.GetOptions{})
		must.Succeed(h, err)
		if pod.Spec.NodeName == node {
			return pod
		}
	}
	h.Fatalf("no driver on %s", node)
	return nil
}

// processesOf are those of containers of a pod.
func (h *harness) processesOf(pod *corev1.Pod, containers ...string) (all []*os.Process) {
	h.Helper()
	for _, status := range pod.Status.ContainerStatuses {
		if !slices.Contains(containers, status.Name) {
			continue
		}
		_, id, _ := strings.Cut(status.ContainerID, "://")
		numbers, err := os.ReadFile(filepath.Join(h.groupOf(pod), id, "cgroup.procs"))
		must.Succeed(h, err)
		for number := range strings.FieldsSeq(string(numbers)) {
			pid, err := strconv.Atoi(number)
			must.Succeed(h, err)
			p, err := os.FindProcess(pid)
			must.Succeed(h, err)
			all = append(all, p)
		}
	}
	if len(all) != len(containers) {
		h.Fatalf("%d processes in the containers %q of %s", len(all), containers, pod.Name)
	}
	return all
}

// killProcesses kills what runs in the containers of a pod, and reports whether anything did.
func (h *harness) killProcesses(pod *corev1.Pod) (did bool) {
	h.Helper()
	for _, status := range pod.Status.ContainerStatuses {
		_, id, _ := strings.Cut(status.ContainerID, "://")
		numbers, err := os.ReadFile(filepath.Join(h.anyGroupOf(pod), id, "cgroup.procs"))
		if id == "" || errors.Is(err, fs.ErrNotExist) { // it has ended
			continue
		}
		must.Succeed(h, err)
		for number := range strings.FieldsSeq(string(numbers)) {
			pid, err := strconv.Atoi(number)
			must.Succeed(h, err)
			switch err := syscall.Kill(pid, syscall.SIGKILL); {
			case err == nil:
				did = true
			case !errors.Is(err, syscall.ESRCH):
				h.Fatalf("kill process %d of %s: %v", pid, pod.Name, err)
			}
		}
	}
	return did
}

// stopWhileFrozen stops processes while a group is frozen for a snapshot, and reports whether it could: the snapshot may be
// made before.
func (h *harness) stopWhileFrozen(group string, processes []*os.Process, snapshot string) bool {
	h.Helper()
	signal := func(what os.Signal) {
		for _, p := range processes {
			must.Succeed(h, p.Signal(what))
		}
	}
	client := h.snapshots()
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
			made, err := client.Get(h.Context(), snapshot, metav1.GetOptions{})
			must.Succeed(h, err)
			if ready, _, _ := unstructured.NestedBool(made.Object, "status", "readyToUse"); ready {
				return false
			}
		}
		<-tick.C
	}
}

// withFreezeClass makes the class of docs/snapshots.md.
func (h *harness) withFreezeClass() {
	h.Helper()
	class := filepath.Join(h.TempDir(), "class.yaml")
	must.Succeed(h, os.WriteFile(class, []byte(strings.Join(example.FreezeClass.Lines(h.T), "\n")), 0o600))
	h.kubectl("apply", "-f", class)
	h.Cleanup(func() {
		if out, err := c.Kubectl(context.Background(), "delete", "volumesnapshotclass", freezeClass); err != nil {
			h.Error(out, err)
		}
	})
}

// freezes makes a snapshot of a volume of a class of which a pod writes all the time.
func (h *harness) freezes(storage string) {
	h.Helper()
	name := "writer-" + storage
	h.claim(name, "64Mi", ofClass(storage))
	h.pod(name, with(name, "/volume"), doing(fmt.Sprintf(steadyWriter, writtenTo)))
	h.ready(name)
	// Not ls(1), which fails when a file is renamed between its name and its stat.
	isThere := fmt.Sprintf("[ -e /volume/f%d ] && echo yes || echo no", writtenTo-1)
	h.until("the pod to write", func(context.Context) (string, error) {
		answer, err := h.run(name, isThere)
		if err != nil || strings.TrimSpace(answer) == "yes" {
			return "", err
		}
		return "it has not written all its files", nil
	})

	h.snapshotOfClass(freezeClass, name, name)
	made := h.snapshotReady(name)
	after := h.written(name)
	h.until("the pod to go on", func(context.Context) (string, error) {
		if now := h.written(name); now <= after {
			return fmt.Sprintf("it is at %d still", now), nil
		}
		return "", nil
	})
	pod, err := c.Client.CoreV1().Pods(h.namespace).Get(h.Context(), name, metav1.GetOptions{})
	must.Succeed(h, err)
	if restarts := pod.Status.ContainerStatuses[0].RestartCount; restarts > 0 {
		h.Errorf("the pod was started again %d times", restarts)
	}
	own := filepath.Join(c.Nodes[pod.Spec.NodeName].Disk(pathOf(storage)), ".hostpath-provisioner")
	h.wantFrozen(own, h.handleOf(made))
	h.remove(name)
	h.removeSnapshot(name)
	h.wantSnapshotGone(name)
}

// written is the number at which a writer is.
func (h *harness) written(pod string) int {
	h.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(h.mustRun(pod, "cat /volume/f0")))
	must.Succeed(h, err)
	return n
}

// handleOf is the id that the driver gave a snapshot, without its node.
func (h *harness) handleOf(made volumeSnapshot) string {
	h.Helper()
	handle, _, err := unstructured.NestedString(h.contentOf(made).Object, "status", "snapshotHandle")
	must.Succeed(h, err)
	name, _, _ := strings.Cut(handle, "@")
	return name
}

// wantFrozen says that a snapshot is recorded as one of a moment, and that its files are.
func (h *harness) wantFrozen(own, snapshot string) {
	h.Helper()
	var record struct {
		Origin struct{ Consistency, Method string }
	}
	text, err := os.ReadFile(filepath.Join(own, "volumes", "~"+snapshot+".json"))
	if err == nil {
		err = json.Unmarshal(text, &record)
	}
	if err != nil || record.Origin.Consistency != "point-in-time" {
		h.Errorf("the snapshot is recorded as %s (%v), want a point in time", text, err)
	}
	first, before := 0, 0
	for i := range writtenTo {
		data, err := os.ReadFile(filepath.Join(own, "snapshots", "~"+snapshot, fmt.Sprint("f", i)))
		must.Succeed(h, err)
		n, err := strconv.Atoi(strings.TrimSpace(string(data)))
		switch {
		case err != nil:
			h.Fatal(err)
		case i == 0:
			first = n
		case n > before || n < first-1:
			h.Fatalf("file %d has %d, the one before %d, the first %d: not of one moment", i, n, before, first)
		}
		before = n
	}
}
