package blockdev

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
)

// ringTries is how often a ring is asked again that is just being used: the kernel says nothing of its files then.
const ringTries = 100

// registered says whether a ring of io_uring has one of the devices: a program may close what it has registered there, or open it there alone
// (io_uring_register(2)). For what it was opened is not known.
func (s *search) registered(pid int, descriptor string) (bool, error) {
	if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, descriptor)); to != "anon_inode:[io_uring]" {
		return false, nil
	}
	told := false
	for range ringTries {
		r, err := s.ask(pid, descriptor)
		if err != nil || r.device || r.files || r.room == "0" {
			return r.device, allow(err)
		}
		told = told || r.room != ""
	}
	if !told {
		return false, fmt.Errorf("%w: the files of its io_uring", ErrHidden)
	}
	return false, nil
}

// A ring is what the kernel says of one.
type ring struct {
	room          string // for so many files; empty if it is not said
	files, device bool   // some are listed, and one is a device
}

// ask reads the list of a ring, of which nothing is kept, as io_uring/fdinfo.c of the kernel writes it.
func (s *search) ask(pid int, descriptor string) (r ring, err error) {
	info, err := os.Open(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, descriptor))
	if err != nil {
		return r, err
	}
	defer func() { _ = info.Close() }()
	for lines := bufio.NewReaderSize(info, 4*unix.PathMax); ; {
		line, err := lines.ReadSlice('\n')
		text := strings.TrimSpace(string(line))
		for errors.Is(err, bufio.ErrBufferFull) { // longer than any path that can be followed
			text, err = "", skip(lines)
		}
		if errors.Is(err, io.EOF) {
			return r, nil
		}
		if err != nil {
			return r, err
		}
		index, path, isEntry := strings.Cut(text, ": ")
		switch room, begins := strings.CutPrefix(text, "UserFiles:"); {
		case begins:
			r.room = strings.TrimSpace(room)
		case r.room == "", text == "":
		case !isEntry || strings.Trim(index, "0123456789") != "":
			return r, nil // the list has ended
		default:
			r.files = true
			if r.device, err = s.reaches(pid, mountinfo.Unescape(path)); r.device || err != nil {
				return r, err
			}
		}
	}
}

func skip(lines *bufio.Reader) error {
	_, err := lines.ReadSlice('\n')
	return err
}

// reaches says whether a path, as the kernel writes it of a file that a process has, is that of one of the devices. What is not found there, or
// gets no answer, is one by the kernel's name.
func (s *search) reaches(pid int, path string) (bool, error) {
	if strings.HasPrefix(path, "/") {
		at := fmt.Sprintf("/proc/%d/root%s", pid, path)
		device, err := s.leads("files at "+at, func() (file, error) { return stat(unix.AT_FDCWD, at) })
		if err == nil || errors.Is(err, fs.ErrPermission) {
			return device, allow(err)
		}
	}
	return s.named(path), nil
}
