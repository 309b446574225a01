// Package freezer stops all processes of pods for some seconds, by the freezer of control groups
// (cgroup v2 cgroup.freeze, Linux 5.2, or the freezer of cgroup v1), and makes sure that they go
// on. Two processes share that: the [Watchdog], which freezes and thaws, and its [Client], which
// has handles of the groups and thaws them if the watchdog ends. Which pods are stopped, and
// what is done meanwhile, is decided elsewhere.
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
)

// mark is the extended attribute of a group that a watchdog has frozen, with the name of the
// freeze. It goes with the group, and with a reboot.
const mark = "user.hostpath-csi.frozen"

// A group is the control group of a pod, with all that are below it.
type group struct {
	dir *os.File
	v1  bool
}

// adopt takes over a handle of a group's directory.
func adopt(dir *os.File) (*group, error) {
	for _, v1 := range []bool{false, true} {
		g := &group{dir, v1}
		if _, err := g.read(g.file()); err == nil {
			return g, nil
		}
	}
	return nil, fmt.Errorf("%s is no control group that can be frozen", dir.Name())
}

func (g *group) close() { _ = g.dir.Close() } // a directory: nothing can be lost

// file is the one that freezes and thaws.
func (g *group) file() string {
	if g.v1 {
		return "freezer.state"
	}
	return "cgroup.freeze"
}

// set freezes a group, or thaws it. A group that is gone has no processes.
func (g *group) set(frozen bool) error {
	values := map[bool]map[bool]string{false: {true: "1", false: "0"}, true: {true: "FROZEN", false: "THAWED"}}
	err := g.write(g.file(), values[g.v1][frozen])
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// asked reports whether the group itself is to be frozen, and not one above it.
func (g *group) asked() (bool, error) {
	file := g.file()
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

// poll is how often a group is asked whether its processes stand still.
const poll = time.Millisecond

// freeze stops the processes of the group, and waits for that. It marks the group before: what is
// frozen by others stays with them.
func (g *group) freeze(ctx context.Context, name string) error {
	if asked, err := g.asked(); err != nil || asked {
		return errors.Join(err, fmt.Errorf("%w: %s", ErrBusy, g.dir.Name()))
	}
	err := unix.Fsetxattr(int(g.dir.Fd()), mark, []byte(name), unix.XATTR_CREATE)
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%w: %s", ErrBusy, g.dir.Name())
	}
	if err != nil {
		return fmt.Errorf("mark %s: %w", g.dir.Name(), err)
	}
	return g.stop(ctx, name)
}

// stop freezes the group until its processes stand still, as long as it has the mark: who takes
// that away has thawed it, and it must not be frozen again.
func (g *group) stop(ctx context.Context, name string) error {
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for {
		// With cgroup v1 again each time: processes that were being made are not in yet
		// (cgroup-v1/freezer-subsystem.rst of the kernel's documentation).
		if err := g.set(true); err != nil {
			return err
		}
		if marked, err := g.marked(); err != nil || marked != name {
			return errors.Join(err, g.set(false), fmt.Errorf("%w: %s", ErrThawed, g.dir.Name()))
		}
		if stopped, err := g.stopped(); err != nil || stopped {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: not all processes could be stopped: %w", g.dir.Name(), context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// thaw lets the processes of the group go on, if it has the mark of the freeze; of any freeze if
// the name is empty. It reports whether they had stood still until now.
func (g *group) thaw(name string) (still bool, err error) {
	marked, err := g.marked()
	if err != nil || marked == "" || name != "" && marked != name {
		return false, err
	}
	asked, err := g.asked()
	if err == nil && asked {
		still, err = g.stopped()
	}
	err = errors.Join(err, g.set(false)) // whatever asking gave
	if removed := unix.Fremovexattr(int(g.dir.Fd()), mark); !errors.Is(removed, unix.ENODATA) && !errors.Is(removed, unix.ENOENT) {
		err = errors.Join(err, removed)
	}
	return still, err
}

// marked is the name of the freeze that the group is in; empty for none.
func (g *group) marked() (string, error) {
	value := make([]byte, 64)
	n, err := unix.Fgetxattr(int(g.dir.Fd()), mark, value)
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOENT) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read the mark of %s: %w", g.dir.Name(), err)
	}
	return string(value[:n]), nil
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

func (g *group) write(file, value string) error {
	f, err := g.open(file, unix.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func (g *group) open(file string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(g.dir.Fd()), file, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: g.dir.Name() + "/" + file, Err: err}
	}
	return os.NewFile(uintptr(fd), g.dir.Name()+"/"+file), nil
}
