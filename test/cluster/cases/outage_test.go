package cases_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// counting writes a number after the other, and ends when a write fails.
const counting = "trap exit TERM; i=0; while i=$((i+1)); do echo $i >>/data/numbers || exit 1; sleep 0.1 & wait; done"

// A writer is a pod that writes numbers into its volume.
type writer struct {
	pod  *corev1.Pod
	file string
}

func (h *harness) writers(count int, changes ...func(*corev1.Pod)) []writer {
	h.Helper()
	name := func(i int) string { return fmt.Sprintf("writer-%d", i) }
	for i := range count {
		h.claim(name(i), "64Mi")
		h.pod(name(i), append([]func(*corev1.Pod){with(name(i), "/data"), doing(counting)}, changes...)...)
	}
	var all []writer
	for i := range count {
		pod := h.ready(name(i))
		all = append(all, writer{pod, filepath.Join(h.disk(h.volume(name(i))), "numbers")})
	}
	return all
}

// last is the last number that a writer has written. All before it have to be
// there.
func (w writer) last() (int, error) {
	text, err := os.ReadFile(w.file)
	if err != nil {
		return 0, err
	}
	last := 0
	for line := range strings.Lines(string(text)) {
		if !strings.HasSuffix(line, "\n") {
			break // being written
		}
		number, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil || number != last+1 {
			return 0, fmt.Errorf("%s: %q follows %d", w.file, line, last)
		}
		last = number
	}
	return last, nil
}

// goOn waits until each writer has written something that it had not before.
func (h *harness) goOn(all []writer) {
	h.Helper()
	for _, w := range all {
		before, err := w.last()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			h.Fatal(err)
		}
		h.until(w.pod.Name+" to go on writing", func(context.Context) (string, error) {
			now, err := w.last()
			if errors.Is(err, fs.ErrNotExist) && before == 0 {
				return "has only been started", nil
			}
			if err != nil || now > before {
				return "", err
			}
			return fmt.Sprintf("is still at %d", now), nil
		})
	}
}

// wantUninterrupted says that the containers are those that were started first.
func (h *harness) wantUninterrupted(all []writer) {
	h.Helper()
	for _, w := range all {
		now := h.ready(w.pod.Name)
		was, is := w.pod.Status.ContainerStatuses[0], now.Status.ContainerStatuses[0]
		if now.UID != w.pod.UID || was.ContainerID != is.ContainerID || is.RestartCount != 0 {
			h.Errorf("%s was interrupted: it has been started %d times again, was %s, is %s", w.pod.Name, is.RestartCount, was.ContainerID, is.ContainerID)
		}
	}
}

// The driver may go away under pods that write: their volumes are mounts of the
// kernel. The next one takes over.
func TestWritesSurviveDriverRestart(t *testing.T) {
	h := begin(t)
	all := h.writers(10)
	old := h.driverPods()
	for _, pod := range old {
		must.Succeed(t, c.Client.CoreV1().Pods(cluster.Namespace).Delete(t.Context(), pod, metav1.DeleteOptions{}))
	}
	h.until("the old pods of the driver to be gone", func(context.Context) (string, error) {
		for _, pod := range h.driverPods() {
			if slices.Contains(old, pod) {
				return pod + " is there", nil
			}
		}
		return "", nil
	})
	h.goOn(all)
	must.Succeed(t, c.DriverReady(t.Context()))
	h.goOn(all)
	h.wantUninterrupted(all)

	for _, node := range []string{nodeA, nodeB} {
		h.claim(node, "64Mi")
		h.pod(node, with(node, "/data"), on(node))
		h.ready(node)
	}
	h.remove(all[0].pod.Name)
	h.removeClaim(all[0].pod.Name)
}

func (h *harness) driverPods() []string {
	h.Helper()
	pods, err := c.Client.CoreV1().Pods(cluster.Namespace).List(h.Context(), metav1.ListOptions{})
	must.Succeed(h, err)
	var names []string
	for _, pod := range pods.Items {
		names = append(names, pod.Name)
	}
	return names
}

func (h *harness) cordon(node string, on bool) {
	h.Helper()
	patch := fmt.Sprintf(`{"spec": {"unschedulable": %v}}`, on)
	if _, err := c.Client.CoreV1().Nodes().Patch(context.Background(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		h.Fatal(err)
	}
}
