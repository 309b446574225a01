package mounter_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr/testr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/mounter"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// newMounter is a mounter of a claim, whose pool is to be in a directory that is shared with the host.
func newMounter(t *testing.T) (m *mounter.Mounter, claim string) {
	t.Helper()
	claim = testenv.Tmpfs(t, mib)
	shared := testenv.Tmpfs(t, mib)
	must.Succeed(t, unix.Mount("", shared, "", unix.MS_SHARED, ""))
	m = &mounter.Mounter{Target: filepath.Join(shared, "pool"), Claim: mounter.Volume{Path: claim}, Log: testr.New(t)}
	must.Succeed(t, os.Mkdir(m.Target, 0o755))
	return m, claim
}

func TestMountOnceAndUnmount(t *testing.T) {
	m, claim := newMounter(t)
	must.Succeed(t, os.WriteFile(filepath.Join(claim, "data"), []byte("kept"), 0o600))
	must.ErrorIs(t, m.Check(), mounter.ErrNotMounted)
	for range 2 { // the second finds the mount of the first
		must.Succeed(t, m.Mount(t.Context()))
		must.Succeed(t, m.Check())
	}
	if data, err := os.ReadFile(filepath.Join(m.Target, "data")); err != nil || string(data) != "kept" {
		t.Errorf("the pool has %q, %v", data, err)
	}
	must.Succeed(t, m.Unmount(t.Context()))
	must.ErrorIs(t, m.Check(), mounter.ErrNotMounted)
	must.Succeed(t, m.Unmount(t.Context())) // nothing is mounted any more
}

// Kubelet mounts an export of a server anew for the next pod, with another device number: that is the same claim by the name of the
// export, and nothing else is. A tmpfs stands in for the network filesystem, which is all that the mount table shows of one.
func TestMountOfServerIsKnownByItsExport(t *testing.T) {
	for next, want := range map[string]error{
		"nas.example:/exports/a": nil,
		"//nas.example/a":        mounter.ErrOccupied,
		"nas.example:/exports/b": mounter.ErrOccupied,
		"other":                  mounter.ErrOccupied,
	} {
		t.Run(next, func(t *testing.T) {
			m, claim := newMounter(t)
			mountAs(t, "nas.example:/exports/a", claim)
			must.Succeed(t, m.Mount(t.Context()))
			t.Cleanup(func() { must.Succeed(t, unix.Unmount(m.Target, 0)) })
			anew := t.TempDir()
			mountAs(t, next, anew)
			m.Claim = mounter.Volume{Path: anew}
			if err := m.Check(); want == nil {
				must.Succeed(t, err)
			} else {
				must.ErrorIs(t, err, want)
			}
		})
	}
}

// mountAs mounts an empty filesystem from a source of this name.
func mountAs(t *testing.T, source, at string) {
	t.Helper()
	must.Succeed(t, unix.Mount(source, at, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(at, 0)) })
}

func TestPathInUseIsKept(t *testing.T) {
	for name, test := range map[string]struct {
		occupy func(t *testing.T, target string)
		want   error
	}{
		"data": {func(t *testing.T, target string) {
			must.Succeed(t, os.WriteFile(filepath.Join(target, "data"), nil, 0o600))
		}, mounter.ErrOccupied},
		"another filesystem": {func(t *testing.T, target string) {
			must.Succeed(t, unix.Mount("other", target, "tmpfs", 0, ""))
			t.Cleanup(func() { must.Succeed(t, unix.Unmount(target, 0)) })
		}, mounter.ErrOccupied},
		"a parent only of this container": {func(t *testing.T, target string) {
			must.Succeed(t, unix.Mount("", filepath.Dir(target), "", unix.MS_PRIVATE, ""))
		}, mounter.ErrNotShared},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := newMounter(t)
			test.occupy(t, m.Target)
			must.ErrorIs(t, m.Mount(t.Context()), test.want)
		})
	}
}

func TestMissingClaim(t *testing.T) {
	m, _ := newMounter(t)
	m.Claim = mounter.Volume{Path: t.TempDir()}
	if err := m.Mount(t.Context()); err == nil {
		t.Error("a directory of the container became a pool")
	}
	must.ErrorIs(t, m.Check(), mounter.ErrNotMounted)
}
