package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const mib = 1 << 20

func TestMain(m *testing.M) {
	if encoded := os.Getenv(migrationVariable); encoded != "" {
		if err := move(encoded); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(m)
}

// guestDisks are the filesystems of the virtual machine, which have project quotas.
func guestDisks(t *testing.T) map[string]string {
	t.Helper()
	if !testenv.Guest() {
		t.Skip("make test-kernel has this: it needs quotas of XFS and ext4, and SELinux")
	}
	return map[string]string{"xfs": "HOSTPATH_KERNEL_XFS", "ext4": "HOSTPATH_KERNEL_EXT4"}
}

// serve serves a directory as the program does, until the test ends.
func serve(t *testing.T, path string) *pool.Set {
	t.Helper()
	c, err := parseQuietly(t, map[string]string{"NODE_NAME": "node-a", "PV_DIR": path})
	must.Succeed(t, err)
	set, closePool, err := openPool(c, logr.Discard())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, closePool()) })
	must.Succeed(t, set.Wait(t.Context()))
	return set
}

// create makes a volume of 1 MiB as the program does: nothing finishes or undoes it meanwhile.
func create(ctx context.Context, set *pool.Set, name string) (v pool.Volume, err error) {
	err = locked(set, name, func(id volume.ID) error {
		v, err = set.Create(ctx, pool.Request{ID: id, Range: volume.Range{Required: mib}})
		return err
	})
	return v, err
}

func locked(set *pool.Set, name string, do func(id volume.ID) error) error {
	id, err := volume.ParseID(name)
	if err != nil {
		return err
	}
	unlock, err := set.Lock(id)
	if err != nil {
		return err
	}
	defer unlock()
	return do(id)
}

// A container may use a new directory without anybody's chcon: with the policy of a host, it would inherit the pool's label.
func TestNewDirectory_containersMayUseIt(t *testing.T) {
	for kind, variable := range guestDisks(t) {
		t.Run(kind, func(t *testing.T) {
			path := testenv.GuestDir(t, variable)
			must.Succeed(t, unix.Lsetxattr(path, "security.selinux", []byte("system_u:object_r:var_t:s0"), 0))
			_, err := create(t.Context(), serve(t, path), "pvc-1")
			must.Succeed(t, err)
			label := make([]byte, 256)
			n, err := unix.Lgetxattr(filepath.Join(path, "pvc-1"), "security.selinux", label)
			must.Succeed(t, err)
			if got := strings.TrimRight(string(label[:n]), "\x00"); got != "system_u:object_r:container_file_t:s0" {
				t.Errorf("the label is %s", got)
			}
		})
	}
}

// write has a user write so many MiB to a new file, and returns what the file has taken. The path is closed to others than
// root, whom ext4 does not limit: the user gets the open file.
func write(t *testing.T, path string, mibs int) (size int64, err error) {
	t.Helper()
	file, err := os.Create(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, file.Close()) }()
	dd := exec.CommandContext(t.Context(), "dd", "if=/dev/zero", "bs=65536", fmt.Sprintf("count=%d", 16*mibs), "conv=fsync")
	dd.Stdout = file
	dd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	refused := dd.Run()
	info, err := file.Stat()
	must.Succeed(t, err)
	return info.Size(), refused
}
