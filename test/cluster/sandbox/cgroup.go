package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// needed are the controllers that every kubelet needs. It wants others too where the kernel
// has them.
var needed = []string{"cpu", "cpuset", "memory", "pids"}

// cgroupRoot is where the control groups are mounted.
const cgroupRoot = "/sys/fs/cgroup"

// A cgroup is the path of a control group: in the only hierarchy of version 2, or in each
// hierarchy of version 1 (cgroups(7)).
type cgroup string

// Unified says that the machine has control groups of version 2.
func Unified() bool {
	_, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers"))
	return err == nil
}

// CheckCgroups fails if the machine does not have the control groups that a cluster
// needs. It changes nothing.
func CheckCgroups() error {
	_, err := hierarchies()
	return err
}

// hierarchies are the mount points of the control groups.
func hierarchies() ([]string, error) {
	if Unified() {
		available, err := words(filepath.Join(cgroupRoot, "cgroup.controllers"))
		if err != nil {
			return nil, err
		}
		return []string{cgroupRoot}, need(available, "version 2")
	}
	found, err := filepath.Glob(cgroupRoot + "/*/cgroup.procs")
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no control groups are mounted at %s", cgroupRoot)
	}
	var dirs, available []string
	for _, file := range found {
		dir := filepath.Dir(file)
		dirs = append(dirs, dir)
		available = append(available, filepath.Base(dir))
		// cpu,cpuacct may be one hierarchy, which each of its names leads to.
		available = append(available, strings.Split(filepath.Base(dir), ",")...)
	}
	return dirs, need(available, "version 1")
}

func need(available []string, version string) error {
	for _, controller := range needed {
		if !slices.Contains(available, controller) {
			return fmt.Errorf("the control groups of %s at %s have no controller %s", version, cgroupRoot, controller)
		}
	}
	return nil
}

func words(file string) ([]string, error) {
	text, err := os.ReadFile(file)
	return strings.Fields(string(text)), err
}

func (c cgroup) make() error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		group := dir + string(c)
		if Unified() {
			if err := delegate(filepath.Dir(group)); err != nil {
				return err
			}
		}
		if err := os.Mkdir(group, 0o755); err != nil {
			return err
		}
		if err := inheritCpuset(filepath.Dir(group), group); err != nil {
			return err
		}
	}
	return nil
}

// delegate gives the groups below one all its controllers, which version 2 does not do by
// itself. Only the root may have processes of its own then.
func delegate(group string) error {
	available, err := words(filepath.Join(group, "cgroup.controllers"))
	if err != nil {
		return err
	}
	file := filepath.Join(group, "cgroup.subtree_control")
	enabled, err := words(file)
	if err != nil {
		return err
	}
	for _, controller := range available {
		if slices.Contains(enabled, controller) {
			continue
		}
		if err := os.WriteFile(file, []byte("+"+controller), 0); err != nil {
			return fmt.Errorf("enable the controller %s: %w", controller, err)
		}
	}
	return nil
}

// inheritCpuset gives a group the processors of the one above, without which no
// process can enter it. Version 2 and other hierarchies need nothing.
func inheritCpuset(parent, child string) error {
	if Unified() {
		return nil
	}
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(parent, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(child, name), value, 0)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// remove removes the group and all below it. Its last processes may still be exiting.
func (c cgroup) remove() error {
	dirs, err := hierarchies()
	if err != nil {
		return err
	}
	var problems []error
	for _, dir := range dirs {
		problems = append(problems, within(10*time.Second, func() error { return removeGroups(dir + string(c)) }))
	}
	return errors.Join(problems...)
}

// removeGroups removes from the leaves up. The files of a group go with it.
func removeGroups(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if !entry.IsDir() {
			continue
		}
		if err := removeGroups(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	if err := syscall.Rmdir(dir); err != nil && !errors.Is(err, syscall.ENOENT) {
		return fmt.Errorf("remove the control group %s: %w", dir, err)
	}
	return nil
}
