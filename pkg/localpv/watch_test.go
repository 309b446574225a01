package localpv

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// Where something happens all the time, as in /dev of a busy node, new devices are found all the same.
func TestChangesAreReportedWhileThereAreMore(t *testing.T) {
	changed := make(chan struct{}, 100)
	w, err := newWatcher(logr.Discard(), func() { changed <- struct{}{} })
	must.Succeed(t, err)
	dir := t.TempDir()
	w.watch([]string{dir})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.Start(ctx) }()
	<-changed // at the start
	busy := time.NewTicker(quiet / 4)
	defer busy.Stop()
	const most = 10 * longestQuiet
	late := time.After(most)
	for n, done := 0, false; !done; n++ {
		select {
		case <-changed:
			done = true
		case <-busy.C:
			must.Succeed(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(n)), nil, 0o600))
		case <-late:
			t.Errorf("no change was reported within %s", most)
			done = true
		}
	}
	cancel()
	must.Succeed(t, <-ended)
}
