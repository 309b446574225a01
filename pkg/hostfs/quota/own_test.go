package quota_test

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Of an empty filesystem nearly all that is taken is its own, and never more than that.
func TestOwnOfEmptyFilesystem(t *testing.T) {
	testenv.NeedRoot(t)
	for name, made := range map[string]struct {
		kind      string
		bytes     int64
		arguments []string
	}{
		"xfs":                  {"xfs", 20 << 30, nil},
		"xfs, small":           {"xfs", 1 << 30, nil},
		"xfs without reflinks": {"xfs", 4 << 30, []string{"-m", "reflink=0,rmapbt=0,finobt=0"}},
		"xfs that has owners":  {"xfs", 4 << 30, []string{"-m", "rmapbt=1"}},
		"xfs of small blocks":  {"xfs", 4 << 30, []string{"-b", "size=1024"}},
		"ext4":                 {"ext4", 1 << 30, nil},
	} {
		t.Run(name, func(t *testing.T) {
			root := open(t, testenv.MountMade(t, made.kind, made.bytes, made.arguments))
			own, taken := must.Value(quota.Own(root))(t), must.Value(dir.SpaceOf(root))(t).TakenBytes()
			if own > taken || own < taken*3/4 {
				t.Errorf("%d MiB are taken, and %d of the filesystem itself", taken>>20, own>>20)
			}
		})
	}
}
