package testenv

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// ShutDown has an XFS answer with errors only, as if its device had gone: XFS_IOC_GOINGDOWN without flushing its log.
func ShutDown(t testing.TB, path string) {
	t.Helper()
	const goingDown, noLogFlush = 0x8004587d, 2
	f, err := os.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, f.Close()) }()
	must.Succeed(t, unix.IoctlSetPointerInt(int(f.Fd()), goingDown, noLogFlush))
}
