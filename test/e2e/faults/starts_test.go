package faults

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// A start is one for which the driver makes directories that do not fit.
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
}

// A pool without room for the driver's directories is not served, and nothing in it is changed. As soon as there is room, all
// is as usual without a restart.
func TestStartOnFullDisk(t *testing.T) {
	driver := drivertest.Built(t)
	for _, fs := range someFilesystems(2, 2) {
		if fs.kind == "btrfs" {
			continue // has room for the last names, now and then
		}
		for _, start := range starts {
			t.Run(fs.kind+"/"+start.name, func(t *testing.T) { testStartOnFullDisk(t, driver, fs.lacking(), start) })
		}
	}
}

// lacking is a filesystem of which all bytes and inodes can be taken.
func (fs filesystem) lacking() filesystem {
	fs.mkfs = slices.Clone(fs.mkfs)
	if fs.kind == "ext4" {
		fs.mkfs = append(fs.mkfs, "-m", "0", "-N", "512")
	} else {
		fs.mkfs = append(fs.mkfs, "-i", "maxpct=1")
	}
	return fs
}

func testStartOnFullDisk(t *testing.T, driver string, fs filesystem, start start) {
	t.Helper()
	m := newMount(t, fs)
	pool := drivertest.PoolConfig{Name: "local", Path: m.at, Shared: start.shared}
	config := drivertest.Config{Binary: driver, Name: "node-1", Pools: []drivertest.PoolConfig{pool}, Flags: []string{"--v=4"}}
	v := volume("pvc-1", false)
	v.Bytes = mib
	if start.served {
		before := drivertest.Start(t, config)
		must.Succeed(t, must.Err(before.Create(t.Context(), v)))
		must.Succeed(t, before.Process.Close())
	}
	file := filepath.Join(m.at, v.ID, "file")
	must.Succeed(t, os.MkdirAll(filepath.Dir(file), 0o777), os.WriteFile(file, []byte(content), 0o600))
	fulldisk.Fill(t, m.foreign(), fulldisk.Shortage{Bytes: true, Inodes: true})

	config.Name = start.node
	d := drivertest.Launch(t, config)
	d.WantCode("publish", d.Publish(t.Context(), v, v.ID), codes.Unavailable)
	d.WantCode("delete", d.Delete(t.Context(), v.ID), codes.Unavailable)
	if got, err := d.Capacity(t.Context(), "local"); err != nil || got != 0 {
		t.Errorf("the capacity is %d bytes, %v", got, err)
	}
	if got, err := os.ReadFile(file); string(got) != content {
		t.Errorf("%s has %q, %v", file, got, err)
	}

	fulldisk.Empty(t, m.foreign())
	d.AwaitServing()
	must.Succeed(t, d.Publish(t.Context(), v, v.ID))
	must.Succeed(t, d.Unpublish(t.Context(), v.ID, v.ID))
	must.Succeed(t, d.Delete(t.Context(), v.ID))
	d.AwaitNoTrash(m.at)
}
