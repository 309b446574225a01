package cases_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
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

// withFreezeClass makes the class of docs/snapshots.md.
func (s *scene) withFreezeClass() {
	s.Helper()
	class := filepath.Join(s.TempDir(), "class.yaml")
	if err := os.WriteFile(class, []byte(strings.Join(documented(s.T, "and a class:\n\n"), "\n")), 0o600); err != nil {
		s.Fatal(err)
	}
	if out, err := c.Kubectl(s.Context(), "apply", "-f", class); err != nil {
		s.Fatal(out, err)
	}
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
	last := fmt.Sprint("f", writtenTo-1)
	s.until("the pod to write", func(context.Context) (string, error) {
		files, err := s.run(name, "ls /volume")
		if err != nil || slices.Contains(strings.Fields(files), last) {
			return "", err
		}
		return fmt.Sprintf("it has %d files", len(strings.Fields(files))), nil
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
	if err != nil {
		s.Fatal(err)
	}
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
	if err != nil {
		s.Fatal(err)
	}
	return n
}

// handleOf is the id that the driver gave a snapshot, without its node.
func (s *scene) handleOf(made volumeSnapshot) string {
	s.Helper()
	handle, _, err := unstructured.NestedString(s.contentOf(made).Object, "status", "snapshotHandle")
	if err != nil {
		s.Fatal(err)
	}
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
		if err != nil {
			s.Fatal(err)
		}
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
