// Package privilege is what the driver may do on its node and other processes may not:
// the capabilities that its system calls need, and how it gives up all others, which
// Kubernetes gives to every container whose mounts the host sees. Docs/security.md has
// why each is needed. Test/privilege tries that none is missing and none too many.
package privilege

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A Capability is one of capabilities(7), by its number in linux/capability.h.
type Capability int

// What the driver needs.
const (
	// Overrides the permission bits: users of volumes close their directories, and the
	// driver publishes, looks at and erases them all the same.
	DACOverride Capability = unix.CAP_DAC_OVERRIDE
	// Stands for the owner of a file: to remove from a sticky directory, to label, and
	// to make a read-only subvolume of btrfs writable, before it is erased.
	Fowner Capability = unix.CAP_FOWNER
	// Mounts and unmounts, reads and sets quotas, and changes loop devices.
	SysAdmin Capability = unix.CAP_SYS_ADMIN
)

// Needed is all that the driver needs.
var Needed = []Capability{DACOverride, Fowner, SysAdmin}

var names = map[Capability]string{
	DACOverride: "CAP_DAC_OVERRIDE",
	Fowner:      "CAP_FOWNER",
	SysAdmin:    "CAP_SYS_ADMIN",
}

// String is the name in capabilities(7), for those that the driver needs.
func (c Capability) String() string {
	if name, ok := names[c]; ok {
		return name
	}
	return "capability " + strconv.Itoa(int(c))
}

// A set has one bit for each capability.
type set uint64

func (s set) has(c Capability) bool { return s&(1<<c) != 0 }

// Keep gives up, in all threads of this process and for good, what it may do beyond
// the given capabilities: it takes the others out of the effective, permitted and
// bounding sets, empties the inheritable and the ambient one, and sets no_new_privs,
// so that no program which it executed would get them back. It answers those of the
// given ones that it did not have, without which something will not work.
//
// Capabilities are each thread's own. A program with cgo has threads that Go does not
// know, and gets errors.ErrUnsupported, with nothing given up.
func Keep(capabilities []Capability) (missing []Capability, err error) {
	had, err := effective()
	if err != nil {
		return nil, err
	}
	var keep set
	for _, c := range capabilities {
		if had.has(c) {
			keep |= 1 << c
		} else {
			missing = append(missing, c)
		}
	}
	// To give up of the bounding set is a privilege too. Who has it not goes without:
	// what is not permitted cannot come back by execve(2) under no_new_privs.
	if had.has(unix.CAP_SETPCAP) {
		if err := bound(keep); err != nil {
			return nil, err
		}
	}
	if err := prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL); err != nil {
		return nil, fmt.Errorf("empty the ambient capabilities: %w", err)
	}
	if err := permit(keep); err != nil {
		return nil, err
	}
	if err := prctl(unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return nil, fmt.Errorf("set no_new_privs: %w", err)
	}
	return missing, nil
}

// effective is what this process may do.
func effective() (set, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, fmt.Errorf("read the capabilities of this process: %w", os.NewSyscallError("capget", err))
	}
	return set(data[0].Effective) | set(data[1].Effective)<<32, nil
}

// bound takes all but some out of the bounding set.
func bound(keep set) error {
	for c := Capability(0); ; c++ {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // the kernel has no more of them
		}
		if err == nil && has == 1 && !keep.has(c) {
			err = prctl(unix.PR_CAPBSET_DROP, uintptr(c))
		}
		if err != nil {
			return fmt.Errorf("take %s out of the bounding set: %w", c, err)
		}
	}
}

// permit makes a set the effective and the permitted one, and nothing inheritable.
func permit(keep set) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	low, high := uint32(keep), uint32(keep>>32)
	data := [2]unix.CapUserData{{Effective: low, Permitted: low}, {Effective: high, Permitted: high}}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 {
		return fmt.Errorf("give up capabilities: %w", os.NewSyscallError("capset", errno))
	}
	return nil
}

// prctl is made in all threads. Those that come later take after the one that makes them.
func prctl(option, argument uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, option, argument, 0); errno != 0 {
		return os.NewSyscallError("prctl", errno)
	}
	return nil
}
