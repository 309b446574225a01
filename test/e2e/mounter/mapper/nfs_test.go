package mapper

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// A claim on NFS is mounted as kubelet has mounted it, recognised when kubelet has mounted it anew, and told from another
// directory of the same server.
func TestNFS(t *testing.T) {
	mounter, at := program(t), target(t)
	exported := serveNFS(t)
	for _, dir := range []string{"pvc-1", "pvc-2"} {
		must.Succeed(t, os.Mkdir(filepath.Join(exported, dir), 0o755))
	}
	volume := t.TempDir()
	flags := []string{"--target", at, "--volume", volume}

	mountNFS(t, "pvc-1", volume)
	first := deviceOf(t, volume)
	until(t, "Keeping the pool mounted", mounter, append([]string{"mount"}, flags...)...)
	must.Succeed(t, os.WriteFile(filepath.Join(at, "file"), []byte("data"), 0o600))
	wantContent(t, filepath.Join(exported, "pvc-1", "file"), "data")

	must.Succeed(t, unix.Unmount(volume, 0))
	mountNFS(t, "pvc-1", volume)
	if again := deviceOf(t, volume); again == first {
		t.Errorf("the second mount is the same filesystem, %d, as the first", again)
	}
	run(t, "", mounter, append([]string{"probe"}, flags...)...)

	must.Succeed(t, unix.Unmount(volume, 0))
	mountNFS(t, "pvc-2", volume)
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

// mountNFS mounts a directory of the export, not to be shared with a mount that is there.
func mountNFS(t *testing.T, directory, at string) {
	t.Helper()
	must.Succeed(t, unix.Mount("127.0.0.1:/"+directory, at, "nfs4", 0, "vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1,nosharecache,timeo=100,retrans=3"))
}

// serveNFS has the kernel export a directory with NFSv4 on the loopback, until the test ends. It takes the place of rpc.nfsd
// and rpc.mountd, which write to the same files.
func serveNFS(t *testing.T) (exported string) {
	t.Helper()
	const control = "/proc/fs/nfsd"
	run(t, "", "modprobe", "-a", "nfsd", "nfsv4")
	exported = t.TempDir()
	must.Succeed(t, unix.Mount("nfsd", control, "nfsd", 0, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(control, 0)) })
	write(t, control+"/versions", "-3 +4 +4.2\n")
	// The shortest there is: until then nothing is opened.
	write(t, control+"/nfsv4leasetime", "10\n")
	write(t, control+"/nfsv4gracetime", "10\n")
	write(t, control+"/portlist", "tcp 2049\n")
	write(t, control+"/threads", "2\n")
	t.Cleanup(func() { write(t, control+"/threads", "0\n") })

	// Who is let in, what is exported to whom with which flags, and that it is the root of NFSv4.
	// https://docs.kernel.org/filesystems/nfs/rpc-cache.html, and NFSEXP_* of linux/nfsd/export.h: async, no_subtree_check, fsid.
	const client, flags = "guest", 0x10 | 0x400 | 0x2000
	end := time.Now().Add(time.Hour).Unix()
	cache := func(name, format string, args ...any) {
		write(t, "/proc/net/rpc/"+name+"/channel", fmt.Sprintf(format+"\n", args...))
	}
	cache("auth.unix.ip", "nfsd 127.0.0.1 %d %s", end, client)
	cache("nfsd.export", "%s %s %d %d 65534 65534 0", client, exported, end, flags)
	cache("nfsd.fh", `%s 1 \x00000000 %d %s`, client, end, exported)
	return exported
}
