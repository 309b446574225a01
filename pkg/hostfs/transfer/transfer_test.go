package transfer_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// onEach runs a test with an empty source and an empty target.
func onEach(t *testing.T, test func(t *testing.T, src, dst string)) {
	for _, pair := range [][2]string{{"xfs", "xfs"}, {"ext4", "ext4"}, {"btrfs", "btrfs"}, {"xfs", "ext4"}, {"ext4", "btrfs"}, {"btrfs", "xfs"}} {
		t.Run(pair[0]+" to "+pair[1], func(t *testing.T) {
			src := filepath.Join(testenv.LoopFS(t, pair[0], 512*mib), "volume")
			dst := filepath.Join(testenv.LoopFS(t, pair[1], 512*mib), "volume")
			must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
			test(t, src, dst)
		})
	}
}

// same compares two trees by other programs. XFS shows each ACL among the attributes under a second name, which other filesystems do
// not: so ACLs are compared, and then taken off both.
func same(t *testing.T, src, dst string) {
	t.Helper()
	var kinds [2]unix.Statfs_t
	must.Succeed(t, unix.Statfs(src, &kinds[0]), unix.Statfs(dst, &kinds[1]))
	if kinds[0].Type != kinds[1].Type {
		var acls [2]string
		for i, root := range []string{src, dst} {
			cmd := exec.CommandContext(t.Context(), "sh", "-c", "find . -print0 | sort -z | xargs -0 getfacl --physical --skip-base --numeric && setfacl -R -P -b -k .")
			cmd.Dir = root
			out, err := cmd.Output()
			must.Succeed(t, err)
			acls[i] = string(out)
		}
		if diff := cmp.Diff(acls[0], acls[1]); diff != "" {
			t.Errorf("other ACLs (-source, +target):\n%s", diff)
		}
	}
	clonetest.Same(t, src, dst)
}

// onXFS runs with an empty source and an empty target.
func onXFS(t testing.TB) (src, dst string) {
	root := testenv.LoopFS(t, "xfs", 512*mib)
	src, dst = filepath.Join(root, "src"), filepath.Join(root, "dst")
	must.Succeed(t, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o700))
	return src, dst
}

func open(t testing.TB, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func write(t testing.TB, path, content string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o644))
}

// A connection is a sender and the receiver that it is connected with.
type connection struct {
	*transfer.Sender
	t        testing.TB
	conn     net.Conn
	received chan error
}

func connect(t testing.TB, dst string, o transfer.Options) *connection {
	t.Helper()
	here, there := net.Pipe()
	c := &connection{transfer.NewSender(here, o), t, here, make(chan error, 1)}
	into := open(t, dst)
	go func() {
		defer close(c.received)
		c.received <- transfer.Receive(context.Background(), there, into, transfer.Options{Doubted: o.Doubted})
		_ = there.Close()
	}()
	t.Cleanup(c.cut)
	return c
}

// cut closes the connection, and waits for the receiver.
func (c *connection) cut() {
	_ = c.conn.Close()
	for range c.received {
	}
}

// pass makes a pass.
func (c *connection) pass(src string, p transfer.Pass) transfer.Result {
	c.t.Helper()
	result, err := c.Pass(c.t.Context(), open(c.t, src), p)
	must.Succeed(c.t, err)
	return result
}

// finish ends the connection.
func (c *connection) finish() {
	c.t.Helper()
	must.Succeed(c.t, c.Finish(c.t.Context()), <-c.received)
}

var whole = transfer.Pass{Still: true, Verify: transfer.VerifyAll}

// send makes one pass over a tree that is still.
func send(t testing.TB, src, dst string) transfer.Result {
	t.Helper()
	c := connect(t, dst, transfer.Options{})
	result := c.pass(src, whole)
	c.finish()
	return result
}

func TestPass(t *testing.T) {
	t.Run("every kind of entry with all attributes", func(t *testing.T) {
		onEach(t, func(t *testing.T, src, dst string) {
			clonetest.Hostile(t, src)
			must.Succeed(t, os.Chown(src, 107, 107), os.Chmod(src, 0o770), os.Chmod(dst, 0o700))
			result := send(t, src, dst)
			same(t, src, dst)
			if result.Entries < 20 || result.Bytes < 10 || result.Bytes > mib || result.Sent == 0 || result.BytesCompared == 0 {
				t.Errorf("%+v", result)
			}
			var st unix.Stat_t
			must.Succeed(t, unix.Stat(filepath.Join(dst, "sparse"), &st))
			if got := st.Blocks * 512; got > mib {
				t.Errorf("a file of 96 MiB with 3 bytes takes %d bytes: its holes were filled", got)
			}

			again := send(t, src, dst)
			same(t, src, dst)
			if again.Bytes != 0 || again.Entries != result.Entries {
				t.Errorf("sent again: %+v, after %+v", again, result)
			}
		})
	})

	t.Run("a target has entries of other types and others of the same name", func(t *testing.T) {
		onEach(t, func(t *testing.T, src, dst string) {
			clonetest.Hostile(t, src)
			must.Succeed(t, os.Mkdir(filepath.Join(dst, "file"), 0o700), os.Mkdir(filepath.Join(dst, "file", "sub"), 0o000),
				os.Symlink("/etc/passwd", filepath.Join(dst, "a")), os.Symlink("/etc", filepath.Join(dst, "setuid")),
				unix.Mkfifo(filepath.Join(dst, "empty"), 0o600), os.Mkdir(filepath.Join(dst, "more"), 0o700),
				os.Symlink("other", filepath.Join(dst, "inside")), unix.Mknod(filepath.Join(dst, "null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 5))),
				clonetest.GiveAll(dst))
			write(t, filepath.Join(dst, "link"), "a file")
			write(t, filepath.Join(dst, "more", "file"), "a file")
			write(t, filepath.Join(dst, "three"), "linked with what has other links in the source")
			must.Succeed(t, os.Link(filepath.Join(dst, "three"), filepath.Join(dst, "capable")), os.Link(filepath.Join(dst, "three"), filepath.Join(dst, "gone")))
			send(t, src, dst)
			same(t, src, dst)
		})
	})
}
