package label_test

import (
	"errors"
	"testing"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestFakeKeepsTheContract(t *testing.T) { labeltest.Contract(t, &labeltest.Fake{}) }

// Without SELinux the kernel stores the attribute as it is given, so that the
// contract can be tested there too.
func TestKernelKeepsTheContract(t *testing.T) {
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

func TestNothingIsTriedWhereSELinuxIsOff(t *testing.T) {
	d, err := dir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	// A closed handle: every attempt would fail.
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if changed, err := (label.Kernel{On: false}).Ensure(d, label.Recursive); changed || err != nil {
		t.Errorf("changed = %v, %v; want nothing done", changed, err)
	}
}
