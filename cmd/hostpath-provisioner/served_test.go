package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// The disk of PV_DIR is not mounted after a boot. A volume that was on it would count as deleted, and its data stay.
func TestDeleteOfVolumeWhoseDiskIsNotMountedIsRefused(t *testing.T) {
	top, state := t.TempDir(), t.TempDir()
	path, disk := filepath.Join(top, "pool"), filepath.Join(top, "disk")
	run := func(do func(set *pool.Set)) {
		c, err := parseQuietly(t, map[string]string{"NODE_NAME": "node-a", "PV_DIR": path}, "--state-dir="+state)
		must.Succeed(t, err)
		set, closePool, err := openPool(c, logr.Discard())
		must.Succeed(t, err)
		must.Succeed(t, set.Wait(t.Context()))
		do(set)
		must.Succeed(t, closePool())
	}
	remove := func(set *pool.Set, name string) error {
		return locked(set, name, func(id volume.ID) error { return set.Delete(t.Context(), id) })
	}
	const own, upstream = "pvc-1", "pvc-2" // which has no record
	must.Succeed(t, os.MkdirAll(filepath.Join(path, upstream), 0o777))
	run(func(set *pool.Set) {
		_, err := create(t.Context(), set, own)
		must.Succeed(t, err)
	})
	must.Succeed(t, os.Rename(path, disk))
	run(func(set *pool.Set) {
		must.ErrorIs(t, remove(set, upstream), volume.ErrPrecondition)
		err := remove(set, own)
		must.ErrorIs(t, err, volume.ErrPrecondition)
		notes := must.Value(filepath.Glob(filepath.Join(state, "pools", "*.json")))(t)
		if !slices.ContainsFunc(notes, func(note string) bool { return strings.Contains(err.Error(), note) }) {
			t.Errorf("the error is %q, want the file that an administrator may remove, of %q", err, notes)
		}
	})
	must.Succeed(t, os.RemoveAll(path))
	must.Succeed(t, os.Rename(disk, path))
	run(func(set *pool.Set) {
		must.Succeed(t, remove(set, upstream), remove(set, own))
		must.ErrorIs(t, remove(set, own), volume.ErrNotFound)
	})
}
