package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
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

func remove(ctx context.Context, set *pool.Set, name string) error {
	return locked(set, name, func(id volume.ID) error { return set.Delete(ctx, id) })
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

// As the upstream operator has it: the driver's pool is the directory csi in that of the provisioner. The two are
// processes that know nothing of each other.
func TestProvisionerAndDriverAtOnce_noProjectHasTwoVolumes(t *testing.T) {
	each := 1000
	if testing.Short() {
		each = 120
	}
	for kind, variable := range guestDisks(t) {
		t.Run(kind, func(t *testing.T) {
			path := testenv.GuestDir(t, variable)
			csi := filepath.Join(path, provisioner.CSIDirectory)
			set := serve(t, path)
			driver := drivertest.Start(t, drivertest.Config{
				Binary: drivertest.Built(t),
				Pools:  []drivertest.PoolConfig{{Name: "local", Path: csi, Enforcement: "required"}},
			})
			// Every other one is deleted again, so that ids come free in between.
			const workers = 4
			var all sync.WaitGroup
			failures := make(chan error, 2*workers)
			for worker := range workers {
				all.Go(func() {
					failures <- churn(each/workers, fmt.Sprintf("pvc-a%d", worker),
						func(name string) error {
							_, err := create(t.Context(), set, name)
							return err
						},
						func(name string) error { return remove(t.Context(), set, name) })
				})
				all.Go(func() {
					failures <- churn(each/workers, fmt.Sprintf("pvc-b%d", worker),
						func(name string) error {
							_, err := driver.Create(t.Context(), drivertest.Volume{ID: name, Pool: "local", Bytes: mib})
							return err
						},
						func(name string) error { return driver.Delete(t.Context(), name) })
				})
			}
			all.Wait()
			close(failures)
			for err := range failures {
				must.Succeed(t, err)
			}
			owners := make(map[quota.ID]string)
			wantProjects(t, path, owners, each/2)
			wantProjects(t, csi, owners, each/2)
			wantNoRecordOf(t, path, provisioner.CSIDirectory)
		})
	}
}

// churn makes volumes and deletes every other one of them.
func churn(count int, prefix string, create, remove func(name string) error) error {
	for i := range count {
		name := fmt.Sprintf("%s-%d", prefix, i)
		if err := insist(name, create); err != nil {
			return fmt.Errorf("create %s: %w", name, err)
		}
		if i%2 == 0 {
			continue
		}
		if err := insist(name, remove); err != nil {
			return fmt.Errorf("delete %s: %w", name, err)
		}
	}
	return nil
}

// insist repeats a call while the pool does not answer, as the callers of both programs do: an emulated disk may stall.
func insist(name string, call func(name string) error) error {
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		err := call(name)
		code := status.Code(err)
		stalled := errors.Is(err, volume.ErrUnavailable) || code == codes.Unavailable || code == codes.ResourceExhausted
		if !stalled || time.Now().After(deadline) {
			return err
		}
	}
}

// wantProjects expects so many volumes in a pool, each in a project with its limit that no other has.
func wantProjects(t *testing.T, path string, owners map[quota.ID]string, want int) {
	t.Helper()
	root, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, root.Close()) }()
	facility, err := quota.Detect(root)
	must.Succeed(t, err)
	found, err := filepath.Glob(filepath.Join(path, "pvc-*"))
	must.Succeed(t, err)
	if len(found) != want {
		t.Errorf("%d volumes in %s, want %d", len(found), path, want)
	}
	for _, v := range found {
		d, err := root.Open(filepath.Base(v))
		must.Succeed(t, err)
		id, err := facility.IDOf(d)
		must.Succeed(t, err)
		must.Succeed(t, d.Close())
		if other := owners[id]; other != "" {
			t.Errorf("project %d has %s and %s", id, other, v)
		}
		owners[id] = v
		usage, err := facility.Usage(root, id)
		must.Succeed(t, err)
		if usage.Limit.Bytes != mib || usage.Inodes != 1 {
			t.Errorf("project %d of %s has %+v", id, v, usage)
		}
	}
}

func wantNoRecordOf(t *testing.T, path, name string) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(path, ".hostpath-provisioner", "volumes", name+".json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s has a record in %s (%v)", name, path, err)
	}
}
