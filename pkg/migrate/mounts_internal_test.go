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
		"a pod has a mount of a directory in it":   {nil, (*harness).mountedElsewhere, "pod other/plain has the directory"},
		"a filesystem is mounted on the directory": {nil, (*harness).mountedOver, "is a mount point"},
	})
}

func (h *harness) mountedElsewhere() error {
	sub, at := filepath.Join(h.path(), "sub"), h.TempDir()
	must.Succeed(h.T, os.Mkdir(sub, 0o755))
	h.mount(sub, at, "", unix.MS_BIND)
	return h.client.Tracker().Add(podAt(at, "node-a"))
}

func (h *harness) mountedOver() error {
	h.mount("none", h.path(), "tmpfs", 0)
	return nil
}

func (h *harness) mount(source, target, kind string, flags uintptr) {
	h.Helper()
	must.Succeed(h.T, unix.Mount(source, target, kind, flags, ""))
	h.Cleanup(func() { must.Succeed(h.T, unix.Unmount(target, 0)) })
}
