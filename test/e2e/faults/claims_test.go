package faults

import (
	"encoding/json"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

const gib = 1 << 30

// One disk can have all that a pool on btrfs offers. Trees have other space than data, and what is left is theirs: the disk is
// recorded, another volume is deleted, and then the disk itself.
func TestClaimOfAllOfBtrfs(t *testing.T) {
	if testenv.Guest() {
		t.Skip("the guest has no btrfs")
	}
	driver := drivertest.Built(t)
	on := func(bytes int64, mkfs ...string) func(*testing.T) string {
		return func(t *testing.T) string { return testenv.MadeFS(t, "btrfs", bytes, mkfs...) }
	}
	for name, c := range map[string]struct {
		mount         func(t *testing.T) string
		overprovision json.Number
	}{
		"512 MiB, trees once":                 {on(512*mib, "-m", "single"), ""},
		"512 MiB, trees twice":                {on(512*mib, "-m", "dup"), ""},
		"512 MiB, mixed":                      {on(512*mib, "--mixed"), ""},
		"2 GiB, trees once":                   {on(2*gib, "-m", "single"), ""},
		"2 GiB, trees twice":                  {on(2*gib, "-m", "dup"), ""},
		"2 GiB, mixed":                        {on(2*gib, "--mixed"), ""},
		"20 GiB, trees once":                  {on(20*gib, "-m", "single"), ""},
		"20 GiB, trees twice":                 {on(20*gib, "-m", "dup"), ""},
		"20 GiB, mixed":                       {on(20*gib, "--mixed"), ""},
		"20 GiB, trees once, overprovisioned": {on(20*gib, "-m", "single"), "3"},
		"20 GiB, with quotas":                 {func(t *testing.T) string { return testenv.CountingBtrfs(t, 20*gib, "-m", "single") }, ""},
		"20 GiB, with quotas, overprovisioned": {
			func(t *testing.T) string { return testenv.CountingBtrfs(t, 20*gib, "-m", "single") }, "3",
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := c.mount(t)
			config := drivertest.PoolConfig{Name: "local", Path: path, Overprovision: c.overprovision}
			d := drivertest.Start(t, drivertest.Config{Binary: driver, Pools: []drivertest.PoolConfig{config}, Flags: []string{"--v=4"}})
			claimAll(&drivertest.Pool{Driver: d, PoolConfig: config})
		})
	}
}

// claimAll claims what an empty pool offers, and expects it to offer as much when that is deleted.
func claimAll(d *drivertest.Pool) {
	d.Helper()
	ctx := d.Context()
	other := volume("pvc-other", false)
	_, err := d.Create(ctx, other)
	d.Must(err)
	before, err := d.Capacity(ctx, "local")
	d.Must(err)

	all := drivertest.Volume{ID: "pvc-all", Pool: "local", Block: true, Bytes: before}
	_, err = d.Create(ctx, all)
	d.Must(err)
	d.Crash()
	d.Must(d.Publish(ctx, other, "pod"))
	d.Must(d.Unpublish(ctx, other.ID, "pod"))
	d.Must(d.Delete(ctx, other.ID))
	d.Must(d.Delete(ctx, all.ID))
	d.AwaitNoTrash(d.Path)
	d.Eventually("the pool offers what it did", func() bool {
		d.Must(d.Settle())
		after, err := d.Capacity(ctx, "local")
		d.Must(err)
		return after > before*3/4
	})
	d.Logf("%d MiB were claimed", before/mib)
}
