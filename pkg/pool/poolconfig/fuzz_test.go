package poolconfig_test

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// wantInvalid says that what is refused is refused as the caller's mistake.
func wantInvalid(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, volume.ErrInvalid) && !errors.Is(err, volume.ErrOutOfRange) {
		t.Errorf("error %v, want ErrInvalid or ErrOutOfRange", err)
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		`[{"name":"local","path":"/var/hpvolumes","reserve":"5%"}]`,
		`[{"name":"a","path":"a/../.."}]`,
		`[{"name":"a","path":"/a","reserve":4096},{"name":"b","path":"/b/c","snapshotPath":"/b/c/s","snapshotProvider":"reflink","shared":true}]`,
		`[{"name":"a","path":"/a","overprovision":1e-300,"bytesPerInode":1,"allocation":"thin","relabel":"none","enforcement":"none","requireMount":true,"allowReadWriteMany":true}]`,
		`[{"name":"a","path":"/a"},{"NAME":"a","Path":"/a/"}]`, `[{"name":"a","path":"/a","path":"/"}]`, `[null]`, `{}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		configs, err := poolconfig.Parse(s, "/work")
		if err != nil {
			wantInvalid(t, err)
			return
		}
		for i, c := range configs {
			if !filepath.IsAbs(c.Path) || filepath.Clean(c.Path) != c.Path || c.Path == "/" || c.Overprovision <= 0 || c.BytesPerInode < volume.Unknown {
				t.Errorf("%+v is a pool", c)
			}
			for _, other := range configs[:i] {
				if below, err := filepath.Rel(c.Path, other.Path); err != nil || filepath.IsLocal(below) || other.Name == c.Name {
					t.Errorf("%+v and %+v are two pools", c, other)
				}
			}
		}
		again, err := poolconfig.Parse(written(t, configs), "/elsewhere")
		if err != nil {
			t.Fatalf("what was read is not accepted again: %v", err)
		}
		for i := range configs {
			configs[i].Reserve = volume.Reserve{} // it has no text
		}
		if diff := cmp.Diff(configs, again, cmp.Comparer(func(a, b volume.PoolName) bool { return a == b }), cmp.Comparer(func(a, b volume.Reserve) bool { return a == b })); diff != "" {
			t.Errorf("read again (-first +second):\n%s", diff)
		}
	})
}

// written is the configuration as text, all but the reserve.
func written(t *testing.T, configs []poolconfig.Config) string {
	var all []map[string]any
	for _, c := range configs {
		one := map[string]any{
			"name": c.Name.String(), "path": c.Path, "shared": c.Shared, "requireMount": c.RequireMount, "allowReadWriteMany": c.AllowReadWriteMany, "enforcement": c.Enforcement,
			"overprovision": c.Overprovision,
			"allocation":    []string{"thick", "thin"}[c.Allocation], "relabel": []string{"root", "recursive", "none"}[c.Relabel],
		}
		if c.BytesPerInode != volume.Unknown {
			one["bytesPerInode"] = c.BytesPerInode
		}
		if c.SnapshotPath != "" {
			one["snapshotPath"] = c.SnapshotPath
		}
		all = append(all, one)
	}
	text := must.Value(json.Marshal(all))(t)
	return string(text)
}
