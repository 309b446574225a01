// Package labeltest has an in-memory fake of label.Kernel, and the contract test
// that both pass.
package labeltest

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Fake keeps labels in memory, by inode. Its zero value is ready for use.
type Fake struct {
	mu     sync.Mutex
	labels map[dir.ID]string
}

// Ensure is label.Kernel.Ensure.
func (f *Fake) Ensure(root *dir.Dir, scope label.Scope) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if scope == label.None {
		return false, nil
	}
	id, err := root.ID()
	if err != nil {
		return false, err
	}
	if strings.Contains(f.labels[id], ":container_file_t:") {
		return false, nil
	}
	if scope == label.Recursive {
		if err := f.below(root); err != nil {
			return false, err
		}
	}
	f.set(id, label.Container)
	return true, nil
}

func (f *Fake) below(d *dir.Dir) error {
	return filepath.WalkDir(d.HandlePath()+"/", func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return f.labelPath(path)
	})
}

func (f *Fake) labelPath(path string) error {
	info, err := os.Lstat(path)
	if err != nil || !info.IsDir() {
		return err
	}
	d, err := dir.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	id, err := d.ID()
	f.set(id, label.Container)
	return err
}

// Set sets the label of a directory, like chcon(1).
func (f *Fake) Set(d *dir.Dir, value string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, err := d.ID()
	f.set(id, value)
	return err
}

func (f *Fake) set(id dir.ID, value string) {
	if f.labels == nil {
		f.labels = make(map[dir.ID]string)
	}
	f.labels[id] = value
}

// Get is the label of a directory, empty if it has none.
func (f *Fake) Get(d *dir.Dir) (string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id, err := d.ID()
	return f.labels[id], err
}

// A Subject is an implementation under test, with access to the labels it keeps.
type Subject interface {
	Ensure(root *dir.Dir, scope label.Scope) (bool, error)
	Get(d *dir.Dir) (string, error)
	Set(d *dir.Dir, value string) error
}

const foreign = "system_u:object_r:var_t:s0"

// Contract tests what every implementation must do.
func Contract(t *testing.T, subject Subject) {
	cases := []struct {
		name      string
		before    string
		scope     label.Scope
		changed   bool
		root, sub string
	}{
		{"unlabelled root", "", label.Root, true, label.Container, ""},
		{"root with another type", foreign, label.Root, true, label.Container, foreign},
		{"recursive", foreign, label.Recursive, true, label.Container, label.Container},
		{"label with categories of the runtime stays", "system_u:object_r:container_file_t:s0:c1,c2", label.Recursive, false,
			"system_u:object_r:container_file_t:s0:c1,c2", "system_u:object_r:container_file_t:s0:c1,c2"},
		{"none", foreign, label.None, false, foreign, foreign},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			root, sub := tree(t)
			if c.before != "" {
				must.Succeed(t, subject.Set(root, c.before))
				must.Succeed(t, subject.Set(sub, c.before))
			} else {
				// With SELinux on, everything has a label.
				var err error
				c.sub, err = subject.Get(sub)
				must.Succeed(t, err)
			}
			changed, err := subject.Ensure(root, c.scope)
			must.Succeed(t, err)
			if changed != c.changed {
				t.Errorf("changed = %v, want %v", changed, c.changed)
			}
			expect(t, subject, root, c.root)
			expect(t, subject, sub, c.sub)
			if again, err := subject.Ensure(root, c.scope); again || err != nil {
				t.Errorf("second call: changed = %v, %v; want no change", again, err)
			}
		})
	}
}

func tree(t *testing.T) (root, sub *dir.Dir) {
	t.Helper()
	root, err := dir.Open(t.TempDir())
	must.Succeed(t, err)
	t.Cleanup(func() { _ = root.Close() })
	sub, err = root.Make("sub")
	must.Succeed(t, err)
	t.Cleanup(func() { _ = sub.Close() })
	return root, sub
}

func expect(t *testing.T, subject Subject, d *dir.Dir, want string) {
	t.Helper()
	got, err := subject.Get(d)
	must.Succeed(t, err)
	if got != want {
		t.Errorf("label of %s is %q, want %q", d, got, want)
	}
}
