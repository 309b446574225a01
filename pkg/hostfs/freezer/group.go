// Package freezer stops all processes of pods for some seconds, by the freezer of control groups
// (cgroup v2 cgroup.freeze, Linux 5.2, or the freezer of cgroup v1), and makes sure that they go
// on. A frozen group has one owner, the [Watchdog] that froze it: it has the lock of the group
// and thaws it, whatever has become of the one it did that for. Its [Client] has handles of
// the groups, and thaws them only if the watchdog ends or does not answer. Which pods are stopped,
// and what is done meanwhile, is decided elsewhere.
package freezer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Limit is how long pods are frozen at most.
const Limit = 8 * time.Second

// Errors that callers may test for.
var (
	// ErrUnavailable reports that no watchdog answers, or that it does not see the node's control
	// groups.
	ErrUnavailable = errors.New("pods cannot be frozen")
	// ErrBusy reports a pod that is frozen already.
	ErrBusy = errors.New("frozen already")
	// ErrThawed reports that pods did not stand still all the time.
	ErrThawed = errors.New("thawed too early")
	// ErrUnstoppable reports processes that did not stop within the time for that, such as those that
	// wait for a disk.
	ErrUnstoppable = errors.New("not all processes could be stopped")
)

// mark is the extended attribute of a group that a watchdog freezes, from before to after that. It
// outlives the watchdog, and goes with the group and with a reboot. Only who has the lock of the group
// sets or removes it.
const mark = "user.hostpath-csi.frozen"

// A group is the control group of a pod, with all that are below it.
type group struct {
	dir   *os.File
	state *os.File // what freezes and thaws: kept open, so that a thaw lacks nothing
	v1    bool
	// The rest is the watchdog's alone.
	unlock func() // gives back the lock of the group; nil if it is not held
	frozen bool   // it may be: it has to be thawed
	gone   bool   // it was removed, with all of its processes
}

// adopt takes over a handle of a group's directory, unless it fails.
func adopt(d *os.File) (*group, error) {
	var missing error
	for _, v1 := range []bool{false, true} {
		g := &group{dir: d, v1: v1}
		state, err := g.open(map[bool]string{false: "cgroup.freeze", true: "freezer.state"}[v1], unix.O_RDWR)
		if err == nil {
			g.state = state
			return g, nil
		}
		missing = err
	}
	return nil, fmt.Errorf("%s is no control group that can be frozen: %w", d.Name(), missing)
}

// close gives all back. A group that the watchdog could not thaw keeps its mark.
func (g *group) close() {
	if g.unlock != nil {
		g.unlock()
	}
	_ = errors.Join(g.state.Close(), g.dir.Close()) // each value was written at once
}

// isGone reports an error of a group that was removed: of its directory, or of a file that is open still.
func isGone(err error) bool { return dir.IsMissing(err) || errors.Is(err, unix.ENODEV) }

// set freezes a group, or thaws it. A group that is gone has no processes.
func (g *group) set(frozen bool) error {
	values := map[bool]map[bool]string{false: {true: "1", false: "0"}, true: {true: "FROZEN", false: "THAWED"}}
	_, err := g.state.WriteAt([]byte(values[g.v1][frozen]), 0)
	if isGone(err) {
		return nil
	}
	return err
}

// asked reports whether the group itself is to be frozen, and not one above it.
func (g *group) asked() (bool, error) {
	file := "cgroup.freeze"
	if g.v1 {
		file = "freezer.self_freezing"
	}
	value, err := g.read(file)
	return strings.TrimSpace(value) == "1", err
}

// stopped reports whether all processes of the group stand still.
func (g *group) stopped() (bool, error) {
	if g.v1 {
		state, err := g.read("freezer.state")
		return strings.TrimSpace(state) == "FROZEN", err
	}
	events, err := g.read("cgroup.events")
	return slices.Contains(strings.Split(events, "\n"), "frozen 1"), err
}

// claim makes the caller the owner of the group until it is closed: it takes the lock, which ends
// with the process, thaws what an owner that has ended left frozen, and marks the group before
// anything is frozen. What others than a watchdog have frozen stays theirs. Errors: ErrBusy.
func (g *group) claim() error {
	if err := g.lock(dir.TryLockDir); err != nil {
		if errors.Is(err, dir.ErrLocked) {
			return fmt.Errorf("%w: %s", ErrBusy, g.dir.Name())
		}
		return g.unlessGone(err)
	}
	if err := g.thawLeft(); err != nil {
		return err
	}
	asked, err := g.asked()
	if err != nil {
		return g.unlessGone(err)
	}
	if asked {
		return fmt.Errorf("%w: %s", ErrBusy, g.dir.Name())
	}
	if err := unix.Fsetxattr(int(g.dir.Fd()), mark, []byte("1"), 0); err != nil {
		return g.unlessGone(fmt.Errorf("mark %s: %w", g.dir.Name(), err))
	}
	return nil
}

func (g *group) unlessGone(err error) error {
	if isGone(err) {
		g.gone = true
		return nil
	}
	return err
}

func (g *group) lock(take func(*dir.Dir) (unlock func(), err error)) error {
	d, err := dir.Open(dir.HandlePath(int(g.dir.Fd())))
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // the lock has a handle of its own
	g.unlock, err = take(d)
	return err
}

// thawLeft thaws a group whose owner has ended, by its mark. The caller has the lock.
func (g *group) thawLeft() error {
	marked, err := g.marked()
	if err != nil || !marked {
		return err
	}
	if err := g.set(false); err != nil {
		return err
	}
	return g.unmark()
}

// poll is how often a group is asked whether its processes stand still.
const poll = time.Millisecond

// stop freezes a group that is claimed, and waits until its processes stand still.
func (g *group) stop(ctx context.Context) error {
	if g.gone {
		return nil
	}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	g.frozen = true
	for {
		// With cgroup v1 again each time: processes that were being made are not in yet
		// (cgroup-v1/freezer-subsystem.rst of the kernel's documentation).
		if err := g.set(true); err != nil {
			return err
		}
		if stopped, err := g.stopped(); err != nil || stopped {
			return g.unlessGone(err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// thaw lets the processes of a group go on that stop has frozen, and reports whether they had stood
// still until now. The mark is removed only after that.
func (g *group) thaw() (still bool, err error) {
	if g.frozen && !g.gone {
		still, err = g.standsStill()
		if thawed := g.set(false); thawed != nil {
			return false, errors.Join(err, thawed)
		}
	}
	g.frozen = false
	if g.unlock != nil {
		err = errors.Join(err, g.unmark())
	}
	return still || g.gone, err
}

// standsStill reports whether the group is frozen as stop has left it.
func (g *group) standsStill() (bool, error) {
	asked, err := g.asked()
	if err != nil || !asked {
		return false, ignoreGone(err)
	}
	stopped, err := g.stopped()
	return stopped, ignoreGone(err)
}

func ignoreGone(err error) error {
	if isGone(err) {
		return nil
	}
	return err
}

func (g *group) unmark() error {
	err := unix.Fremovexattr(int(g.dir.Fd()), mark)
	if errors.Is(err, unix.ENODATA) {
		return nil
	}
	return ignoreGone(err)
}

// marked reports whether a watchdog has frozen the group, or was about to.
func (g *group) marked() (bool, error) {
	_, err := unix.Fgetxattr(int(g.dir.Fd()), mark, make([]byte, 64))
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENODATA), isGone(err):
		return false, nil
	}
	return false, fmt.Errorf("read the mark of %s: %w", g.dir.Name(), err)
}

func (g *group) read(file string) (string, error) {
	f, err := g.open(file, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }() // opened for reading
	data := make([]byte, 4096)
	n, err := f.Read(data)
	return string(data[:max(n, 0)]), err
}

func (g *group) open(file string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(g.dir.Fd()), file, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: g.dir.Name() + "/" + file, Err: err}
	}
	return os.NewFile(uintptr(fd), g.dir.Name()+"/"+file), nil
}
