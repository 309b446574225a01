package clone_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Standstills of many copies at once take no more memory than that of a few.
func TestStandstillsAtOnceShareMemory(t *testing.T) {
	const copies, size, most = 8, 24 * mib, 128 * mib
	src, dst := t.TempDir(), t.TempDir()
	file := filepath.Join(src, "file")
	write(t, file, "")
	var before, now runtime.MemStats
	var holding, all, measured sync.WaitGroup
	holding.Add(copies)
	all.Add(copies)
	change := sync.OnceFunc(func() { must.Succeed(t, os.WriteFile(file, noise(size), 0o600)) })
	done := errors.New("what was captured is not needed")
	measure := sync.OnceFunc(func() {
		runtime.GC()
		runtime.ReadMemStats(&now)
	})
	for n := range copies {
		to := filepath.Join(dst, fmt.Sprint(n))
		must.Succeed(t, os.Mkdir(to, 0o700))
		from, into := open(t, src), open(t, to)
		measured.Go(func() {
			first := sync.OnceFunc(func() {
				_ = os.WriteFile(filepath.Join(src, fmt.Sprint("changes-", n)), nil, 0o600) // or no copy stands still
			})
			_, err := clone.Tree(t.Context(), from, into, clone.Options{
				Method: clone.Copy, Rounds: 1,
				Pause: func(context.Context) error { first(); return nil },
				Hold: func(ctx context.Context) (context.Context, func() error, error) {
					holding.Done()
					holding.Wait()
					change()
					return ctx, func() error {
						all.Done()
						all.Wait()
						measure()
						return done
					}, nil
				},
			})
			if !errors.Is(err, done) {
				t.Error(err)
			}
		})
	}
	runtime.ReadMemStats(&before)
	measured.Wait()
	if took := int64(now.HeapAlloc) - int64(before.HeapAlloc); took > most {
		t.Errorf("%d copies take %d MiB, want at most %d", copies, took/mib, most/mib)
	}
}
