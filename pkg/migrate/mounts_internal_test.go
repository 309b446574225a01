package migrate

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// Mounts lead to a directory without a name in common with it.
func TestRefusedByMounts(t *testing.T) {
	testenv.NeedRoot(t)
	refused(t, map[string]refusal{
		"a pod has a mount of a directory in it":   {nil, (*rig).mountedElsewhere, "pod other/plain has the directory"},
		"a filesystem is mounted on the directory": {nil, (*rig).mountedOver, "is a mount point"},
	})
}

func (r *rig) mountedElsewhere() error {
	sub, at := filepath.Join(r.path(), "sub"), r.TempDir()
	must.Succeed(r.T, os.Mkdir(sub, 0o755))
	r.mount(sub, at, "", unix.MS_BIND)
	return r.client.Tracker().Add(podAt(at, "node-a"))
}

func (r *rig) mountedOver() error {
	r.mount("none", r.path(), "tmpfs", 0)
	return nil
}

func (r *rig) mount(source, target, kind string, flags uintptr) {
	r.Helper()
	must.Succeed(r.T, unix.Mount(source, target, kind, flags, ""))
	r.Cleanup(func() { must.Succeed(r.T, unix.Unmount(target, 0)) })
}
