package bind_test

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
)

func FuzzParseTarget(f *testing.F) {
	for _, seed := range []string{"/var/lib/kubelet/pods/a/volumes/b/mount", "/a/../b", "/a/", "//", "/a//b", "/.", "/a\x00", "/\xff", "/" + strings.Repeat("x", 256)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		target, err := bind.ParseTarget(s)
		if err != nil {
			if !errors.Is(err, bind.ErrTarget) {
				t.Errorf("error %v, want ErrTarget", err)
			}
			return
		}
		path := target.String()
		again, err := bind.ParseTarget(path)
		if strings.TrimRight(s, "/") != path || again != target || err != nil {
			t.Errorf("%q parses to %q, and that to %q, %v", s, path, again, err)
		}
		if !filepath.IsAbs(path) || filepath.Clean(path) != path || path == "/" || len(path) >= 4096 || !filepath.IsLocal(path[1:]) {
			t.Errorf("%q is a target", path)
		}
		for element := range strings.SplitSeq(path[1:], "/") {
			if element == "" || element == "." || element == ".." || len(element) > 255 || strings.ContainsRune(element, 0) {
				t.Errorf("%q is a target", path)
			}
		}
	})
}

// contrary are groups of flags that exclude each other.
var contrary = [][]string{
	{"rw", "ro"}, {"suid", "nosuid"}, {"dev", "nodev"}, {"exec", "noexec"}, {"diratime", "nodiratime"},
	{"relatime", "atime", "noatime", "strictatime"}, {"defaults"},
}

func FuzzParseFlags(f *testing.F) {
	for _, seed := range []string{"", "ro", "rw,ro", "ro,rw", "noatime,strictatime,relatime", "uid=0", "remount", "bind,ro", "RO", " ro", "defaults,nosuid", "context=x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		names := strings.Split(s, ",")
		if s == "" {
			names = nil
		}
		flags, err := bind.ParseFlags(names)
		if err != nil {
			if !errors.Is(err, bind.ErrFlag) || flags != (bind.Flags{}) {
				t.Errorf("%v and error %v, want none and ErrFlag", flags, err)
			}
			return
		}
		// Of contradicting flags the last wins, whatever the order of the others.
		var last []string
		for _, group := range contrary {
			for _, name := range slices.Backward(names) {
				if slices.Contains(group, name) {
					last = append(last, name)
					break
				}
			}
		}
		if same, err := bind.ParseFlags(last); err != nil || same != flags {
			t.Errorf("%q are %v, and %q are %v, %v", names, flags, last, same, err)
		}
		if twice, err := bind.ParseFlags(slices.Concat(names, names)); err != nil || twice != flags {
			t.Errorf("%q are %v, and twice %v, %v", names, flags, twice, err)
		}
		if flags.With(bind.ReadOnly()) != flags.With(bind.ReadOnly()).With(bind.ReadOnly()) {
			t.Errorf("%q with ReadOnly are not read-only", names)
		}
	})
}
