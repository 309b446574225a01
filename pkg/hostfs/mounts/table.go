package mounts

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
)

// A Table is the mounts that this process sees.
type Table mountinfo.Table

// ReadTable reads the mount table as it is now.
func ReadTable() (Table, error) {
	mounts, err := mountinfo.Own()
	return Table(mounts), err
}

// ByID is the mount of that number, or nil.
func (t Table) ByID(id uint64) *mountinfo.Mount {
	return mountinfo.Table(t).ByID(id)
}

// Stack are the mounts at the place of a mount, from this one down.
func (t Table) Stack(id uint64) (stack Table) {
	m := t.ByID(id)
	for m != nil {
		stack = append(stack, m)
		below := t.ByID(uint64(m.Parent))
		if below == nil || below == m || below.Mountpoint != m.Mountpoint {
			break
		}
		m = below
	}
	return stack
}

// Inside are the mounts of directories that lie below the root of a mount, in the same
// filesystem, wherever they are mounted.
func (t Table) Inside(of *mountinfo.Mount) Table {
	var inside Table
	for _, m := range t {
		same := m.Major == of.Major && m.Minor == of.Minor && m.ID != of.ID
		// Of two that are cut, each may be inside the other.
		if same && (m.Root != of.Root || m.Cut && of.Cut) && strings.HasPrefix(m.Root+"/", strings.TrimSuffix(of.Root, "/")+"/") {
			inside = append(inside, m)
		}
	}
	return inside
}

// MountOf is the mount on which a directory lies.
func (t Table) MountOf(d *dir.Dir) (*mountinfo.Mount, error) {
	var st unix.Statx_t
	if err := unix.Statx(d.Fd(), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st); err != nil {
		return nil, &fs.PathError{Op: "stat", Path: d.String(), Err: err}
	}
	m := t.ByID(st.Mnt_id)
	if m == nil {
		return nil, fmt.Errorf("find the mount of %s: it is in no mount of this namespace", d)
	}
	return m, nil
}

// IsShared reports whether what is mounted on a mount appears in other namespaces too.
func IsShared(m *mountinfo.Mount) bool { return strings.Contains(m.Optional, "shared:") }

// A Watch waits for changes of the mount table.
type Watch struct{ fd, wake int }

// NewWatch notes the table as it is now: Wait reports what changes from here on.
func NewWatch() (*Watch, error) {
	// Not by os.Open: the runtime's poller would take the events that are meant for Wait.
	fd, err := unix.Open(mountinfo.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: mountinfo.Path, Err: err}
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("eventfd", err), unix.Close(fd))
	}
	return &Watch{fd: fd, wake: wake}, nil
}

// Wait returns when the mount table has changed since the last call, after d at the latest, and
// with the context's error when it ends.
func (w *Watch) Wait(ctx context.Context, d time.Duration) error {
	woken := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(woken)
		_, _ = unix.Write(w.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
	defer func() {
		if !stop() {
			<-woken
		}
	}()
	fds := []unix.PollFd{{Fd: int32(w.fd), Events: unix.POLLPRI}, {Fd: int32(w.wake), Events: unix.POLLIN}}
	_, err := unix.Poll(fds, int(d.Milliseconds()))
	if err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait for a change of the mount table: %w", err)
	}
	return ctx.Err()
}

// Close ends the watch.
func (w *Watch) Close() error { return errors.Join(unix.Close(w.fd), unix.Close(w.wake)) }
