package transfer_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// tamper changes a file's content and keeps its times.
func tamper(path string, at int64, with string) error {
	before, err := os.Stat(path)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(with), at)
	return errors.Join(err, f.Close(), os.Chtimes(path, before.ModTime(), before.ModTime()))
}

// keeping calls with the times of directories kept.
func keeping(dir string, change ...func() error) error {
	before, err := os.Stat(dir)
	for _, c := range change {
		err = errors.Join(err, c())
	}
	return errors.Join(err, os.Chtimes(dir, before.ModTime(), before.ModTime()))
}

// Each difference between the trees is found, whatever it is in.
func TestDifferencesAreFound(t *testing.T) {
	tests := map[string]struct {
		change func(in func(string) string) error
		want   string
		sees   transfer.Verify // what finds it
	}{
		"nothing":              {func(func(string) string) error { return nil }, "", transfer.VerifyAll},
		"content":              {func(in func(string) string) error { return tamper(in("file"), 3, "T") }, "file: content", transfer.VerifyAll},
		"content far out":      {func(in func(string) string) error { return tamper(in("sparse"), 64*mib+1, "F") }, "sparse: content", transfer.VerifyAll},
		"content in a hole":    {func(in func(string) string) error { return tamper(in("sparse"), 80*mib, "x") }, "sparse: content", transfer.VerifyAll},
		"a hole that is zeros": {func(in func(string) string) error { return tamper(in("sparse"), 10*mib, "\x00") }, "sparse: holes", transfer.VerifyAll},
		"a hole in a block with data": {func(in func(string) string) error { return tamper(in("sparse"), 64*mib+100_000, "\x00") },
			"sparse: holes", transfer.VerifyAll},
		"size": {func(in func(string) string) error {
			return errors.Join(os.Truncate(in("empty"), 1), os.Chtimes(in("empty"), time.Unix(5, 0), time.Unix(5, 0)))
		}, "empty: size", transfer.VerifyChanged},
		"mode":                {func(in func(string) string) error { return os.Chmod(in("file"), 0o600) }, "file: mode", transfer.VerifyChanged},
		"setuid":              {func(in func(string) string) error { return os.Chmod(in("setuid"), 0o755) }, "setuid: mode", transfer.VerifyChanged},
		"mode of a directory": {func(in func(string) string) error { return os.Chmod(in("a/b"), 0o711) }, "b: mode", transfer.VerifyChanged},
		"mode of the root":    {func(in func(string) string) error { return os.Chmod(in("."), 0o711) }, "mode", transfer.VerifyChanged},
		"owner":               {func(in func(string) string) error { return os.Chown(in("file"), 5, 0) }, "file: owner", transfer.VerifyChanged},
		"group of a link":     {func(in func(string) string) error { return os.Lchown(in("link"), 1234, 5) }, "link: owner", transfer.VerifyChanged},
		"mtime": {func(in func(string) string) error {
			return os.Chtimes(in("file"), time.Unix(5, 0), time.Unix(5, 1))
		}, "file: mtime", transfer.VerifyChanged},
		"mtime of a directory": {func(in func(string) string) error {
			return os.Chtimes(in("a/b"), time.Unix(5, 0), time.Unix(5, 1))
		}, "b: mtime", transfer.VerifyChanged},
		"an attribute that is gone": {func(in func(string) string) error { return unix.Removexattr(in("file"), "user.empty") }, "file: extended", transfer.VerifyChanged},
		"one more attribute":        {func(in func(string) string) error { return unix.Setxattr(in("a/one"), "user.x", nil, 0) }, ": extended", transfer.VerifyChanged},
		"an attribute's value":      {func(in func(string) string) error { return unix.Setxattr(in("file"), "user.text", []byte("Value"), 0) }, "file: extended", transfer.VerifyChanged},
		"an attribute of a link":    {func(in func(string) string) error { return unix.Lsetxattr(in("link"), "trusted.l", nil, 0) }, "link: extended", transfer.VerifyChanged},
		"a capability":              {func(in func(string) string) error { return unix.Removexattr(in("capable"), "security.capability") }, "capable: extended", transfer.VerifyChanged},
		"a label": {func(in func(string) string) error {
			return unix.Setxattr(in("file"), "security.selinux", []byte("other"), 0)
		}, "file: extended", transfer.VerifyChanged},
		"an ACL":                    {func(in func(string) string) error { return unix.Removexattr(in("a/b"), "system.posix_acl_default") }, "b: extended", transfer.VerifyChanged},
		"an ACL that was not there": {func(in func(string) string) error { return clonetest.GiveAll(in("a")) }, "a: extended", transfer.VerifyChanged},
		"an attribute of the root":  {func(in func(string) string) error { return unix.Setxattr(in("."), "user.r", nil, 0) }, "extended", transfer.VerifyChanged},
		"an entry that is missing": {func(in func(string) string) error {
			return keeping(in("a"), func() error { return os.Remove(in("a/dangling")) })
		}, "dangling: missing", transfer.VerifyChanged},
		"a directory that is gone": {func(in func(string) string) error {
			return keeping(in("."), func() error { return os.RemoveAll(in("a")) })
		}, "a: missing", transfer.VerifyChanged},
		"one more entry": {func(in func(string) string) error {
			return keeping(in("a"), func() error { return os.WriteFile(in("a/more"), nil, 0o600) })
		}, "entries instead of", transfer.VerifyChanged},
		"a link to something else": {func(in func(string) string) error {
			return keeping(in("."), func() error { return os.Remove(in("inside")) }, func() error { return os.Symlink("a/c", in("inside")) })
		}, "inside: target", transfer.VerifyChanged},
		"another type": {func(in func(string) string) error {
			return keeping(in("."), func() error { return os.Remove(in("fifo")) }, func() error { return unix.Mknod(in("fifo"), unix.S_IFSOCK|0o620, 0) })
		}, "fifo: type", transfer.VerifyChanged},
		"another device": {func(in func(string) string) error {
			return keeping(in("."), func() error { return os.Remove(in("null")) }, func() error { return unix.Mknod(in("null"), unix.S_IFCHR|0o640, int(unix.Mkdev(1, 5))) })
		}, "null: device number", transfer.VerifyChanged},
		"names that were one file": {func(in func(string) string) error {
			return keeping(in("."), func() error { return os.Rename(in("three"), in("copy")) }, func() error { return os.Link(in("copy"), in("three")) }, func() error {
				content, err := os.ReadFile(in("three"))
				return errors.Join(err, os.Remove(in("three")), os.Remove(in("copy")), os.WriteFile(in("three"), content, 0o644))
			})
		}, "hard links", transfer.VerifyChanged},
		"names that were two files": {func(in func(string) string) error {
			return keeping(in("."), func() error { return os.Remove(in("empty")) }, func() error { return os.Link(in("file"), in("empty")) })
		}, "hard links", transfer.VerifyChanged},
	}
	src, dst := onXFS(t)
	clonetest.Hostile(t, src)
	must.Succeed(t, unix.Setxattr(filepath.Join(src, "file"), "security.selinux", []byte("label"), 0))
	in := func(name string) string { return filepath.Join(dst, name) }
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			first := send(t, src, dst)
			must.Succeed(t, test.change(in))
			for _, verify := range []transfer.Verify{transfer.VerifyChanged, transfer.VerifyAll} {
				found := transfer.Compare(t, open(t, src), open(t, dst), transfer.Pass{Since: first.Began, Still: true, Verify: verify})
				if verify >= test.sees && !strings.Contains(found, test.want) || test.want == "" && found != "" {
					t.Errorf("comparison %d found %q, want %q", verify, found, test.want)
				}
			}
		})
	}
}
