package quota

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// ByDevice is the facility of a kernel before 5.14, which uses quotactl(2).
func ByDevice(f Facility) Facility {
	p := f.(projects)
	p.control.byDevice = true
	return p
}

// Ioctl does what the package has no use for.
func Ioctl[T any](t testing.TB, d *dir.Dir, request uintptr, arg *T) {
	t.Helper()
	if err := ioctl(d, request, arg); err != nil {
		t.Fatalf("ioctl %#x on %s: %v", request, d, err)
	}
}
