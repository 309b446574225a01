package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// ringTries is how often a ring is asked again that is just being used: the kernel says nothing of its files then.
const ringTries = 100

// registered says whether a ring of io_uring has one of the devices: a program may close what it has registered there, or open it there alone
// (io_uring_register(2)). For what it was opened is not known.
func (s *search) registered(pid int, descriptor string) (bool, error) {
	if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, descriptor)); to != "anon_inode:[io_uring]" {
		return false, nil
	}
	var files []string
	told := false
	for tries := 0; len(files) == 0 && tries < ringTries; tries++ {
		content, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, descriptor))
		if err != nil {
			return false, allow(err)
		}
		_, list, found := strings.Cut(string(content), "UserFiles:")
		room, list, _ := strings.Cut(list, "\n")
		if found && strings.TrimSpace(room) == "0" {
			return false, nil
		}
		files, told = ringFiles(list), told || found
	}
	if !told {
		return false, fmt.Errorf("%w: the files of its io_uring", ErrHidden)
	}
	for _, path := range files {
		if device, err := s.reaches(pid, path); device || err != nil {
			return device, err
		}
	}
	return false, nil
}

// ringFiles are the paths of the files that a ring has, or only their names, as io_uring/fdinfo.c of the kernel writes them.
func ringFiles(list string) (paths []string) {
	for line := range strings.Lines(list) {
		index, path, isEntry := strings.Cut(strings.TrimSpace(line), ": ")
		if !isEntry || strings.Trim(index, "0123456789") != "" {
			break
		}
		if path != "<none>" {
			paths = append(paths, unescape(path))
		}
	}
	return paths
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
