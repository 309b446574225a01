package quota_test

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A subvolume of another btrfs that is mounted over an entry has the number of one here, whose limit stays.
func TestFreeTouchesNoOtherFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	const limited = 8 << 20
	here, there := testenv.CountingBtrfs(t, 128<<20), testenv.CountingBtrfs(t, 128<<20)
	root := open(t, here)
	facility := must.Value(quota.Detect(root))(t)
	volume := must.Value(facility.Make(root, "volume"))(t)
	covered := must.Value(facility.Make(root, "covered"))(t)
	other := must.Value(facility.Make(open(t, there), "other"))(t)
	id, otherID := must.Value(facility.IDOf(volume))(t), must.Value(facility.IDOf(other))(t)
	must.Succeed(t, facility.Limit(volume, id, quota.Limit{Bytes: limited}), covered.Close(), other.Close())
	if id != otherID {
		t.Fatalf("the subvolumes are %d and %d, want one number", id, otherID)
	}
	at := filepath.Join(here, "covered")
	must.Succeed(t, unix.Mount(filepath.Join(there, "other"), at, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(at, unix.MNT_DETACH)) })
	err := quota.Free(root, open(t, at))
	if usage := must.Value(facility.Usage(volume, id))(t); usage.Limit.Bytes != limited || err == nil {
		t.Errorf("the limit is %d, and the error %v", usage.Limit.Bytes, err)
	}
	must.Succeed(t, quota.Free(root, volume), volume.Close())
	if usage := must.Value(facility.Usage(root, id))(t); usage.Limit.Bytes != 0 {
		t.Errorf("its own limit is %d still", usage.Limit.Bytes)
	}
}
