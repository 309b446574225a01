package blockdev_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A silent server is of a filesystem of which each name is the same empty file, until it stops to answer.
type silent struct {
	at     string
	silent atomic.Bool
	// unanswered counts what it was asked since.
	unanswered atomic.Int64
	server     int
	served     sync.WaitGroup
}

// serveSilent mounts it for a user, who alone may enter it, until the test ends.
func serveSilent(t *testing.T, user int) *silent {
	t.Helper()
	testenv.NeedRoot(t)
	s := &silent{at: t.TempDir()}
	var err error
	if s.server, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		testenv.Missing(t, "FUSE: "+err.Error())
	}
	must.Succeed(t, unix.Mount("silent", s.at, "fuse", unix.MS_NOSUID, fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=0", s.server, user)))
	s.served.Go(s.serve)
	t.Cleanup(func() {
		must.Succeed(t, unix.Unmount(s.at, unix.MNT_FORCE|unix.MNT_DETACH))
		s.served.Wait()
		must.Succeed(t, unix.Close(s.server))
	})
	return s
}

// serve answers as linux/fuse.h says, until the filesystem is unmounted.
func (s *silent) serve() {
	const lookup, getattr, open, initialize = 1, 3, 14, 26
	questions := []uint32{lookup, getattr, open}        // what is not answered may be interrupted and forgotten besides
	attributes := func(mode uint32, id uint64) []byte { // of struct fuse_attr
		b := make([]byte, 88)
		binary.NativeEndian.PutUint64(b, id)
		binary.NativeEndian.PutUint32(b[60:], mode)
		binary.NativeEndian.PutUint32(b[64:], 1)
		return b
	}
	request := make([]byte, 1<<17)
	for {
		n, err := unix.Read(s.server, request)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil || n < 40 {
			return
		}
		if s.silent.Load() {
			if slices.Contains(questions, binary.NativeEndian.Uint32(request[4:])) {
				s.unanswered.Add(1)
			}
			continue
		}
		var answer []byte
		status := int32(0)
		switch kind, id := binary.NativeEndian.Uint32(request[4:]), binary.NativeEndian.Uint64(request[16:]); kind {
		case initialize:
			answer = make([]byte, 64)
			binary.NativeEndian.PutUint32(answer, 7)
			binary.NativeEndian.PutUint32(answer[4:], 31)
		case lookup: // valid for no time at all
			answer = append(make([]byte, 40), attributes(unix.S_IFREG|0o666, 2)...)
			binary.NativeEndian.PutUint64(answer, 2)
		case getattr:
			mode := uint32(unix.S_IFREG | 0o666)
			if id == 1 {
				mode = unix.S_IFDIR | 0o777
			}
			answer = append(make([]byte, 16), attributes(mode, id)...)
		case open:
			answer = make([]byte, 16)
		default:
			status = -int32(unix.ENOSYS)
		}
		head := make([]byte, 16)
		binary.NativeEndian.PutUint32(head, uint32(16+len(answer)))
		binary.NativeEndian.PutUint32(head[4:], uint32(status))
		copy(head[8:], request[8:16])
		_, _ = unix.Write(s.server, append(head, answer...)) // of a request that was given up
	}
}

// holdOpen has a process of a user have a file open, until the test ends: the server has to answer when it is closed.
func (s *silent) holdOpen(t *testing.T, user uint32) (pid int) {
	t.Helper()
	dir, err := os.OpenFile(s.at, unix.O_PATH|unix.O_DIRECTORY, 0)
	must.Succeed(t, err)
	defer dir.Close()
	// Not killed with the test's context: then it would close the file before the server answers again, and wait for ever.
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", "-c", `exec 4<>/proc/self/fd/3/file && exec 3<&- && echo ready && read line`)
	cmd.ExtraFiles = []*os.File{dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user}}
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	t.Cleanup(func() {
		s.silent.Store(false)
		must.Succeed(t, input.Close())
		_ = cmd.Wait() // it was told to end
	})
	line := make([]byte, len("ready\n"))
	if _, err := output.Read(line); err != nil || string(line) != "ready\n" {
		t.Fatalf("opening it: %q, %v", line, err)
	}
	return cmd.Process.Pid
}

// A filesystem whose server does not answer hangs each process that asks for a path in it.
func TestFilesystemWithoutAnswer(t *testing.T) {
	own := only(0)
	// find searches for the users of a disk, which a test may use first.
	find := func(t *testing.T, view blockdev.View, path string) (blockdev.Users, error) {
		t.Helper()
		number, err := blockdev.At(path)
		must.Succeed(t, err)
		facts, err := blockdev.Inspect(number)
		must.Succeed(t, err)
		return hang.Run(t.Context(), time.Minute, func() (blockdev.Users, error) { return view.FindUsers([]blockdev.Facts{facts}) }, nil)
	}
	t.Run("a file of it is open and mounted", func(t *testing.T) {
		disk, _ := attach(t, 1*mib, 0)
		s := serveSilent(t, 0)
		bind(t, filepath.Join(s.at, "file"), filepath.Join(t.TempDir(), "file"))
		holder := s.holdOpen(t, 0)
		s.silent.Store(true)
		if users, err := find(t, only(holder), disk); err != nil || len(users.Mounts)+len(users.Processes) > 0 {
			t.Errorf("users %+v, %v; want none", users, err)
		}
	})
	t.Run("a file of it is open for another user", func(t *testing.T) {
		disk, _ := attach(t, 1*mib, 0)
		s := serveSilent(t, 1000)
		holder := s.holdOpen(t, 1000)
		s.silent.Store(true)
		if users, err := find(t, only(holder), disk); err != nil || len(users.Processes) > 0 {
			t.Errorf("users %+v, %v; want none", users, err)
		}
	})
	for _, how := range []string{"hangs", "is gone"} {
		for name, node := range map[string]bool{"a file": false, "the disk": true} {
			t.Run(name+" is mounted in it, and it "+how, func(t *testing.T) {
				disk, _ := attach(t, 1*mib, 0)
				s := serveSilent(t, 0)
				file, mounts := filepath.Join(t.TempDir(), "file"), 0
				if node {
					var st unix.Stat_t
					must.Succeed(t, unix.Stat(disk, &st), unix.Mknod(file, unix.S_IFBLK|0o600, int(st.Rdev)))
					mounts = 2
				} else {
					must.Succeed(t, os.WriteFile(file, nil, 0o600))
				}
				for _, to := range []string{"one", "other"} {
					must.Succeed(t, unix.Mount(file, filepath.Join(s.at, to), "", unix.MS_BIND, ""))
				}
				times := 3
				if s.silent.Store(true); how == "is gone" {
					times = 1                                                       // a lookup that fails has the kernel unmount what is there (d_invalidate of linux/fs/dcache.c)
					must.ErrorIs(t, unix.Unmount(s.at, unix.MNT_FORCE), unix.EBUSY) // its connection has ended all the same
				}
				for range times {
					if users, err := find(t, own, disk); len(users.Mounts) != mounts || err != nil {
						t.Errorf("users %+v, %v; want %d", users, err, mounts)
					}
				}
				if asked := s.unanswered.Load(); asked > 1 {
					t.Errorf("the server was asked %d times, want once", asked)
				}
			})
		}
	}
}

// What LIO serves may be a file below a mount whose server is gone. Such a path is that of a device only by its name.
func TestTargetWithoutAnswer(t *testing.T) {
	disk, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	s := serveSilent(t, 0)
	s.silent.Store(true)
	config := t.TempDir()
	for target, name := range map[string]string{"target/core/fileio_0/a": "file", "target/core/fileio_0/b": filepath.Base(disk)} {
		dir := filepath.Join(config, target)
		must.Succeed(t, os.MkdirAll(dir, 0o700))
		content := "Status: ACTIVATED\n        TCM FILEIO ID: 0        File: " + filepath.Join(s.at, name) + "  Size: 1048576  Mode: O_DSYNC Async: 0\n"
		must.Succeed(t, os.WriteFile(filepath.Join(dir, "info"), []byte(content), 0o600))
	}
	users, err := hang.Run(t.Context(), time.Minute, func() (blockdev.Users, error) { return blockdev.FindTargets([]blockdev.Facts{facts}, config, "/") }, nil)
	if err != nil || len(users.Targets) != 1 || users.Targets[0] != "target/core/fileio_0/b" {
		t.Errorf("targets %q, %v; want the one with the disk's name", users.Targets, err)
	}
}

// bind mounts a file on a new one, until the test ends.
func bind(t *testing.T, from, to string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(to, nil, 0o600))
	must.Succeed(t, unix.Mount(from, to, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(to, unix.MNT_DETACH)) })
}

// What is refused may be anything. The error says by which device, and what to do.
func TestLoopDeviceThatRefuses(t *testing.T) {
	_, device := attach(t, 1*mib, 0)
	facts, err := blockdev.Inspect(device.Number())
	must.Succeed(t, err)
	image := filepath.Join(t.TempDir(), "image")
	must.Succeed(t, os.WriteFile(image, make([]byte, mib), 0o600))
	refusing := disk.New(t, image, t.TempDir())
	loop, err := loopfs.Attach(refusing.Path)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, loop.Close()) })
	for _, errno := range []unix.Errno{unix.EACCES, unix.EIO, unix.ESTALE} {
		refusing.FailWith(errno, disk.Stat)
		_, err = only(0).FindUsers([]blockdev.Facts{facts})
		must.ErrorIs(t, err, blockdev.ErrHidden)
		for _, part := range []string{refusing.Path, "losetup -d " + loop.Name()} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%v does not say %q", err, part)
			}
		}
	}
}
