package privilege

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// Users of volumes, whom the driver knows nothing of.
const user, otherUser = 1000, 1001

// A work is what the driver does for one volume, in steps.
type work struct {
	name  string
	steps []step
	// without names the steps that fail without a capability.
	without map[privilege.Capability]string

	block, published, labels bool
	// only says where there is something to do; nil for everywhere.
	only func(p place) bool
}

type step struct {
	name string
	do   func(h *host, v drivertest.Volume) error
}

var (
	serve     = step{"serve", (*host).serving}
	create    = step{"create", (*host).create}
	publish   = step{"publish", (*host).publish}
	measure   = step{"measure", (*host).measure}
	expand    = step{"expand", (*host).expand}
	unpublish = step{"unpublish", (*host).unpublish}
	remove    = step{"delete", (*host).remove}
	erase     = step{"erase", (*host).erased}
	see       = step{"see it on the host", seen}
)

var works = []work{{
	name:      "a directory",
	steps:     []step{serve, create, publish, see, measure, expand, unpublish, remove, erase},
	without:   map[privilege.Capability]string{privilege.SysAdmin: "publish"},
	published: true,
}, {
	name: "a device",
	steps: []step{serve, create, publish, see, {"keep the space", discardsRefused}, measure, expand,
		{"see that it has grown", grown}, unpublish, remove, erase},
	without:   map[privilege.Capability]string{privilege.SysAdmin: "publish"},
	published: true,
	block:     true,
}, {
	name:    "a size that is enforced",
	steps:   []step{serve, create, {"write too much", refused}, remove, erase},
	without: map[privilege.Capability]string{privilege.SysAdmin: "serve"},
	only:    func(p place) bool { return p.enforced },
}, {
	name:  "a directory that its user has closed",
	steps: []step{serve, create, {"close", closed}, publish, see, measure, unpublish, remove, erase},
	without: map[privilege.Capability]string{
		privilege.SysAdmin:    "publish",
		privilege.DACOverride: "publish",
	},
	published: true,
}, {
	name:    "closed directories in it",
	steps:   []step{serve, create, {"close", closedInside}, remove, erase},
	without: map[privilege.Capability]string{privilege.DACOverride: "erase"},
}, {
	name:    "a sticky directory of two users in it",
	steps:   []step{serve, create, {"fill", sticky}, remove, erase},
	without: map[privilege.Capability]string{privilege.Fowner: "erase"},
}, {
	name:    "a read-only subvolume of a user in it",
	steps:   []step{serve, create, {"fill", readOnlySubvolume}, remove, erase},
	without: map[privilege.Capability]string{privilege.Fowner: "erase"},
	only:    func(p place) bool { return p.name == "btrfs" },
}, {
	name:    "an immutable file in it",
	steps:   []step{serve, create, {"fill", immutableFile}, remove, erase},
	without: map[privilege.Capability]string{privilege.LinuxImmutable: "erase"},
}, {
	name:    "an immutable directory",
	steps:   []step{serve, create, {"protect", immutable}, remove, erase},
	without: map[privilege.Capability]string{privilege.LinuxImmutable: "delete"},
}, {
	name:  "a directory that came with another label",
	steps: []step{serve, {"bring", migrated}, publish, see, {"check the label", labelled}, unpublish, remove, erase},
	without: map[privilege.Capability]string{
		privilege.SysAdmin: "publish",
		privilege.Fowner:   "publish",
	},
	published: true,
	labels:    true,
	only:      func(p place) bool { return p.selinux },
}}

// volume is the one that the work is done for.
func (w work) volume() drivertest.Volume {
	return drivertest.Volume{ID: strings.ReplaceAll(w.name, " ", "-"), Block: w.block, Bytes: 8 * mib}
}

// do does a work, and reports the step that failed, "" for none.
func (h *host) do(w work) (failed string, err error) {
	v := w.volume()
	for _, s := range w.steps {
		if err := s.do(h, v); err != nil {
			return s.name, err
		}
	}
	return "", nil
}

// inPool is a path in the volume, as the host has it.
func (h *host) inPool(v drivertest.Volume, elements ...string) string {
	return filepath.Join(append([]string{h.pool, v.ID}, elements...)...)
}

// seen writes where kubelet would, and finds it in the pool.
func seen(h *host, v drivertest.Volume) error {
	target := h.target(v)
	mounts, err := mountns.Below(target)
	if err != nil || len(mounts) != 1 {
		return fmt.Errorf("mounts at %s: %q, %v", target, mounts, err)
	}
	content := bytes.Repeat([]byte{42}, 4096)
	if !v.Block {
		if err := os.WriteFile(filepath.Join(target, "file"), content, 0o600); err != nil {
			return err
		}
		_, err := os.Stat(h.inPool(v, "file"))
		return err
	}
	disk, err := os.OpenFile(target, os.O_RDWR|syscall.O_SYNC, 0)
	if err != nil {
		return err
	}
	_, err = disk.Write(content)
	if err := errors.Join(err, disk.Close()); err != nil {
		return err
	}
	file, err := os.Open(h.inPool(v, "disk.img"))
	if err != nil {
		return err
	}
	defer file.Close()
	found := make([]byte, len(content))
	if _, err := io.ReadFull(file, found); err != nil || !bytes.Equal(found, content) {
		return fmt.Errorf("what was written to the device is not in its file: %v", err)
	}
	return nil
}

func grown(h *host, v drivertest.Volume) error {
	disk, err := os.Open(h.target(v))
	if err != nil {
		return err
	}
	defer disk.Close()
	if size, err := disk.Seek(0, io.SeekEnd); err != nil || size != 2*v.Bytes {
		return fmt.Errorf("the device has %d bytes, %v; want %d", size, err, 2*v.Bytes)
	}
	return nil
}

// discardsRefused checks what the driver writes to sysfs.
func discardsRefused(h *host, _ drivertest.Volume) error {
	devices, err := loopfs.Devices(h.pool)
	if err != nil || len(devices) != 1 {
		return fmt.Errorf("devices of the pool: %q, %v", devices, err)
	}
	limit, err := os.ReadFile("/sys/block/" + filepath.Base(devices[0]) + "/queue/discard_max_bytes")
	if err == nil && string(limit) != "0\n" {
		err = fmt.Errorf("discards of %s bytes are let through", bytes.TrimSpace(limit))
	}
	return err
}

// refused writes more than the volume may hold, as a user without privileges.
func refused(h *host, v drivertest.Volume) error {
	file, err := os.Create(h.inPool(v, "file"))
	if err != nil {
		return err
	}
	defer file.Close()
	cmd := exec.CommandContext(h.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), writerVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	cmd.Stdout = file
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != refusal {
		return fmt.Errorf("writing 32 MiB to a volume of 8 MiB: %v, want a refusal", err)
	}
	info, err := file.Stat()
	if err == nil && (info.Size() == 0 || info.Size() > v.Bytes) {
		err = fmt.Errorf("a volume of 8 MiB took %d bytes", info.Size())
	}
	return err
}

// writerVariable makes this program a writer, which ends with the status refusal if it
// is not let write all.
const (
	writerVariable = "PRIVILEGE_TEST_WRITER"
	refusal        = 7
)

func writeTooMuch() int {
	for range 32 {
		if _, err := os.Stdout.Write(make([]byte, mib)); err != nil {
			return refusal
		}
	}
	return 0
}

// closed has the volume be its user's, and closed even to them.
func closed(h *host, v drivertest.Volume) error {
	return errors.Join(os.Chown(h.inPool(v), user, user), os.Chmod(h.inPool(v), 0))
}

// closedInside leaves the volume itself open.
func closedInside(h *host, v drivertest.Volume) error {
	deep := h.inPool(v, "a", "b", "c")
	if err := os.MkdirAll(deep, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(deep, "file"), nil, 0); err != nil {
		return err
	}
	var errs []error
	for _, path := range []string{"a/b/c/file", "a/b/c", "a/b", "a"} {
		errs = append(errs, os.Chown(h.inPool(v, path), user, user), os.Chmod(h.inPool(v, path), 0))
	}
	return errors.Join(errs...)
}

func sticky(h *host, v drivertest.Volume) error {
	common := h.inPool(v, "tmp")
	return errors.Join(os.Mkdir(common, 0o777), os.WriteFile(common+"/file", nil, 0o600), os.Mkdir(common+"/directory", 0o777),
		os.Chown(common+"/file", otherUser, otherUser), os.Chown(common+"/directory", otherUser, otherUser),
		os.Chown(common, user, user), os.Chmod(common, 0o777|os.ModeSticky))
}

func immutableFile(h *host, v drivertest.Volume) error {
	path := h.inPool(v, "file")
	h.Cleanup(func() {
		for _, left := range h.trash(v) {
			h.Must(chattr(h, "-i", filepath.Join(left, "file")))
		}
	})
	return errors.Join(os.WriteFile(path, nil, 0o600), chattr(h, "+i", path))
}

func immutable(h *host, v drivertest.Volume) error {
	path := h.inPool(v)
	h.Cleanup(func() {
		if _, err := os.Stat(path); err == nil {
			h.Must(chattr(h, "-i", path))
		}
	})
	return chattr(h, "+i", path)
}

// chattr is not ended with the test: it cleans up.
func chattr(h *host, flag, path string) error {
	output, err := exec.CommandContext(context.WithoutCancel(h.Context()), "chattr", flag, path).CombinedOutput()
	if err != nil {
		return fmt.Errorf("chattr %s %s: %w: %s", flag, path, err, output)
	}
	return nil
}

func readOnlySubvolume(h *host, v drivertest.Volume) error {
	path := h.inPool(v, "subvolume")
	// Not ended with the test: it cleans up.
	ctx := context.WithoutCancel(h.Context())
	run := func(args ...string) error {
		output, err := exec.CommandContext(ctx, "btrfs", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("btrfs %q: %w: %s", args, err, output)
		}
		return nil
	}
	if err := run("subvolume", "create", path); err != nil {
		return err
	}
	// Where it stays, no other program could remove it.
	h.Cleanup(func() {
		for _, left := range h.trash(v) {
			h.Must(run("property", "set", left+"/subvolume", "ro", "false"))
		}
	})
	if err := errors.Join(os.WriteFile(path+"/file", nil, 0o600), os.Chmod(path, 0o777), os.Chown(path, user, user)); err != nil {
		return err
	}
	return run("property", "set", path, "ro", "true")
}

// Labels that the policy of test/cmd/kernel and that of distributions have.
const (
	variables = "system_u:object_r:var_t:s0"
	forPods   = "system_u:object_r:container_file_t:s0"
	attribute = "security.selinux"
)

// migrated puts a directory into the pool, as an administrator would.
func migrated(h *host, v drivertest.Volume) error {
	return errors.Join(os.Mkdir(h.inPool(v), 0o755), unix.Lsetxattr(h.inPool(v), attribute, []byte(variables), 0),
		os.Chown(h.inPool(v), user, user), os.Chmod(h.inPool(v), 0o777))
}

func labelled(h *host, v drivertest.Volume) error {
	buffer := make([]byte, 256)
	n, err := unix.Lgetxattr(h.inPool(v), attribute, buffer)
	if got := strings.TrimRight(string(buffer[:max(n, 0)]), "\x00"); err == nil && got != forPods {
		err = fmt.Errorf("the label is %s, want %s", got, forPods)
	}
	return err
}
