package trap

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// Clock is what is added to the environment of a program that is started in a trap, so that it lives by a clock that is ahead by so much, or
// behind. The clock of the kernel, by which files have their times, stays. It has to be a program of AsksForTime.
func Clock(ahead time.Duration) string { return fmt.Sprintf("%s=%d", aheadVariable, int64(ahead)) }

// AsksForTime makes a copy of a program of Go that asks the kernel for the time by a system call. Otherwise it reads it from memory that it
// shares with the kernel (vdso(7)), by a function that it finds by its name.
func AsksForTime(t *testing.T, program string) string {
	t.Helper()
	code, err := os.ReadFile(program)
	must.Succeed(t, err)
	found := 0
	for _, name := range []string{"__vdso_clock_gettime", "__kernel_clock_gettime"} {
		found += bytes.Count(code, []byte(name))
		code = bytes.ReplaceAll(code, []byte(name), bytes.Repeat([]byte("x"), len(name)))
	}
	if found == 0 {
		t.Fatalf("%s reads the time in another way", program)
	}
	copied := filepath.Join(t.TempDir(), filepath.Base(program))
	must.Succeed(t, os.WriteFile(copied, code, 0o755))
	return copied
}

// tell answers with the time.
func (d process) tell(n *notification) error {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &now); err != nil {
		return err
	}
	now = unix.NsecToTimespec(now.Nano() + d.ahead)
	answer := unsafe.Slice((*byte)(unsafe.Pointer(&now)), int(unsafe.Sizeof(now)))
	_, err := unix.ProcessVMWritev(int(n.pid),
		[]unix.Iovec{{Base: &answer[0], Len: uint64(len(answer))}}, []unix.RemoteIovec{{Base: uintptr(n.args[1]), Len: len(answer)}}, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil // killed
	}
	if err != nil {
		return err
	}
	return d.reply(&reply{id: n.id})
}
