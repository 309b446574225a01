package loop_test

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// XFS requires as much free space as the range has, even if it is already allocated.
func TestGrow_lessFreeThanAllocated(t *testing.T) {
	testenv.NeedRoot(t)
	for name, mount := range filesystems {
		t.Run(name, func(t *testing.T) {
			d := open(t, mount(t))
			f := file(t, d, "file", mib)
			large := free(t, d) * 5 / 8 / mib * mib
			must.Succeed(t, f.Grow(t.Context(), large, loop.Thick))
			must.Succeed(t, f.Grow(t.Context(), large+8*mib, loop.Thick))
			wantAllocated(t, f, large+8*mib)
		})
	}
}
