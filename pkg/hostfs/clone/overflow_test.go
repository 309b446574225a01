package clone_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// What changes until pods stand still, and does not fit into the memory for that, is copied while they do: many files, a file and
// attributes that are too large each, names of a file. The copy is that of the moment, in bounded memory.
func TestStandstillWithMoreThanMemoryHolds(t *testing.T) {
	for _, f := range []struct {
		filesystem
		memory     int
		attributes bool // of more than some KiB, which only XFS has
	}{
		{filesystem{"xfs", clone.Share}, 32 * mib, false},
		{filesystem{"xfs", clone.Copy}, 4 * mib, true},
		{filesystem{"btrfs", clone.Share}, 4 * mib, false},
		{filesystem{"ext4", clone.Copy}, 4 * mib, false},
	} {
		t.Run(fmt.Sprint(f.kind, ", method ", f.method), func(t *testing.T) {
			root := testenv.LoopFS(t, f.kind, 512*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			write(t, filepath.Join(src, "file"), "content")
			change := sync.OnceFunc(func() {
				write(t, filepath.Join(src, "file"), "changed")
				write(t, filepath.Join(src, "another"), "comes")
			})
			var before, highest int
			result, err := clone.TreeWithin(t.Context(), open(t, src), open(t, dst), endingWithStandstill(clone.Options{Method: f.method, Rounds: 1,
				Pause: func(context.Context) error {
					change()
					if before > 0 {
						highest = max(highest, inUse())
					}
					return nil
				},
				Hold: func(ctx context.Context) (context.Context, func() error, error) {
					overflow(t, src, f.memory)
					if f.attributes {
						overflowAttributes(t, src, f.memory)
					}
					before = inUse()
					return ctx, func() error { return nil }, nil
				}}), 1<<17, f.memory)
			must.Succeed(t, err)
			if !result.PointInTime {
				t.Errorf("it is %+v", result)
			}
			clonetest.Same(t, src, dst)
			most := f.memory + 2*mib // and buffers
			if taken := highest - before; taken < f.memory/2 || taken > most {
				t.Errorf("it took %d KiB of memory, want up to %d", taken>>10, most>>10)
			}
		})
	}
}

// inUse is how many bytes of memory what is not garbage takes.
func inUse() int {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int(stats.HeapAlloc)
}

// noise is so many bytes of content.
func noise(bytes int) []byte {
	content := make([]byte, bytes)
	_, _ = rand.NewChaCha8([32]byte{}).Read(content)
	return content
}

// overflow makes entries that take more memory than there is.
func overflow(t *testing.T, src string, memory int) {
	t.Helper()
	content := noise(memory + memory/4)
	in := func(name string) string { return filepath.Join(src, name) }
	must.Succeed(t, os.Mkdir(in("new"), 0o755), os.WriteFile(in("new/too-large"), content, 0o600))
	const files = 80
	for n := range files {
		must.Succeed(t, os.WriteFile(in(fmt.Sprint("new/", n)), content[n*memory/files:][:memory*5/4/files], 0o600))
	}
	must.Succeed(t, os.WriteFile(in("names"), content[:memory/4], 0o600))
	for n := range 10 {
		must.Succeed(t, os.Link(in("names"), in(fmt.Sprint("new/name-", n))))
	}
}

// overflowAttributes gives a directory and a file more attributes than there is memory.
func overflowAttributes(t *testing.T, src string, memory int) {
	t.Helper()
	const value = 60 << 10
	content := noise(memory + memory/4)
	in := func(name string) string { return filepath.Join(src, name) }
	must.Succeed(t, os.Mkdir(in("attributes"), 0o755))
	for _, of := range []string{"attributes", "file"} {
		for n := range len(content) / value {
			must.Succeed(t, unix.Setxattr(in(of), fmt.Sprint("user.", n), content[n*value:][:value], 0))
		}
	}
}

// Of a large file the copy shares what is on the disk, and reads what is in memory only: at the beginning, in between, and at the end.
func TestLargeFileThatIsPartlyInMemory(t *testing.T) {
	onEach(t, sharing, func(t *testing.T, src, dst string, method clone.Method) {
		content := noise(8*mib + 100)
		for n := range 8 {
			must.Succeed(t, os.WriteFile(filepath.Join(src, fmt.Sprint(n)), content, 0o600))
		}
		must.Succeed(t, os.Link(filepath.Join(src, "7"), filepath.Join(src, "other name")))
		change := sync.OnceFunc(func() { write(t, filepath.Join(src, "changes"), "") })
		result := tree(t, src, dst, clone.Options{Method: method, Rounds: 1,
			Pause: func(context.Context) error { change(); return nil },
			Hold: func(ctx context.Context) (context.Context, func() error, error) {
				for n := range 8 {
					f, err := os.OpenFile(filepath.Join(src, fmt.Sprint(n)), os.O_WRONLY, 0)
					must.Succeed(t, err)
					for bit, at := range []int64{0, 3*mib + 5, 8 * mib} {
						if n&(1<<bit) > 0 {
							_, err := f.WriteAt([]byte("changed"), at)
							must.Succeed(t, err)
						}
					}
					must.Succeed(t, f.Close())
				}
				return ctx, func() error { return nil }, nil
			}})
		if !result.PointInTime {
			t.Errorf("it is %+v", result)
		}
		clonetest.Same(t, src, dst)
		for n := range 8 {
			if taken, shared := clonetest.Extents(t, filepath.Join(dst, fmt.Sprint(n))); !shared || taken < 8*mib {
				t.Errorf("file %d has %d bytes, and shares blocks: %v", n, taken, shared)
			}
		}
	})
}
