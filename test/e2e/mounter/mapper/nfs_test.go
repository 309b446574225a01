package mapper

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/nfs"
)

// A claim on NFS is mounted as kubelet has mounted it, recognised when kubelet has mounted it anew, and told from another
// directory of the same server.
func TestNFS(t *testing.T) {
	mounter, at := program(t), target(t)
	server := nfs.Serve(t)
	for _, dir := range []string{"pvc-1", "pvc-2"} {
		must.Succeed(t, os.Mkdir(filepath.Join(server.Exported, dir), 0o755))
	}
	volume := t.TempDir()
	flags := []string{"--target", at, "--volume", volume}

	server.Mount("pvc-1", volume)
	first := deviceOf(t, volume)
	until(t, "Keeping the pool mounted", mounter, append([]string{"mount"}, flags...)...)
	must.Succeed(t, os.WriteFile(filepath.Join(at, "file"), []byte("data"), 0o600))
	wantContent(t, filepath.Join(server.Exported, "pvc-1", "file"), "data")

	must.Succeed(t, unix.Unmount(volume, 0))
	server.Mount("pvc-1", volume)
	if again := deviceOf(t, volume); again == first {
		t.Errorf("the second mount is the same filesystem, %d, as the first", again)
	}
	run(t, "", mounter, append([]string{"probe"}, flags...)...)

	must.Succeed(t, unix.Unmount(volume, 0))
	server.Mount("pvc-2", volume)
	wantRefused(t, "pool path is taken", mounter, append([]string{"mount"}, flags...)...)
	must.Succeed(t, unix.Unmount(volume, 0))
	run(t, "", mounter, append([]string{"unmount", "--patience", "10s"}, flags[:2]...)...)
	if _, err := os.Stat(filepath.Join(at, "file")); !os.IsNotExist(err) {
		t.Errorf("the pool is still mounted: %v", err)
	}
}

// deviceOf is the number that a filesystem has.
func deviceOf(t *testing.T, path string) uint64 {
	t.Helper()
	var info unix.Stat_t
	must.Succeed(t, unix.Stat(path, &info))
	return info.Dev
}
