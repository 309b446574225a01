package faults

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
	"kubevirt.io/hostpath-provisioner/test/testenv/nfs"
)

// A shared is a pool that nodes share, on NFS.
type shared struct {
	*drivertest.Driver
	at string
}

func newShared(t *testing.T) *shared {
	t.Helper()
	if !testenv.Guest() {
		t.Skip("this is not the guest of test/cmd/kernel")
	}
	server, s := nfs.Serve(t), &shared{at: t.TempDir()}
	must.Succeed(t, os.Mkdir(filepath.Join(server.Exported, "pool"), 0o750))
	server.Mount("pool", s.at)
	t.Cleanup(func() { must.Succeed(t, drivertest.UnmountBelow(s.at)) })
	s.Driver = drivertest.Start(t, drivertest.Config{
		Binary: drivertest.Built(t),
		Pools:  []drivertest.PoolConfig{{Name: "shared", Path: s.at, Shared: true}},
		Flags:  []string{"--metrics-address=127.0.0.1:0"},
	})
	s.AwaitServing()
	return s
}

func (s *shared) create(id string) drivertest.Volume {
	s.Helper()
	v := drivertest.Volume{ID: id, Pool: "shared", Bytes: 4 * mib}
	s.Must(drivertest.Repeat(s.Context(), func() error { _, err := s.Create(s.Context(), v); return err }))
	return v
}

// The kernel's table says of no NFS which of its directories is mounted, but in the source.
func TestDeletePublishedOnNFS(t *testing.T) {
	s := newShared(t)
	v := s.create("volume")
	s.Must(s.Publish(t.Context(), v, "pod"))
	file := filepath.Join(s.Target("pod"), "data")
	s.Must(os.WriteFile(file, []byte("of a database"), 0o600))
	s.WantCode("deleting a published volume", s.Delete(t.Context(), v.ID), codes.FailedPrecondition)
	if content, err := os.ReadFile(file); string(content) != "of a database" {
		t.Errorf("the pod reads %q, %v", content, err)
	}
	s.Must(s.Unpublish(t.Context(), v.ID, "pod"))
	s.Must(s.Delete(t.Context(), v.ID))
}

// The directory of a volume was removed. The client knows that it has no links any more, and refuses to open what is mounted at the
// target.
func TestUnpublishStaleNFS(t *testing.T) {
	s := newShared(t)
	v := s.create("volume")
	s.Must(s.Publish(t.Context(), v, "pod"))
	must.Succeed(t, os.RemoveAll(filepath.Join(s.at, v.ID)))
	_, err := unix.Open(s.Target("pod"), unix.O_PATH, 0)
	must.ErrorIs(t, err, unix.ESTALE)
	s.Must(s.Unpublish(t.Context(), v.ID, "pod"))
	if left, err := mountns.Below(s.Targets); err != nil || len(left) > 0 {
		t.Errorf("mounted are %v, %v", left, err)
	}
	if _, err := os.Lstat(s.Target("pod")); !os.IsNotExist(err) {
		t.Errorf("the target is left: %v", err)
	}
}
