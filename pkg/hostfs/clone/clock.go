package clone

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// A Clock tells whether the clock of this machine was set since it was opened. What was written after it was set back may
// seem older than a pass that began before.
type Clock struct{ timer int }

// OpenClock opens a timer that the kernel cancels when the clock is set (timerfd_create(2), TFD_TIMER_CANCEL_ON_SET), also by a
// step of adjtimex(2) and after a suspend. Slewing does not count: a clock that is slewed never goes back.
func OpenClock() (*Clock, error) {
	timer, err := unix.TimerfdCreate(unix.CLOCK_REALTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	never := unix.ItimerSpec{Value: unix.NsecToTimespec(1<<63 - 1)}
	if err := unix.TimerfdSettime(timer, unix.TFD_TIMER_ABSTIME|unix.TFD_TIMER_CANCEL_ON_SET, &never, nil); err != nil {
		_ = unix.Close(timer) // nothing was written to it
		return nil, os.NewSyscallError("timerfd_settime", err)
	}
	return &Clock{timer}, nil
}

// WasSet says so once for each time that it was set, or several.
func (c *Clock) WasSet() (bool, error) {
	var expirations [8]byte
	_, err := retryInterrupted(func() (int, error) { return unix.Read(c.timer, expirations[:]) })
	switch {
	case errors.Is(err, unix.ECANCELED):
		return true, nil
	case err == nil || errors.Is(err, unix.EAGAIN):
		return false, nil
	default:
		return false, os.NewSyscallError("read of a timer", err)
	}
}

// Close gives the timer back.
func (c *Clock) Close() error {
	if c == nil {
		return nil
	}
	return os.NewSyscallError("close", unix.Close(c.timer))
}
