package xattr_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What is set through a descriptor is seen through the entry, and the other way round; what was removed may be taken off again.
func TestAttributes(t *testing.T) {
	root := t.TempDir()
	in := must.Value(dir.Open(root))(t)
	defer func() { must.Succeed(t, in.Close()) }()
	file := must.Value(os.Create(filepath.Join(root, "file")))(t)
	defer func() { must.Succeed(t, file.Close()) }()
	open, entry := xattr.Descriptor(file.Fd()), xattr.Of(in, "file")
	for _, c := range []struct{ set, see xattr.Holder }{{open, entry}, {entry, open}} {
		must.Succeed(t, c.set.Set("user.one", []byte("1")), c.set.Set("user.two", nil))
		names := slices.Collect(xattr.Each(must.Value(xattr.Listed(c.see, make([]byte, xattr.Max)))(t)))
		if !slices.Contains(names, "user.one") || !slices.Contains(names, "user.two") {
			t.Errorf("there are %q", names)
		}
		value := make([]byte, 8)
		if n, err := c.see.Get("user.one", value); err != nil || string(value[:n]) != "1" {
			t.Errorf("the value is %q, %v", value, err)
		}
		must.Succeed(t, xattr.TakeOff(c.set, "user.one"), xattr.TakeOff(c.set, "user.one"), xattr.TakeOff(c.set, "user.two"))
		if _, err := c.see.Get("user.one", value); !errors.Is(err, unix.ENODATA) {
			t.Errorf("what was taken off is %v", err)
		}
	}
}

// An entry that is a link is not followed: links have no attributes of users.
func TestLinkIsNotFollowed(t *testing.T) {
	root := t.TempDir()
	in := must.Value(dir.Open(root))(t)
	defer func() { must.Succeed(t, in.Close()) }()
	must.Succeed(t, os.WriteFile(filepath.Join(root, "file"), nil, 0o600), os.Symlink("file", filepath.Join(root, "link")))
	if err := xattr.Of(in, "link").Set("user.one", nil); !errors.Is(err, unix.EPERM) {
		t.Errorf("set on a link: %v", err)
	}
	if names, err := xattr.Listed(xattr.Of(in, "file"), make([]byte, xattr.Max)); err != nil || slices.Contains(slices.Collect(xattr.Each(names)), "user.one") {
		t.Errorf("the file that the link leads to has %q, %v", names, err)
	}
}
