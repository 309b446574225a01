// Package clonetest has what tests of copied trees need: a tree that has one entry of each kind,
// and a comparison of two trees.
package clonetest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const mib = 1 << 20

func write(t testing.TB, path, content string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(path, []byte(content), 0o644))
}

// Same compares two trees with all their attributes, by programs that people trust.
func Same(t testing.TB, a, b string) {
	t.Helper()
	testenv.NeedPrograms(t, "rsync", "getfattr", "getcap", "getfacl")
	out, err := exec.CommandContext(t.Context(), "rsync", "-aHAXS", "--dry-run", "--checksum", "--delete",
		"--itemize-changes", a+"/", b+"/").CombinedOutput()
	if err != nil || len(bytes.TrimSpace(out)) > 0 {
		t.Errorf("the copy differs: %v\n%s", err, out)
	}
	for _, p := range []struct {
		shows, between string
		command        []string
	}{
		{"extended attributes", "\n\n", []string{"getfattr", "--recursive", "--physical", "--no-dereference", "--dump", "--match=-", "--encoding=hex", "."}},
		{"ACLs", "\n\n", []string{"getfacl", "--recursive", "--physical", "--skip-base", "--numeric", "."}},
		{"capabilities", "\n", []string{"getcap", "-r", "."}},
	} {
		if diff := cmp.Diff(entries(t, a, p.between, p.command), entries(t, b, p.between, p.command)); diff != "" {
			t.Errorf("the copy has other %s (-source, +copy):\n%s", p.shows, diff)
		}
	}
}

// entries are what a program prints of each entry of a tree.
func entries(t testing.TB, root, between string, command []string) []string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...) //nolint:gosec // by Same
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v in %s: %v", command, root, err)
	}
	all := strings.Split(strings.TrimSpace(string(out)), between)
	slices.Sort(all)
	return all
}

// Hostile makes one entry of each kind that a tree can have.
func Hostile(t testing.TB, at string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(at, name) }
	write(t, in("file"), "content")
	write(t, in("empty"), "")
	must.Succeed(t, os.Mkdir(in("a"), 0o2775), os.Mkdir(in("a/b"), 0o700), os.Mkdir(in("locked"), 0o000))
	write(t, in("a/one"), "two names")
	must.Succeed(t,
		os.Link(in("a/one"), in("a/b/two")), os.Link(in("a/one"), in("three")),
		os.Symlink("/etc/passwd", in("link")), os.Symlink("a/b", in("inside")), os.Symlink("nowhere", in("a/dangling")),
		os.Lchown(in("link"), 1234, 4321),
		unix.Mkfifo(in("fifo"), 0o620),
		unix.Mknod(in("socket"), unix.S_IFSOCK|0o666, 0),
		unix.Mknod(in("null"), unix.S_IFCHR|0o640, int(unix.Mkdev(1, 3))),
		unix.Mknod(in("loop"), unix.S_IFBLK|0o600, int(unix.Mkdev(7, 200))),
		os.Link(in("fifo"), in("a/fifo")), os.Link(in("link"), in("a/link")),
		os.WriteFile(in("not utf-8 \xff\xfe\n\t*"), nil, 0o600),
		os.WriteFile(in(strings.Repeat("n", 255)), []byte("long"), 0o600),
	)
	write(t, in("setuid"), "#!/bin/sh")
	must.Succeed(t, os.Chown(in("setuid"), 1000, 1000), os.Chmod(in("setuid"), 0o755|os.ModeSetuid|os.ModeSetgid),
		os.Chmod(in("a"), 0o755|os.ModeSticky))
	write(t, in("capable"), "binary")
	must.Succeed(t,
		os.Chown(in("capable"), 7, 8),
		// cap_net_raw+ep, as setcap(8) writes it.
		unix.Setxattr(in("capable"), "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0),
		unix.Setxattr(in("file"), "user.empty", nil, 0),
		unix.Setxattr(in("file"), "user.text", []byte("value"), 0),
		unix.Setxattr(in("a"), "trusted.t", []byte{0, 1, 2}, 0),
		unix.Lsetxattr(in("link"), "trusted.l", []byte("of a link"), 0),
		// An ACL that gives user 1234 r-x next to the usual three, and a default of it.
		unix.Setxattr(in("a/b"), "system.posix_acl_access", acl, 0),
		unix.Setxattr(in("a/b"), "system.posix_acl_default", acl, 0),
	)
	sparse, err := os.Create(in("sparse"))
	must.Succeed(t, err)
	_, err = sparse.WriteAt([]byte("far"), 64*mib)
	must.Succeed(t, err, sparse.Truncate(96*mib), sparse.Close())
	old := time.Date(1999, 12, 31, 23, 59, 59, 123456789, time.UTC)
	must.Succeed(t, os.Chtimes(in("file"), old, old), os.Chtimes(in("a/b"), old, old))
}

// GiveAll has a directory give user 1234 access to what is made in it from now on.
func GiveAll(dir string) error { return unix.Setxattr(dir, "system.posix_acl_default", acl, 0) }

// acl is struct posix_acl_xattr_header and five entries: owner, user 1234, group, mask, others.
var acl = []byte("\x02\x00\x00\x00" +
	"\x01\x00\x07\x00\xff\xff\xff\xff" + "\x02\x00\x05\x00\xd2\x04\x00\x00" + "\x04\x00\x05\x00\xff\xff\xff\xff" +
	"\x10\x00\x05\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff")

// Copy copies a tree with all its attributes by rsync, which does not use pkg/hostfs/clone.
func Copy(t testing.TB, from, to string) {
	t.Helper()
	testenv.NeedPrograms(t, "rsync")
	out, err := exec.CommandContext(t.Context(), "rsync", "-aHAXS", from+"/", to+"/").CombinedOutput()
	if err != nil {
		t.Fatalf("copy %s: %v\n%s", from, err, out)
	}
}

// Extents are how many bytes of the disk a file takes, and whether it shares any (FIEMAP_EXTENT_SHARED).
func Extents(t testing.TB, path string) (taken int64, shared bool) {
	t.Helper()
	f, err := os.Open(path)
	must.Succeed(t, err)
	defer f.Close()
	m := ioctl.Extents{Length: ^uint64(0), Wanted: uint32(len(ioctl.Extents{}.Extents)), Flags: 1} // FIEMAP_FLAG_SYNC
	must.Succeed(t, ioctl.Do(ioctl.File{File: f}, ioctl.GetExtents, &m))
	for _, e := range m.Extents[:m.Mapped] {
		taken += int64(e.Length)
		shared = shared || e.Flags&0x2000 != 0
	}
	return taken, shared
}
