package reconcile_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestCheck(t *testing.T) {
	for name, c := range map[string]struct {
		inner string
		want  error
	}{
		"in a volume":             {"outer/pvc-1/data", reconcile.ErrNested},
		"in the driver's own":     {"outer/.hostpath-provisioner/pool", reconcile.ErrNested},
		"where no volume can be":  {"outer/lost+found/pool", nil},
		"in another directory":    {"inner", nil},
		"its name begins alike":   {"outer-2", nil},
		"in what is not a volume": {"outer/...", nil},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			mounts := &bindtest.Fake{}
			t.Cleanup(func() { must.Succeed(t, mounts.Close()) })
			var places reconcile.Places
			rechecked := 0
			outer := places.Add(poolName(t, "outer"), mounts, logr.Discard(), func() { rechecked++ })
			inner := places.Add(poolName(t, "inner"), mounts, logr.Discard(), func() {})

			if err := outer.Check(directory(t, root, "outer")); err != nil {
				t.Errorf("alone: %v", err)
			}
			if err := inner.Check(directory(t, root, c.inner)); err != nil {
				t.Errorf("the inner pool: %v", err)
			}
			if rechecked != 1 {
				t.Errorf("the outer pool is to check again %d times, want once", rechecked)
			}
			if err := outer.Check(directory(t, root, "outer")); !errors.Is(err, c.want) {
				t.Errorf("the outer pool: %v, want %v", err, c.want)
			}
		})
	}
}

func directory(t *testing.T, elements ...string) *dir.Dir {
	t.Helper()
	path := filepath.Join(elements...)
	must.Succeed(t, os.MkdirAll(path, 0o755))
	d := must.Value(dir.Open(path))(t)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	return d
}

func poolName(t *testing.T, name string) volume.PoolName {
	t.Helper()
	parsed := must.Value(volume.ParsePoolName(name))(t)
	return parsed
}
