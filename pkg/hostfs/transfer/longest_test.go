package transfer_test

import (
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
)

var anyTime = time.Unix(1000, 0)

// A file may be as long as numbers go, and have content at its end, which may come and go.
func TestLongestFile(t *testing.T) {
	contents := []string{"begin", "change", "\x00\x00\x00\x00\x00\x00", "", "another"}
	put := func(t *testing.T, path, content string) {
		f := must.Value(os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600))(t)
		if content == "" {
			must.Succeed(t, f.Truncate(1))
		}
		must.Succeed(t, f.Truncate(math.MaxInt64))
		for _, at := range []int64{0, math.MaxInt64 - 300_000, math.MaxInt64 - int64(len(content))} {
			_, err := f.WriteAt([]byte(content), at)
			must.Succeed(t, err)
		}
		must.Succeed(t, f.Close())
	}
	check := func(t *testing.T, path, content string) {
		f := must.Value(os.Open(path))(t)
		defer func() { must.Succeed(t, f.Close()) }()
		for _, at := range []int64{0, math.MaxInt64 - 300_000, math.MaxInt64 - int64(len(content))} {
			is := make([]byte, len(content))
			_, err := unix.Pread(int(f.Fd()), is, at)
			must.Succeed(t, err)
			if string(is) != content {
				t.Errorf("at %d it has %q instead of %q", at, is, content)
			}
		}
	}
	t.Run("passes", func(t *testing.T) {
		src, dst := onXFS(t)
		for _, content := range contents {
			put(t, filepath.Join(src, "file"), content)
			send(t, src, dst)
			check(t, filepath.Join(dst, "file"), content)
		}
	})
	t.Run("from references", func(t *testing.T) {
		src, dst := onXFS(t)
		pass := whole
		for i, content := range contents {
			put(t, filepath.Join(src, "file"), content)
			must.Succeed(t, os.Chtimes(filepath.Join(src, "file"), anyTime, anyTime))
			base := reference(t, src, filepath.Join(filepath.Dir(src), string(rune('a'+i))))
			c := connect(t, dst, transfer.Options{})
			c.pass(base.String(), pass)
			c.finish()
			check(t, filepath.Join(dst, "file"), content)
			pass.Base = base
		}
	})
}
