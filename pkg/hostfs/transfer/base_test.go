package transfer_test

import (
	"bytes"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// reference makes a copy of a tree that shares its blocks.
func reference(t testing.TB, src, as string) *dir.Dir {
	t.Helper()
	must.Succeed(t, os.Mkdir(as, 0o700))
	made := open(t, as)
	_, err := clone.Tree(t.Context(), open(t, src), made, clone.Options{Method: clone.Share, Rounds: 1})
	must.Succeed(t, err)
	return made
}

// Whatever changes between passes that each have the reference of the one before as their base, and whatever bases are lost, the last
// pass, from the tree itself, makes the trees equal.
func TestPassesFromReferences(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root, other := testenv.LoopFS(t, kind, 2048*mib), testenv.LoopFS(t, "ext4", 1024*mib)
			for seed := range seeds(6) {
				t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
					src, dst := filepath.Join(root, "src"), filepath.Join([]string{root, other}[seed%2], "dst")
					must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
					n := &tenant{rand.New(rand.NewPCG(seed, 3)), src}
					var base *dir.Dir
					var made []string
					defer func() {
						for _, path := range append(made, src, dst) {
							must.Succeed(t, os.RemoveAll(path))
						}
					}()
					for i := range 7 {
						for range n.IntN(40) {
							n.change()
						}
						as := filepath.Join(root, fmt.Sprint("reference", i))
						made = append(made, as)
						from := reference(t, src, as)
						if n.IntN(6) == 0 {
							base = nil
						}
						c := connect(t, dst, transfer.Options{})
						c.pass(as, transfer.Pass{Still: true, Verify: transfer.Verify(n.IntN(3)), Base: base})
						c.finish()
						base = from
					}
					for range 30 {
						n.change()
					}
					c := connect(t, dst, transfer.Options{})
					c.pass(src, transfer.Pass{Still: true, Verify: transfer.VerifyAll, Base: base})
					c.finish()
					if found := transfer.Compare(t, open(t, src), open(t, dst), whole); found != "" {
						t.Error(found)
					}
					same(t, src, dst)
				})
			}
		})
	}
}

// bytesRead is what this process has read so far, with the data of files that were in memory.
func bytesRead(t *testing.T) int64 {
	t.Helper()
	counts, err := os.ReadFile("/proc/self/io")
	must.Succeed(t, err)
	_, after, _ := strings.Cut(string(counts), "rchar: ")
	text, _, _ := strings.Cut(after, "\n")
	n, err := strconv.ParseInt(text, 10, 64)
	must.Succeed(t, err)
	return n
}

// A pass with a base reads and compares what changed, and little else, also what an asynchronous direct write has changed without a
// new ctime.
func TestPassReadsOnlyWhatDiffersFromBase(t *testing.T) {
	for _, kind := range []string{"xfs", "btrfs"} {
		t.Run(kind, func(t *testing.T) {
			root := testenv.LoopFS(t, kind, 512*mib)
			src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			disk := filepath.Join(src, "disk.img")
			must.Succeed(t, os.WriteFile(disk, bytes.Repeat([]byte("0123456789abcdef"), 4*mib), 0o600))
			base := reference(t, src, filepath.Join(root, "reference"))
			send(t, filepath.Join(root, "reference"), dst)

			f, err := os.OpenFile(disk, os.O_WRONLY, 0)
			must.Succeed(t, err)
			for i := range int64(16) {
				_, err := f.WriteAt(bytes.Repeat([]byte("x"), 16<<10), i*4*mib+8192)
				must.Succeed(t, err)
			}
			_, err = f.WriteAt(make([]byte, 128<<10), 30*mib)
			must.Succeed(t, err, f.Close())
			before := bytesRead(t)
			c := connect(t, dst, transfer.Options{})
			result := c.pass(src, transfer.Pass{Still: true, Verify: transfer.VerifyAll, Base: base})
			c.finish()
			read := bytesRead(t) - before
			if result.Bytes != 16*16<<10 || result.BytesCompared > 4*mib || read > 12*mib {
				t.Errorf("%d bytes were sent, %d compared, and %d read; 256 KiB and a hole were changed", result.Bytes, result.BytesCompared, read)
			}
			same(t, src, dst)
		})
	}
}

// A tree without a base, and one that lacks entries, are sent as a whole.
func TestBaseThatLacksEntries(t *testing.T) {
	src, dst := onXFS(t)
	for _, name := range []string{"a/b/c", "d"} {
		must.Succeed(t, os.MkdirAll(filepath.Join(src, name), 0o755), os.WriteFile(filepath.Join(src, name, "file"), []byte(name), 0o600))
	}
	as := filepath.Join(filepath.Dir(src), "reference")
	base := reference(t, src, as)
	send(t, as, dst)
	must.Succeed(t, os.RemoveAll(filepath.Join(as, "a")), os.Remove(filepath.Join(as, "d", "file")), os.WriteFile(filepath.Join(src, "a/b/c/file"), []byte("A"), 0o600),
		os.WriteFile(filepath.Join(src, "a/b/file"), []byte("B"), fs.FileMode(0o600)))
	c := connect(t, dst, transfer.Options{})
	c.pass(src, transfer.Pass{Still: true, Verify: transfer.VerifyAll, Base: base})
	c.finish()
	same(t, src, dst)
	if _, err := connect(t, dst, transfer.Options{}).Pass(t.Context(), open(t, src), transfer.Pass{Base: base}); err == nil {
		t.Error("a base was taken for a source that is in use")
	}
}
