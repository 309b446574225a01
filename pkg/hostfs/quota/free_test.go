package quota_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
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

// A process without CAP_SYS_ADMIN, as the provisioner may be, takes no limits off, and removes a subvolume that a pod made as it does a directory.
func TestSubvolumeIsRemovedWithoutSysAdmin(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	for name, fresh := range map[string]func(testing.TB) string{
		"with quotas":    func(t testing.TB) string { return btrfs(t, enable) },
		"without quotas": func(t testing.TB) string { return testenv.LoopFS(t, "btrfs", 256<<20) },
	} {
		t.Run(name, func(t *testing.T) {
			path := fresh(t)
			root := open(t, path)
			must.Succeed(t, os.Mkdir(path+"/volume", 0o700))
			run(t, "btrfs", "-q", "subvolume", "create", path+"/volume/nested")
			must.Succeed(t, os.WriteFile(path+"/volume/nested/file", nil, 0o600))
			must.Succeed(t, without(unix.CAP_SYS_ADMIN, func() error {
				return dir.RemoveTreeFreeing(t.Context(), root, "volume", func(context.Context) error { return nil }, quota.Free)
			}))
		})
	}
}
