package faults

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// A start is one for which the driver would make directories, if there were room.
type start struct {
	name   string
	node   string
	shared bool
	// served: a driver on another node, or of another name, has made the volumes.
	served bool
}

var starts = []start{
	{name: "first start over an earlier driver's volumes", node: "node-1"},
	{name: "renamed node", node: "node-2", served: true},
	{name: "new node in a shared pool", node: "node-2", served: true, shared: true},
	{name: "first start in a shared pool over an earlier driver's volumes", node: "node-1", shared: true},
}

var shortages = []struct {
	name string
	fulldisk.Shortage
}{
	{"no bytes and no inodes", fulldisk.Shortage{Bytes: true, Inodes: true}},
	{"no bytes", fulldisk.Shortage{Bytes: true}},
	{"no inodes", fulldisk.Shortage{Inodes: true}},
}

// Publishing, unpublishing and deleting need no new block and no new inode, whatever is missing of the
// driver's own directories. As soon as there is room, all is as usual without a restart.
func TestStartOnFullDisk(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range filesystems() {
		for _, lack := range shortages {
			if lack.Inodes != lack.Bytes && (fs.kind == "btrfs" || testing.Short()) {
				continue // btrfs has inodes as long as it has space
			}
			for i, start := range starts {
				if testing.Short() && fs.kind == "btrfs" && i > 0 {
					continue // to fill it takes most of a minute
				}
				t.Run(fs.kind+"/"+lack.name+"/"+start.name, func(t *testing.T) {
					testStartOnFullDisk(t, driver, fs.lacking(lack.Shortage).toStart(start), start)
				})
			}
		}
	}
}

func (fs filesystem) lacking(lack fulldisk.Shortage) filesystem {
	fs.mkfs = slices.Clone(fs.mkfs)
	switch {
	case fs.kind == "ext4":
		fs.mkfs = append(fs.mkfs, "-m", "0")
		if lack.Inodes {
			fs.mkfs = append(fs.mkfs, "-N", "512")
		}
	case fs.kind == "xfs" && lack.Inodes:
		fs.mkfs = append(fs.mkfs, "-i", "maxpct=1")
	case fs.kind == "btrfs":
		fs.bytes = 128 * mib
	}
	fs.lack = lack
	return fs
}

// toStart has room in each inode of ext4 for an attribute beside a label of SELinux, which the guest has, where that is how a
// node says what it has published. Without it nothing could be published once there is no inode left.
func (fs filesystem) toStart(start start) filesystem {
	if fs.kind == "ext4" && start.shared && !start.served && testenv.Guest() {
		fs.mkfs = append(slices.Clone(fs.mkfs), "-I", "512")
	}
	return fs
}

// volumesBefore are so many that the pool's directory on XFS has no room for another name.
const volumesBefore = 6

func testStartOnFullDisk(t *testing.T, driver string, fs filesystem, start start) {
	t.Helper()
	m := newMount(t, fs)
	pool := drivertest.PoolConfig{Name: "local", Path: m.at, Shared: start.shared}
	config := drivertest.Config{Binary: driver, Name: "node-1", Pools: []drivertest.PoolConfig{pool}, Flags: []string{"--v=4"}}
	s := &fullStart{mount: m, start: start}
	for i := range volumesBefore {
		s.volumes = append(s.volumes, volume(fmt.Sprintf("pvc-00000000-0000-0000-0000-%012d", i), false))
		s.volumes[i].Bytes = mib
	}
	if start.served {
		disk := volume("pvc-disk", true)
		disk.Bytes = mib
		s.volumes = append(s.volumes, disk)
	}
	s.make(config)
	fulldisk.Fill(t, m.foreign(), fs.lack)
	config.Name = start.node
	s.Driver = drivertest.Start(t, config)
	s.pool = &drivertest.Pool{Driver: s.Driver, PoolConfig: pool}
	s.wantServed()
	if start.shared {
		config.Name = "node-3"
		s.wantKeptFor(drivertest.Start(t, config))
	}
	s.wantDeleted(0)
	s.Crash()
	s.wantDeleted(1)
	if !fs.lack.Bytes {
		fulldisk.Small(t, m.foreign(), 0) // what deletions have given back
	}
	s.wantServed()

	fulldisk.Empty(t, m.foreign())
	s.wantUsual()
}

// A fullStart is a driver that has started on a full disk.
type fullStart struct {
	*drivertest.Driver
	mount   *mount
	start   start
	pool    *drivertest.Pool
	volumes []drivertest.Volume
}

// make has an earlier driver make the volumes, and users fill them.
func (s *fullStart) make(config drivertest.Config) {
	t := s.mount
	t.Helper()
	if s.start.served {
		before := drivertest.Start(t, config)
		for _, v := range s.volumes {
			_, err := before.Create(t.Context(), v)
			must.Succeed(t, err)
		}
		must.Succeed(t, before.Process.Close())
	}
	for _, v := range s.volumes {
		if v.Block {
			continue
		}
		must.Succeed(t, os.MkdirAll(filepath.Join(t.at, v.ID), 0o777))
		must.Succeed(t, os.WriteFile(s.file(v), []byte(content), 0o600))
	}
}

func (s *fullStart) file(v drivertest.Volume) string { return filepath.Join(s.mount.at, v.ID, "file") }

// wantServed expects all volumes to be usable, and no other to be made.
func (s *fullStart) wantServed() {
	s.Helper()
	ctx := s.Context()
	if got, err := s.Capacity(ctx, "local"); err != nil || got != 0 {
		s.Errorf("the capacity is %d bytes, %v", got, err)
	}
	s.wantCode("create", codes.ResourceExhausted, func() error { _, err := s.Create(ctx, late); return err })
	for _, v := range s.volumes {
		if s.start.served {
			s.wantCode("create again", codes.OK, func() error { _, err := s.Create(ctx, v); return err })
		}
		s.wantCode("publish "+v.ID, codes.OK, func() error { return s.Publish(ctx, v, v.ID) })
		s.wantCode("stats", codes.OK, func() error { _, err := s.Stats(ctx, v.ID, v.ID); return err })
		s.wantCode("delete what is published", codes.FailedPrecondition, func() error { return s.Delete(ctx, v.ID) })
		s.wantCode("unpublish", codes.OK, func() error { return s.Unpublish(ctx, v.ID, v.ID) })
		if got, err := os.ReadFile(s.file(v)); !v.Block && string(got) != content {
			s.Errorf("%s has %q, %v", s.file(v), got, err)
		}
	}
	s.wantListed()
}

// wantKeptFor expects a volume that is published here to be neither removed nor published by another node.
func (s *fullStart) wantKeptFor(other *drivertest.Driver) {
	s.Helper()
	v := s.volumes[0]
	s.Must(s.Publish(s.Context(), v, v.ID))
	elsewhere := func(what string, want codes.Code, call func() error) {
		s.Helper()
		s.WantCode(what+" on another node", call(), want)
	}
	remove := func() error { return other.Delete(s.Context(), v.ID) }
	elsewhere("delete", codes.FailedPrecondition, remove)
	publish := func() error { return other.Publish(s.Context(), v, v.ID+"-elsewhere") }
	elsewhere("publish", codes.FailedPrecondition, publish)
	s.Must(s.Unpublish(s.Context(), v.ID, v.ID))
	elsewhere("publish", codes.OK, publish)
	s.WantCode("delete", s.Delete(s.Context(), v.ID), codes.FailedPrecondition)
	elsewhere("unpublish", codes.OK, func() error { return other.Unpublish(s.Context(), v.ID, v.ID+"-elsewhere") })
	s.Must(other.Process.Close())
}

// wantCode repeats a call as its clients do: while the pool is opened anew, because there is room for its layout, and
// while a check has the volume.
func (s *fullStart) wantCode(what string, want codes.Code, call func() error) {
	s.Helper()
	var err error
	s.Eventually(what, func() bool {
		err = call()
		return status.Code(err) != codes.Unavailable && status.Code(err) != codes.Aborted
	})
	s.WantCode(what, err, want)
}

func (s *fullStart) wantListed() {
	s.Helper()
	entries, err := s.List(s.Context(), 0)
	s.Must(err)
	if len(entries) != len(s.volumes) {
		s.Errorf("%d volumes are listed, want %d: %v", len(entries), len(s.volumes), entries)
	}
}

// wantDeleted deletes a volume.
func (s *fullStart) wantDeleted(i int) {
	s.Helper()
	v := s.volumes[i]
	s.wantCode("delete", codes.OK, func() error { return s.Delete(s.Context(), v.ID) })
	s.wantCode("delete again", codes.OK, func() error { return s.Delete(s.Context(), v.ID) })
	s.wantCode("publish what is deleted", codes.NotFound, func() error { return s.Publish(s.Context(), v, v.ID) })
	s.volumes = slices.Delete(s.volumes, i, i+1)
	s.wantListed()
	s.Eventually("what was deleted is erased", func() bool {
		_, err := os.Lstat(filepath.Join(s.mount.at, v.ID))
		return errors.Is(err, fs.ErrNotExist)
	})
	s.AwaitNoTrash(s.mount.at)
}

// On ext4 there may be no room for an attribute in the inode of a volume, as beside a label of SELinux, and none for a name
// in the block of the pool's directory.
func TestDeleteWithoutRoomForName(t *testing.T) {
	fs := filesystem{kind: "ext4", bytes: 64 * mib}.lacking(fulldisk.Shortage{Bytes: true, Inodes: true})
	m := newMount(t, fs)
	s := &fullStart{mount: m, start: start{node: "node-2", served: true}, volumes: []drivertest.Volume{volume("pvc-00000000-0000-0000-0000-000000000000", false)}}
	s.volumes[0].Bytes = mib
	pool := drivertest.PoolConfig{Name: "local", Path: m.at}
	config := drivertest.Config{Binary: drivertest.Built(t), Name: "node-1", Pools: []drivertest.PoolConfig{pool}, Flags: []string{"--v=4"}}
	s.make(config)
	must.Succeed(t, unix.Setxattr(filepath.Join(m.at, s.volumes[0].ID), "trusted.filler", make([]byte, 40), 0))
	fulldisk.Fill(t, m.foreign(), fs.lack)
	fillNames(t, m.at, filepath.Join(m.foreign(), "large"))
	config.Name = s.start.node
	s.Driver = drivertest.Start(t, config)
	s.pool = &drivertest.Pool{Driver: s.Driver, PoolConfig: pool}
	s.wantDeleted(0)
	s.Eventually("what was renamed is erased", func() bool {
		left, err := filepath.Glob(s.pool.Own(".trash-*"))
		s.Must(err)
		return len(left) == 0
	})
}

// fillNames gives a file names in a directory until there is no room for another.
func fillNames(t *testing.T, dir, file string) {
	t.Helper()
	for length := 200; length > 0; length /= 2 {
		for i := 0; ; i++ {
			err := os.Link(file, filepath.Join(dir, fmt.Sprintf(".%0*d", length, i)))
			if errors.Is(err, unix.ENOSPC) {
				break
			}
			must.Succeed(t, err)
		}
	}
}

// wantUsual expects what each pool can do that has room, and nothing else to be left.
func (s *fullStart) wantUsual() {
	s.Helper()
	s.Eventually("volumes can be created", func() bool {
		_, err := s.Create(s.Context(), late)
		return err == nil
	})
	for _, v := range append(s.volumes, late) {
		s.wantCode("publish", codes.OK, func() error { return s.Publish(s.Context(), v, v.ID) })
		s.wantCode("unpublish", codes.OK, func() error { return s.Unpublish(s.Context(), v.ID, v.ID) })
		s.wantCode("delete", codes.OK, func() error { return s.Delete(s.Context(), v.ID) })
	}
	s.volumes = nil
	s.AwaitNoTrash(s.mount.at)
	s.wantListed()
	s.Restart()
	if err := s.pool.Unleaked(); err != nil {
		s.Error(err)
	}
	for _, name := range []string{"creating", "trash"} {
		if _, err := os.Stat(s.pool.Own(name, s.start.node)); err != nil {
			s.Error(err)
		}
	}
}
