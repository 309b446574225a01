// Package privilege lists the capabilities that the driver's system calls need, and drops all
// others. Kubernetes gives all capabilities to a container with Bidirectional mount
// propagation, since it must be privileged. docs/security.md explains why each is needed;
// test/e2e/privilege checks that none is missing and none superfluous.
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

// A Capability is one of capabilities(7), with its number in linux/capability.h.
type Capability int

// Capabilities of the driver.
const (
	// Overrides permission bits: the driver publishes, checks and removes directories that
	// the users of volumes have made inaccessible.
	DACOverride Capability = unix.CAP_DAC_OVERRIDE
	// Acts as the owner of a file: removes from sticky directories, sets labels, and makes
	// a read-only btrfs subvolume writable before it is removed.
	Fowner Capability = unix.CAP_FOWNER
	// Mounts and unmounts, reads and sets quotas, configures loop devices.
	SysAdmin Capability = unix.CAP_SYS_ADMIN
)

// Capabilities that the mounter, or the agent of devices, needs besides some of these.
const (
	// Creates device nodes.
	MakeNode Capability = unix.CAP_MKNOD
	// Looks at the descriptors, the memory and the mounts of others' processes.
	SysPtrace Capability = unix.CAP_SYS_PTRACE
	// Follows paths through directories that others have closed.
	DACReadSearch Capability = unix.CAP_DAC_READ_SEARCH
	// Grows a mounted ext4.
	SysResource Capability = unix.CAP_SYS_RESOURCE
)

// Needed is the driver's set.
var Needed = []Capability{DACOverride, Fowner, SysAdmin}

// ForMounter is the set of the program that mounts pools on claims, and of the tools that it runs. docs/pools.md explains why
// each is needed; test/e2e/mounter checks that none is superfluous.
var ForMounter = []Capability{DACOverride, SysAdmin, SysResource, MakeNode}

// ForDevices is the set of the agent that offers and cleans whole devices: beyond being root, the kernel lets no other process have it
// forget the partitions that were erased (BLKRRPART), nor look at what the processes of others have open, mapped and mounted, wherever.
var ForDevices = []Capability{DACReadSearch, SysAdmin, SysPtrace}

// LinuxImmutable takes the flags immutable and append-only off what is removed.
const LinuxImmutable Capability = unix.CAP_LINUX_IMMUTABLE

// ForErasing is what removing needs besides Needed, where privileged users of volumes have set such flags. With raises it.
var ForErasing = []Capability{LinuxImmutable}

// Capabilities that copying a tree needs besides, which With raises for its time.
const (
	// Gives files to others than the driver.
	Chown Capability = unix.CAP_CHOWN
	// Keeps setuid and setgid bits of files of other groups.
	FsetID Capability = unix.CAP_FSETID
	// Sets the capabilities of files.
	SetFcap Capability = unix.CAP_SETFCAP
)

// ForCopies is what copying a tree needs besides Needed.
var ForCopies = []Capability{Chown, FsetID, SetFcap, MakeNode}

var names = map[Capability]string{
	DACOverride: "CAP_DAC_OVERRIDE",
	Fowner:      "CAP_FOWNER",
	SysAdmin:    "CAP_SYS_ADMIN",
	MakeNode:    "CAP_MKNOD",
	SysResource: "CAP_SYS_RESOURCE",
	SysPtrace:   "CAP_SYS_PTRACE",
	Chown:       "CAP_CHOWN",
	FsetID:      "CAP_FSETID",
	SetFcap:     "CAP_SETFCAP",

	DACReadSearch:  "CAP_DAC_READ_SEARCH",
	LinuxImmutable: "CAP_LINUX_IMMUTABLE",
}

// String is the name in capabilities(7), for those listed above.
func (c Capability) String() string {
	if name, ok := names[c]; ok {
		return name
	}
	return "capability " + strconv.Itoa(int(c))
}

// A set has one bit for each capability.
type set uint64

func (s set) has(c Capability) bool { return s&(1<<c) != 0 }

// Keep drops all but the given capabilities, permanently and in all threads of this process:
// it removes the others from the effective, permitted and bounding sets, empties the
// inheritable and ambient sets, and sets no_new_privs, so that execve(2) cannot regain them.
// It returns those of the given ones that the process lacks. The later ones stay permitted, and
// are not effective but in With.
//
// Capabilities are per thread. A program with cgo may have threads unknown to Go, so Keep drops
// nothing there and returns errors.ErrUnsupported.
func Keep(capabilities []Capability, later ...Capability) (missing []Capability, err error) {
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
	permitted := keep
	for _, c := range later {
		if had.has(c) {
			permitted |= 1 << c
		}
	}
	// Changing the bounding set needs CAP_SETPCAP. Without it the set stays: under
	// no_new_privs execve(2) cannot gain what is not permitted.
	if had.has(unix.CAP_SETPCAP) {
		if err := bound(permitted); err != nil {
			return nil, err
		}
	}
	if err := prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL); err != nil {
		return nil, fmt.Errorf("clear ambient capabilities: %w", err)
	}
	if err := permit(keep, permitted); err != nil {
		return nil, err
	}
	if err := prctl(unix.PR_SET_NO_NEW_PRIVS, 1); err != nil {
		return nil, fmt.Errorf("set no_new_privs: %w", err)
	}
	return missing, nil
}

// effective is the effective set of this process.
func effective() (set, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, fmt.Errorf("read capabilities of this process: %w", os.NewSyscallError("capget", err))
	}
	return set(data[0].Effective) | set(data[1].Effective)<<32, nil
}

// bound removes all but the kept ones from the bounding set.
func bound(keep set) error {
	for c := Capability(0); ; c++ {
		has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0)
		if errors.Is(err, unix.EINVAL) {
			return nil // past the kernel's last capability
		}
		if err == nil && has == 1 && !keep.has(c) {
			err = prctl(unix.PR_CAPBSET_DROP, uintptr(c))
		}
		if err != nil {
			return fmt.Errorf("drop %s from the bounding set: %w", c, err)
		}
	}
}

// permit sets the effective and permitted sets, and clears the inheritable one.
func permit(keep, permitted set) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(keep), Permitted: uint32(permitted)},
		{Effective: uint32(keep >> 32), Permitted: uint32(permitted >> 32)},
	}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 {
		return fmt.Errorf("drop capabilities: %w", os.NewSyscallError("capset", errno))
	}
	return nil
}

// prctl runs in all threads. New threads inherit from their creator.
func prctl(option, argument uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, option, argument, 0); errno != 0 {
		return os.NewSyscallError("prctl", errno)
	}
	return nil
}
