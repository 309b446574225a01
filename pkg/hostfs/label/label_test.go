package label_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestFakeContract(t *testing.T) { labeltest.Contract(t, &labeltest.Fake{}) }

// Without SELinux the kernel stores the attribute as given, so the contract can be
// tested there too.
func TestKernelContract(t *testing.T) {
	testenv.NeedRoot(t)
	labeltest.Contract(t, attributes{label.Kernel{On: true}})
}

type attributes struct{ label.Kernel }

func (attributes) Get(d *dir.Dir) (string, error) {
	value, err := selinux.FileLabel(d.HandlePath())
	if errors.Is(err, unix.ENODATA) {
		return "", nil
	}
	return value, err
}

func (attributes) Set(d *dir.Dir, value string) error {
	return selinux.SetFileLabel(d.HandlePath(), value)
}

func TestEnsure_SELinuxOff(t *testing.T) {
	d, err := dir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// A closed handle: any attempt would fail.
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if changed, err := (label.Kernel{On: false}).Ensure(d, label.Recursive); changed || err != nil {
		t.Errorf("changed = %v, %v; want nothing done", changed, err)
	}
}

// A tenant can nest directories without limit, while the driver's descriptors are shared by all
// pools.
func TestEnsure_deepTreeUsesFewDescriptors(t *testing.T) {
	testenv.NeedRoot(t)
	path := t.TempDir()
	bottom := path + strings.Repeat("/d", 700)
	must.Succeed(t, os.MkdirAll(bottom, 0o755))
	must.Succeed(t, os.WriteFile(bottom+"/file", nil, 0o600))
	canary := filepath.Join(t.TempDir(), "canary")
	must.Succeed(t, os.WriteFile(canary, nil, 0o600))
	must.Succeed(t, os.Symlink(canary, bottom+"/link"))
	root, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, root.Close()) }()
	before, err := selinux.LfileLabel(canary)
	if err != nil && !errors.Is(err, unix.ENODATA) {
		t.Fatal(err)
	}

	limitDescriptors(t, 128)
	changed, err := label.Kernel{On: true}.Ensure(root, label.Recursive)
	if !changed || err != nil {
		t.Fatalf("changed = %v, %v; want it labelled", changed, err)
	}
	for _, labelled := range []string{bottom + "/file", bottom + "/link", bottom, path + "/d", path} {
		if got, err := selinux.LfileLabel(labelled); got != label.Container {
			t.Errorf("%d directories down: label %q, %v", strings.Count(labelled, "/d"), got, err)
		}
	}
	if got, _ := selinux.LfileLabel(canary); got != before {
		t.Errorf("the target of a link got the label %q", got)
	}
}

// limitDescriptors sets RLIMIT_NOFILE of this process.
func limitDescriptors(t *testing.T, most uint64) {
	t.Helper()
	var old unix.Rlimit
	must.Succeed(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: most, Max: old.Max}))
	t.Cleanup(func() { must.Succeed(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) })
}
