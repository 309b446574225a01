package transfer_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// random is content without a pattern.
func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b) // never fails
	return b
}

// awaitSettled waits until what was written before a pass that begins now cannot have been under way.
func awaitSettled(t testing.TB, root string) {
	t.Helper()
	d := open(t, root)
	began := must.Value(transfer.Now(d))(t)
	for must.Value(transfer.Now(d))(t).Sub(began) <= clone.UnderWay {
		runtime.Gosched()
	}
}

func TestOnlyBlocksThatDifferAreSent(t *testing.T) {
	onEach(t, func(t *testing.T, src, dst string) {
		disk := filepath.Join(src, "disk.img")
		must.Succeed(t, os.WriteFile(disk, random(40*mib), 0o600))
		c := connect(t, dst, transfer.Options{})
		first := c.pass(src, transfer.Pass{})
		if first.Bytes != 40*mib {
			t.Errorf("sent %d bytes", first.Bytes)
		}
		f := must.Value(os.OpenFile(disk, os.O_WRONLY, 0))(t)
		for _, at := range []int64{0, 10*mib + 5, 40*mib - 1, 50 * mib} {
			_, err := f.WriteAt([]byte("changed"), at)
			must.Succeed(t, err)
		}
		must.Succeed(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 20*mib, 5*mib), f.Close())
		second := c.pass(src, transfer.Pass{Since: first.Began, Still: true, Verify: transfer.VerifyAll})
		if second.Bytes == 0 || second.Bytes > mib {
			t.Errorf("sent %d bytes again", second.Bytes)
		}
		var st unix.Stat_t
		must.Succeed(t, unix.Stat(filepath.Join(dst, "disk.img"), &st))
		if got := st.Blocks * 512; got > 36*mib {
			t.Errorf("the file takes %d bytes: the hole was filled", got)
		}
		c.finish()
	})
}

func TestWhatIsSettledIsNotRead(t *testing.T) {
	src, dst := onXFS(t)
	must.Succeed(t, os.WriteFile(filepath.Join(src, "large"), random(8*mib), 0o600), os.Mkdir(filepath.Join(src, "sub"), 0o700))
	write(t, filepath.Join(src, "sub", "small"), "content")
	awaitSettled(t, src)
	c := connect(t, dst, transfer.Options{})
	first := c.pass(src, transfer.Pass{})
	write(t, filepath.Join(src, "sub", "small"), "changed")
	second := c.pass(src, transfer.Pass{Since: first.Began, Still: true, Verify: transfer.VerifyChanged})
	if second.Sent != 1 || second.Bytes != 7 || second.BytesCompared != 7 || second.Entries != 3 || second.Files != 2 {
		t.Errorf("%+v, want one file", second)
	}
	c.finish()
	clonetest.Same(t, src, dst)
}

// A block volume's disk keeps the blocks that were set aside for it.
func TestAllocatedDiskKeepsItsBlocks(t *testing.T) {
	src, dst := onXFS(t)
	must.Succeed(t, os.WriteFile(filepath.Join(src, "disk.img"), random(mib), 0o600), os.Truncate(filepath.Join(src, "disk.img"), 32*mib))
	f := must.Value(os.Create(filepath.Join(dst, "disk.img")))(t)
	_, err := f.Write(random(8 * mib))
	must.Succeed(t, err, unix.Fallocate(int(f.Fd()), 0, 0, 32*mib), f.Close())
	here, there := net.Pipe()
	received := make(chan error, 1)
	into := open(t, dst)
	go func() { received <- transfer.Receive(t.Context(), there, into, transfer.Options{Allocated: true}) }()
	s := transfer.NewSender(here, transfer.Options{})
	_, err = s.Pass(t.Context(), open(t, src), whole)
	must.Succeed(t, err, s.Finish(t.Context()), <-received)
	var st unix.Stat_t
	must.Succeed(t, unix.Stat(filepath.Join(dst, "disk.img"), &st))
	if st.Blocks*512 < 32*mib {
		t.Errorf("the disk has %d bytes of its blocks left", st.Blocks*512)
	}
	clonetest.Same(t, src, dst)
}

func TestWhatIsNotStill(t *testing.T) {
	tests := map[string]func(at func(string) string) error{
		"a file is written":      func(at func(string) string) error { return os.WriteFile(at("1"), []byte("changed"), 0o600) },
		"a mode changes":         func(at func(string) string) error { return os.Chmod(at("1"), 0o640) },
		"a file is removed":      func(at func(string) string) error { return os.Remove(at("1")) },
		"a file is made":         func(at func(string) string) error { return os.WriteFile(at("new"), nil, 0o600) },
		"a directory is renamed": func(at func(string) string) error { return os.Rename(at("sub"), at("other")) },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			src, dst := onXFS(t)
			must.Succeed(t, os.Mkdir(filepath.Join(src, "sub"), 0o700))
			for i := range 10 {
				must.Succeed(t, os.WriteFile(filepath.Join(src, fmt.Sprint(i)), random(300_000), 0o600))
			}
			changed := false
			c := connect(t, dst, transfer.Options{Progress: func(p transfer.Progress) {
				if p.Entries > 0 && !changed {
					changed = true
					must.Succeed(t, change(func(name string) string { return filepath.Join(src, name) }))
				}
			}, BytesPerSecond: 10 << 20})
			_, err := c.Pass(t.Context(), open(t, src), transfer.Pass{Still: true, Verify: transfer.VerifyAll})
			must.ErrorIs(t, err, transfer.ErrChanged)
			c.pass(src, whole)
			c.finish()
			clonetest.Same(t, src, dst)
		})
	}
}

// What the source does not have any more is in the way of what is new there until it is removed.
func TestTargetThatIsFull(t *testing.T) {
	for kind, size := range map[string]int64{"xfs": 320 * mib, "tmpfs": 80 * mib} {
		t.Run(kind, func(t *testing.T) {
			src := filepath.Join(testenv.Tmpfs(t, 2*size), "volume")
			dst := filepath.Join(testenv.Tmpfs(t, size), "volume")
			if kind != "tmpfs" {
				dst = filepath.Join(testenv.LoopFS(t, kind, size), "volume")
			}
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			content := random(int(size / 6))
			fill := func(names ...string) {
				for _, name := range names {
					must.Succeed(t, os.MkdirAll(filepath.Join(src, name), 0o755), os.WriteFile(filepath.Join(src, name, "file"), content, 0o600))
				}
			}
			fill("a", "b", "c", "d")
			c := connect(t, dst, transfer.Options{})
			c.pass(src, transfer.Pass{Still: true})
			must.Succeed(t, os.RemoveAll(filepath.Join(src, "a")), os.RemoveAll(filepath.Join(src, "b")), os.RemoveAll(filepath.Join(src, "c")), os.RemoveAll(filepath.Join(src, "d")))
			fill("0", "1", "2", "3")
			c.pass(src, whole)
			clonetest.Same(t, src, dst)

			fill("more", "and", "more still", "and more", "and still more")
			_, err := c.Pass(t.Context(), open(t, src), transfer.Pass{Still: true})
			must.ErrorIs(t, err, transfer.ErrNoRoom)
			for _, name := range []string{"more", "and", "more still", "and more", "and still more"} {
				must.Succeed(t, os.RemoveAll(filepath.Join(src, name)))
			}
			c.pass(src, whole)
			c.finish()
		})
	}
}

// Names that had one file have two, and names that had two have one; the content of what was large is not sent again.
func TestLinksThatChange(t *testing.T) {
	onEach(t, func(t *testing.T, src, dst string) {
		in := func(name string) string { return filepath.Join(src, name) }
		must.Succeed(t, os.Mkdir(in("sub"), 0o700), os.WriteFile(in("a"), random(2*mib), 0o600), os.Link(in("a"), in("b")), os.Link(in("a"), in("sub/c")))
		write(t, in("x"), "x")
		must.Succeed(t, os.Link(in("x"), in("y")), os.Link(in("x"), in("sub/z")))
		c := connect(t, dst, transfer.Options{})
		first := c.pass(src, transfer.Pass{})
		must.Succeed(t, os.Remove(in("b")), os.Remove(in("sub/c")))
		write(t, in("b"), "another")
		second := c.pass(src, transfer.Pass{Since: first.Began, Still: true, Verify: transfer.VerifyAll})
		if second.Bytes > mib {
			t.Errorf("sent %d bytes", second.Bytes)
		}
		must.Succeed(t, os.Remove(in("y")), os.Link(in("a"), in("y")), os.Rename(in("sub"), in("moved")))
		c.pass(src, transfer.Pass{Since: second.Began, Still: true, Verify: transfer.VerifyAll})
		c.finish()
		same(t, src, dst)
	})
}

// Where XFS exchanges two entries, neither has another ctime.
func TestExchangedEntriesAreSent(t *testing.T) {
	src, dst := onXFS(t)
	in := func(name string) string { return filepath.Join(src, name) }
	old := time.Unix(1000, 0)
	for _, name := range []string{"a", "b", "c/sub/file", "d/sub/file"} {
		must.Succeed(t, os.MkdirAll(filepath.Dir(in(name)), 0o755), os.WriteFile(in(name), []byte(name[:1]), 0o600), os.Chtimes(in(name), old, old))
	}
	awaitSettled(t, src)
	for _, same := range []string{"the same connection", "another connection"} {
		t.Run(same, func(t *testing.T) {
			c := connect(t, dst, transfer.Options{})
			first := c.pass(src, transfer.Pass{})
			must.Succeed(t, unix.Renameat2(unix.AT_FDCWD, in("a"), unix.AT_FDCWD, in("b"), unix.RENAME_EXCHANGE),
				unix.Renameat2(unix.AT_FDCWD, in("c"), unix.AT_FDCWD, in("d"), unix.RENAME_EXCHANGE))
			if same != "the same connection" {
				c.cut()
				c = connect(t, dst, transfer.Options{})
			}
			c.pass(src, transfer.Pass{Since: first.Began, Still: true, Verify: transfer.VerifyAll})
			c.finish()
		})
	}
}

func TestDeepTrees(t *testing.T) {
	src, dst := onXFS(t)
	const levels = 3000
	at := open(t, src)
	for range levels {
		next, err := at.Make(strings.Repeat("d", 255))
		must.Succeed(t, err)
		f, err := next.MakeFile("file")
		must.Succeed(t, err, f.Close(), at.Close())
		at = next
	}
	must.Succeed(t, at.Close())
	var before unix.Rlimit
	must.Succeed(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1200, Max: before.Max}))
	defer func() { must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }()
	for range 2 {
		if result := send(t, src, dst); result.Entries != 2*levels {
			t.Errorf("%+v", result)
		}
	}
	must.Succeed(t, os.Rename(filepath.Join(src, strings.Repeat("d", 255)), filepath.Join(src, "other")))
	send(t, src, dst)
}

// Both sides together hold a bounded amount of memory, whatever the trees have.
func TestMemory(t *testing.T) {
	entries, bound := 1_000_000, int64(64*mib)
	if testing.Short() {
		entries, bound = entries/20, bound/4
	}
	root := testenv.Tmpfs(t, 2048*mib)
	src, dst := filepath.Join(root, "src"), filepath.Join(root, "dst")
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755))
	d := open(t, src)
	for i := range entries {
		name := fmt.Sprintf("%0200d", i)
		if i%4 == 3 { // another name of the one before
			must.Succeed(t, unix.Linkat(d.Fd(), fmt.Sprintf("%0200d", i-1), d.Fd(), name, 0))
			continue
		}
		must.Succeed(t, unix.Mknodat(d.Fd(), name, unix.S_IFREG|0o600, 0))
	}
	must.Succeed(t, os.WriteFile(filepath.Join(src, "large"), random(32*mib), 0o600))
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	before, most := stats.HeapAlloc, uint64(0)
	c := connect(t, dst, transfer.Options{Progress: func(transfer.Progress) {
		runtime.ReadMemStats(&stats)
		most = max(most, stats.HeapAlloc)
	}})
	first := c.pass(src, transfer.Pass{Still: true})
	must.Succeed(t, os.Remove(filepath.Join(src, fmt.Sprintf("%0200d", 7))))
	second := c.pass(src, whole)
	c.finish()
	if first.Entries != int64(entries+1) || second.Entries != int64(entries) {
		t.Errorf("%+v and %+v", first, second)
	}
	if used := int64(most) - int64(before); used > bound {
		t.Errorf("both sides held %d MiB", used/mib)
	} else {
		t.Logf("both sides held %d MiB", used/mib)
	}
}

func TestRateIsLimited(t *testing.T) {
	src, dst := onXFS(t)
	must.Succeed(t, os.WriteFile(filepath.Join(src, "file"), random(2*mib), 0o600))
	c := connect(t, dst, transfer.Options{BytesPerSecond: 8 * mib})
	began := time.Now()
	c.pass(src, transfer.Pass{Still: true})
	if took := time.Since(began); took < 140*time.Millisecond {
		t.Errorf("2 MiB took %s, at 8 MiB in a second", took)
	}
	c.finish()
}

// A file that a process has a lease of is left to the next pass, which looks at all that the one before did.
func TestLeasedFileIsLeftToTheNextPass(t *testing.T) {
	src, dst := onXFS(t)
	path := filepath.Join(src, "file")
	write(t, path, "content")
	c := connect(t, dst, transfer.Options{})
	first := c.pass(src, transfer.Pass{})
	f := must.Value(os.OpenFile(path, os.O_RDWR, 0))(t)
	_, err := f.WriteString("changed")
	must.Succeed(t, err)
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	must.Succeed(t, err)
	second := c.pass(src, transfer.Pass{Since: first.Began})
	if second.Missed != 1 || !second.Began.Equal(first.Began) {
		t.Errorf("%+v after %+v, want the file missed, and the same moment", second, first)
	}
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	must.Succeed(t, err, f.Close())
	c.pass(src, transfer.Pass{Since: second.Began, Still: true, Verify: transfer.VerifyAll})
	c.finish()
	if got := must.Value(os.ReadFile(filepath.Join(dst, "file")))(t); !bytes.Equal(got, []byte("changed")) {
		t.Errorf("the target has %q", got)
	}
}
