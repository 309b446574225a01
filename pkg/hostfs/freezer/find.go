package freezer

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// A Pod is the uid of one, as kubelet has it in the names of directories. Only ParsePod and PodAt
// make one.
type Pod struct{ uid string }

// uids are those of the API, and of static pods, which are hashes.
var uids = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$|^[0-9a-f]{32}$`)

// ParsePod takes the uid of a pod.
func ParsePod(uid string) (Pod, error) {
	if !uids.MatchString(uid) {
		return Pod{}, fmt.Errorf("%q is no uid of a pod", uid)
	}
	return Pod{uid}, nil
}

// PodAt is the pod in whose directory of kubelet a path of the mount table lies:
// .../pods/<uid>/volumes/..., volume-subpaths or volumeDevices.
func PodAt(path string) (Pod, bool) {
	elements := strings.Split(path, "/")
	for i := 0; i+2 < len(elements); i++ {
		if elements[i] != "pods" || !strings.HasPrefix(elements[i+2], "volume") {
			continue
		}
		if pod, err := ParsePod(elements[i+1]); err == nil {
			return pod, true
		}
	}
	return Pod{}, false
}

// String is the uid.
func (p Pod) String() string { return p.uid }

// names reports whether the name of a control group is the pod's, with either of kubelet's
// cgroup drivers: "pod<uid>" with cgroupfs, and "kubepods-burstable-pod<uid>.slice" with systemd,
// where a hyphen in the uid is an underscore.
func (p Pod) names(group string) bool {
	slice, isSlice := strings.CutSuffix(group, ".slice")
	if !isSlice {
		return group == "pod"+p.uid
	}
	return strings.HasSuffix(slice, "-pod"+strings.ReplaceAll(p.uid, "-", "_"))
}

// maxDepth is how deep below the root pods' groups are searched: kubelet's --cgroup-root may add
// levels to kubepods/<class>/pod<uid>.
const maxDepth = 6

// open opens the hierarchy that freezes, of the node's control groups at path: cgroup v2, alone or
// beside others in unified, or the freezer of cgroup v1, where kubelet's groups are then.
func open(path string) (*dir.Dir, error) {
	for _, at := range []string{path, path + "/freezer", path + "/unified"} {
		d, err := dir.Open(at)
		if err != nil {
			continue
		}
		// The root of a hierarchy cannot be frozen, and cgroup.freeze is in groups below it alone.
		for _, has := range []string{"cgroup.controllers", "cgroup.clone_children"} {
			if is, err := d.Exists(has); err == nil && is {
				return d, nil
			}
		}
		_ = d.Close() // opened for reading
	}
	return nil, fmt.Errorf("%w: %s has no control groups that can be frozen: mount the host's /sys/fs/cgroup there", ErrUnavailable, path)
}

// each calls do with all groups of pods of the node, until that fails. It takes over none of them.
func each(root *dir.Dir, depth int, do func(name string, d *dir.Dir) error) error {
	for entry, err := range root.Entries() {
		if isGone(err) {
			return nil // removed meanwhile
		}
		if err != nil {
			return err
		}
		if !entry.IsDir {
			continue
		}
		d, err := root.Open(entry.Name)
		if isGone(err) {
			continue
		}
		if err != nil {
			return err
		}
		switch {
		case isPod(entry.Name):
			err = do(entry.Name, d)
		case depth > 1:
			err = each(d, depth-1, do)
		}
		if _ = d.Close(); err != nil {
			return err
		}
	}
	return nil
}

var podGroups = regexp.MustCompile(`^pod[0-9a-f-]{32,36}$|-pod[0-9a-f_]{32,36}\.slice$`)

func isPod(name string) bool { return podGroups.MatchString(name) }

// find opens the groups of pods. One that vanishes meanwhile has no processes any more.
func find(root *dir.Dir, pods []Pod) (groups []*group, err error) {
	defer func() {
		if err != nil {
			closeAll(groups)
			groups = nil
		}
	}()
	found := make(map[Pod]bool)
	err = each(root, maxDepth, func(name string, d *dir.Dir) error {
		for _, pod := range pods {
			if !pod.names(name) {
				continue
			}
			found[pod] = true
			g, err := reopen(d)
			if err == nil {
				groups = append(groups, g)
				err = g.spares(os.Getpid())
			}
			if ignoreGone(err) != nil {
				return err
			}
		}
		return nil
	})
	for _, pod := range pods {
		if err == nil && !found[pod] {
			err = fmt.Errorf("%w: pod %s has no control group in %s", ErrUnavailable, pod, root)
		}
	}
	return groups, err
}

// reopen makes a group of a directory, which is closed by others.
func reopen(d *dir.Dir) (*group, error) {
	fd, err := unix.Open(d.HandlePath(), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), d.String())
	g, err := adopt(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return g, nil
}

func closeAll(groups []*group) {
	for _, g := range groups {
		g.close()
	}
}

// spares returns an error if a process, as this one sees its number, is in the group or below.
// Processes of other namespaces have the number 0. Of threaded groups below, that group has the processes which is the first above
// them that is not threaded (cgroup v2, cgroup.type): their own cgroup.procs cannot be read. One that is threaded itself may have a
// part of the threads of a process, and is not frozen.
func (g *group) spares(pid int) error {
	d, err := dir.Open(dir.HandlePath(int(g.dir.Fd())))
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }() // opened for reading
	if err = spares(d, pid); errors.Is(err, unix.EOPNOTSUPP) {
		err = fmt.Errorf("%w: the control group of the pod is threaded: %w", ErrUnavailable, err)
	}
	return err
}

func spares(d *dir.Dir, pid int) error {
	f, err := os.Open(d.HandlePath() + "/cgroup.procs")
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // opened for reading
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if lines.Text() == strconv.Itoa(pid) {
			return fmt.Errorf("%w: the watchdog is in the pod itself", ErrUnavailable)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	for entry, err := range d.Entries() {
		if err != nil {
			return err
		}
		if !entry.IsDir {
			continue
		}
		below, err := d.Open(entry.Name)
		if err == nil {
			err = spares(below, pid)
			_ = below.Close() // opened for reading
		}
		if ignoreGone(err) != nil && !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return nil
}
