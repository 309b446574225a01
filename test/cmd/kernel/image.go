package main

import (
	"bufio"
	"context"
	_ "embed" // the policy
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/test/cmd/kernel/cpio"
	"kubevirt.io/hostpath-provisioner/test/cmd/kernel/guest"
)

// tools are the programs of this machine that the guest has too, by Debian's
// package, besides what busybox is.
var tools = map[string][]string{
	"attr":           {"getfattr", "setfattr"},
	"bcache-tools":   {"make-bcache"},
	"btrfs-progs":    {"btrfs", "mkfs.btrfs"},
	"busybox-static": {"busybox"},
	"coreutils":      {"chcon", "ls", "runcon", "stat"},
	"dash":           {"dash"},
	"dmsetup":        {"dmsetup"},
	"e2fsprogs":      {"chattr", "e2fsck", "lsattr", "mkfs.ext4", "resize2fs", "tune2fs"},
	"mdadm":          {"mdadm"},
	"mount":          {"losetup", "mount", "umount"},
	"util-linux":     {"blkid", "blockdev", "fallocate", "findmnt", "fsck", "lsblk", "mountpoint", "nsenter", "unshare", "wipefs"},
	"xfsprogs":       {"mkfs.xfs", "xfs_growfs", "xfs_io", "xfs_quota", "xfs_repair"},
}

// hostTools are what only this machine needs.
var hostTools = map[string][]string{
	"kmod":            {"depmod", "modprobe"},
	"qemu-system-x86": {"qemu-system-x86_64"},
	"secilc":          {"secilc"},
	"xz-utils":        {"xz"},
}

// checkTools reports at once which packages have to be installed.
func checkTools() error {
	var missing []string
	for _, packages := range []map[string][]string{tools, hostTools} {
		for name, programs := range packages {
			if slices.ContainsFunc(programs, func(p string) bool { return !path.IsAbs(lookUp(p)) }) {
				missing = append(missing, name)
			}
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Sort(missing)
	return fmt.Errorf("missing programs; install the Debian packages %s", strings.Join(missing, " "))
}

// makeImage writes the guest's root filesystem for the options.
func makeImage(ctx context.Context, o options, modules string) (*os.File, error) {
	file, err := nameless()
	if err != nil {
		return nil, err
	}
	buffer := bufio.NewWriterSize(file, 1<<20)
	i := image{cpio.NewWriter(buffer)}
	for _, part := range []func() error{
		func() error { return i.base(modules) },
		func() error { return i.programs(ctx, o) },
		func() error { return i.selinux(ctx) },
		func() error { return i.plan(o) },
		func() error { return i.additions(o.adds) },
		i.Close,
		buffer.Flush,
	} {
		if err := part(); err != nil {
			return nil, errors.Join(fmt.Errorf("make the guest's root filesystem: %w", err), file.Close())
		}
	}
	return file, nil
}

// An image is a root filesystem in the making.
type image struct{ *cpio.Writer }

// base writes what each guest has.
func (i image) base(modules string) error {
	for _, dir := range []string{"/dev", "/mnt", "/proc", "/root", "/sys", "/var/lib", "/work"} {
		if err := i.Directory(dir); err != nil {
			return err
		}
	}
	texts := map[string]string{
		"/etc/group":  "root:x:0:\nnogroup:x:65534:\n",
		"/etc/hosts":  "127.0.0.1 localhost\n::1 localhost\n",
		"/etc/passwd": "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n",
		// Container runtimes want to copy it.
		"/etc/resolv.conf": "",
	}
	for name, text := range texts {
		if err := i.Text(name, text); err != nil {
			return err
		}
	}
	return errors.Join(
		// What init has before it mounts /dev.
		i.CharDevice("/dev/console", 5, 1),
		i.CharDevice("/dev/null", 1, 3),
		i.Symlink("/etc/mtab", "/proc/self/mounts"),
		i.Copy("/lib/modules", modules),
	)
}

// programs writes the first process, the tools and the programs to run, and the
// shared libraries of all of them.
func (i image) programs(ctx context.Context, o options) error {
	// This very file, even if it has no name any more.
	places := map[string]string{guest.Program: "/proc/self/exe"}
	for _, programs := range tools {
		for _, name := range programs {
			places["/usr/bin/"+name] = lookUp(name)
		}
	}
	for _, r := range o.runs {
		if r.file != "" {
			places[r.Args[0]] = r.file
		}
	}
	var files []string
	for place, file := range places {
		if err := i.Copy(place, file); err != nil {
			return err
		}
		files = append(files, file)
	}
	for _, a := range o.adds {
		if executable(a.file) == nil {
			files = append(files, a.file)
		}
	}
	libraries, err := sharedLibraries(ctx, files)
	if err != nil {
		return err
	}
	for _, library := range libraries {
		if err := i.Copy(library, library); err != nil {
			return err
		}
	}
	return i.applets(ctx)
}

// applets writes links to busybox for all that it is. They are last on the path.
func (i image) applets(ctx context.Context) error {
	names, err := output(ctx, "busybox", "--list")
	if err != nil {
		return err
	}
	for name := range strings.Lines(names) {
		// Its shell prefers its own applets to programs of the same name.
		target := "/usr/bin/busybox"
		switch name = strings.TrimSpace(name); name {
		case "busybox":
			continue
		case "sh":
			target = "/usr/bin/dash"
		}
		if err := i.Symlink("/bin/"+name, target); err != nil {
			return err
		}
	}
	// Where the kernel searches for it.
	return i.Symlink("/sbin/modprobe", "/usr/bin/busybox")
}

// sharedLibraries returns the libraries of all these programs; static ones have
// none.
func sharedLibraries(ctx context.Context, files []string) ([]string, error) {
	// It fails if one of them is static, but lists the others.
	text, err := output(ctx, "ldd", files...)
	if ctx.Err() != nil {
		return nil, err
	}
	var found []string
	for line := range strings.Lines(text) {
		if strings.Contains(line, "not found") {
			return nil, fmt.Errorf("a shared library is missing: %s", strings.TrimSpace(line))
		}
		// "	libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)", or without the
		// arrow; programs' own lines are not indented.
		if !strings.HasPrefix(line, "\t") {
			continue
		}
		for _, word := range strings.Fields(line) {
			if path.IsAbs(word) && !slices.Contains(found, word) {
				found = append(found, word)
			}
		}
	}
	return found, nil
}

//go:embed policy.cil
var policy string

// selinux writes the policy, and what libselinux and container tools read of one.
func (i image) selinux(ctx context.Context) error {
	compiled, err := compilePolicy(ctx)
	if err != nil {
		return err
	}
	defer compiled.Close()
	info, err := compiled.Stat()
	if err != nil {
		return err
	}
	return errors.Join(
		i.File(guest.Policy, 0o644, info.Size(), compiled),
		i.Text("/etc/selinux/config", "SELINUX=enforcing\nSELINUXTYPE=hostpath\n"),
		// The labels that a container gets.
		i.Text("/etc/selinux/hostpath/contexts/lxc_contexts",
			"process = \"system_u:system_r:container_t:s0\"\nfile = \"system_u:object_r:container_file_t:s0\"\n"),
	)
}

func compilePolicy(ctx context.Context) (*os.File, error) {
	source, err := nameless()
	if err != nil {
		return nil, err
	}
	defer source.Close()
	if _, err := io.WriteString(source, policy+categories()); err != nil {
		return nil, err
	}
	compiled, err := nameless()
	if err != nil {
		return nil, err
	}
	cmd := command(ctx, "secilc", "--filecontext=/dev/null", "--policyvers=33")
	cmd.Args = append(cmd.Args, "--output="+inherit(cmd, compiled), inherit(cmd, source))
	if _, err := outputOf(cmd); err != nil {
		return nil, errors.Join(err, compiled.Close())
	}
	return compiled, nil
}

// categories declares c0 to c1023.
func categories() string {
	var declared, ordered strings.Builder
	for n := range 1024 {
		fmt.Fprintf(&declared, "(category c%d)\n", n)
		fmt.Fprintf(&ordered, " c%d", n)
	}
	return declared.String() + "(categoryorder (" + ordered.String() + "))\n(sensitivitycategory s0 (range c0 c1023))\n"
}

func (i image) plan(o options) error {
	plan := guest.Plan{SELinux: o.selinux, Containers: o.containers, Archive: o.out != ""}
	for _, r := range o.runs {
		r.Env = slices.Concat(environment(o), r.Env)
		plan.Runs = append(plan.Runs, r.Run)
	}
	text, err := json.Marshal(plan)
	if err != nil {
		return err
	}
	return i.Text(guest.PlanFile, string(text))
}

// environment is what all programs find, so that they know where they are.
func environment(o options) []string {
	env := []string{
		"HOME=/root",
		"TMPDIR=/tmp",
		"HOSTPATH_KERNEL=1",
		"HOSTPATH_KERNEL_XFS=" + guest.XFS,
		"HOSTPATH_KERNEL_EXT4=" + guest.Ext4,
	}
	if o.selinux {
		env = append(env, "HOSTPATH_KERNEL_SELINUX=1")
	}
	if o.containers {
		env = append(env, "HOSTPATH_KERNEL_CONTAINERS=1")
	}
	return append(env, o.env...)
}

func (i image) additions(adds []addition) error {
	for _, a := range adds {
		if err := i.Copy(a.path, a.file); err != nil {
			return err
		}
	}
	return nil
}
