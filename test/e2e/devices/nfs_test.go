package devices

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/nfs"
)

// NFS asks its server for what is open and for what is mounted, and waits for it for ever.
func TestServerThatIsGoneKeepsNoDeviceBack(t *testing.T) {
	h := newHarness(t)
	server := nfs.Serve(t)
	must.Succeed(t, os.Mkdir(filepath.Join(server.Exported, "claim"), 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(server.Exported, "claim/file"), []byte("data"), 0o666))
	at, subPath := t.TempDir(), filepath.Join(t.TempDir(), "file")
	server.Mount("claim", at)
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(at, unix.MNT_DETACH)) })
	file := filepath.Join(at, "file")
	must.Succeed(t, os.WriteFile(subPath, nil, 0o600), unix.Mount(file, subPath, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(subPath, unix.MNT_DETACH)) })
	open(t, file)
	h.Blank("disk", 8*mib)
	server.Cut()
	h.Offered()
	used := h.Blank("disk-used", 8*mib)
	used.Untouched()
	open(t, used.Node)
	if r := h.Pass(); len(r.Problems) != 1 || len(r.Offers) > 0 {
		t.Errorf("found %+v, want the disk that is used refused", r)
	}
}
