package blockdev

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// searchTargets asks the configuration of the kernel's targets, which serve devices to other machines without holding them.
func (s *search) searchTargets() error {
	// Targets load it, and asking for it would too.
	if known, err := os.ReadFile("/proc/filesystems"); err != nil || !slices.Contains(strings.Fields(string(known)), "configfs") {
		return err
	}
	config, err := openConfig()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrHidden, err)
	}
	defer func() { _ = unix.Close(config) }()
	return s.targets(fmt.Sprintf("/proc/self/fd/%d", config), s.root())
}

// openConfig is the root of configfs, wherever it is mounted, in whatever namespace: it is one for all (fsmount(2)).
func openConfig() (fd int, err error) {
	filesystem, err := unix.Fsopen("configfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(filesystem) }()
	if err := unix.FsconfigCreate(filesystem); err != nil {
		return -1, err
	}
	return unix.Fsmount(filesystem, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
}

// targetFiles are the attributes that say what a target serves, and how to read them: the namespaces and controllers of nvmet, and
// the files of LIO. What LIO serves as iblock and pscsi it holds exclusively (linux/drivers/nvme/target/configfs.c,
// fd_show_configfs_dev_params of linux/drivers/target/target_core_file.c).
var targetFiles = map[string]func(content string) (path string){
	"nvmet/subsystems/*/namespaces/*/device_path": devicePath,
	"nvmet/subsystems/*/passthru/device_path":     devicePath,
	"target/core/fileio_*/*/info": func(content string) string {
		_, path, _ := strings.Cut(content, "  File: ")
		path, _, _ = strings.Cut(path, "  Size: ")
		return path
	},
}

// devicePath is empty where none was set, which the kernel prints so.
func devicePath(content string) string {
	if content = strings.TrimSuffix(content, "\n"); content == "(null)" {
		return ""
	}
	return content
}

func (s *search) targets(config, host string) error {
	for pattern, read := range targetFiles {
		files, err := filepath.Glob(filepath.Join(config, pattern))
		if err != nil {
			return err
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil && allow(err) == nil {
				continue // it has just been removed
			}
			name := strings.TrimPrefix(filepath.Dir(file), config+"/")
			if err != nil {
				return fmt.Errorf("%s: %w: %w", name, ErrHidden, err)
			}
			served, err := s.served(host, read(string(content)))
			if err != nil {
				return fmt.Errorf("%s: %w: %w", name, ErrHidden, err)
			}
			if served {
				s.users.Targets = append(s.users.Targets, name)
			}
		}
	}
	return nil
}

// root is that of the host, or of the container that a nested node is.
func (v View) root() string { return cmp.Or(v.Root, "/proc/1/root") }

// At is the number of the device at a path, also where this program does not have the path and the host has. One on a server that does
// not answer leads nowhere.
func (v View) At(path string) (Number, error) {
	number, err := At(path)
	if err == nil {
		return number, nil
	}
	f, hostErr := onHost("paths in "+filepath.Dir(path), v.root(), path)
	if hostErr == nil && f.kind == unix.S_IFBLK {
		return f.device, nil
	}
	return number, err
}

func onHost(server, host, path string) (file, error) {
	return servers.ask(server, func() (file, error) {
		root, err := unix.Open(host, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return file{}, err
		}
		defer func() { _ = unix.Close(root) }()
		return statBelow(root, path, unix.RESOLVE_IN_ROOT) // links are followed as the host does
	})
}

// served says whether a path leads to one of the devices for who configured a target: the host, or what has its paths. What it does
// not lead to cannot be known, but on a nested node, which does not see the host's. One without an answer is on a server: it is no
// device but by the kernel's name of that.
func (s *search) served(host, path string) (bool, error) {
	if path == "" {
		return false, nil
	}
	f, err := onHost("target "+path, host, path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && s.Nested:
		return false, nil
	case unanswered(err):
		return s.named(path), nil
	case err != nil:
		return false, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return s.is(f), nil
}
