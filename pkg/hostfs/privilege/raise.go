package privilege

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// With runs do on a thread of its own that has the given capabilities, as far as this process
// may have them, and takes them back afterwards. Goroutines that do starts do not have them.
func With(capabilities []Capability, do func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var had [2]unix.CapUserData
	if err := unix.Capget(&header, &had[0]); err != nil {
		return os.NewSyscallError("capget", err)
	}
	raised := had
	for _, c := range capabilities {
		data, bit := &raised[c/32], uint32(1)<<(c%32)
		data.Effective |= data.Permitted & bit
	}
	if raised == had {
		return do()
	}
	if err := unix.Capset(&header, &raised[0]); err != nil {
		return os.NewSyscallError("capset", err)
	}
	defer func() {
		if lowerErr := unix.Capset(&header, &had[0]); lowerErr != nil {
			// The thread ends with its goroutine, and the capabilities with it.
			runtime.LockOSThread()
			err = errors.Join(err, os.NewSyscallError("capset", lowerErr))
		}
	}()
	return do()
}
