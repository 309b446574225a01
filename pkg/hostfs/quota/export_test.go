package quota

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// ByDevice is the facility for kernels before 5.14, which uses quotactl(2).
func ByDevice(f Facility) Facility {
	p := f.(projects)
	p.control.byDevice = true
	return p
}

// Ioctl makes calls that only the tests need.
func Ioctl[T any](t testing.TB, d *dir.Dir, request uintptr, arg *T) {
	t.Helper()
	if err := ioctl.Do(d, request, arg); err != nil {
		t.Fatalf("ioctl %#x on %s: %v", request, d, err)
	}
}

// SetDefaultLimit sets the limit of project 0, which on XFS is the default of all projects.
func SetDefaultLimit(d *dir.Dir, l Limit) error { return newControl().set(d, 0, l) }

// StraysOf is Facility.Strays of XFS and ext4, whether quotas are on or not.
func StraysOf(d *dir.Dir, id ID, step func() error) (Strays, error) {
	return projects{}.Strays(d, id, step)
}

// AskingFew is the facility for XFS and ext4 that asks about no more than so many projects.
func AskingFew(f Facility, most uint64) Facility {
	p := f.(projects)
	p.most = most
	return p
}
