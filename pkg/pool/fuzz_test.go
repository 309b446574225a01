package pool_test

import (
	"encoding/json"
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

// wantInvalid says that what is refused is refused as the caller's mistake.
func wantInvalid(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, pool.ErrInvalid) && !errors.Is(err, pool.ErrOutOfRange) {
		t.Errorf("error %v, want ErrInvalid or ErrOutOfRange", err)
	}
}

func FuzzParseVolumeID(f *testing.F) {
	for _, seed := range []string{"pvc-1", "..", "a/b", ".hidden", "x\x00", "lost+found", "é", "-rf", strings.Repeat("x", 201)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		parsed, err := pool.ParseVolumeID(s)
		_, nodeErr := pool.ParseNodeID(s)
		if (err == nil) != (nodeErr == nil) {
			t.Errorf("as an id: %v, as a node: %v", err, nodeErr)
		}
		if err != nil {
			wantInvalid(t, err)
			return
		}
		name := parsed.String()
		again, err := pool.ParseVolumeID(name)
		if name != s || again != parsed || err != nil {
			t.Errorf("%q is parsed to %q, and that to %q, %v", s, name, again, err)
		}
		// One element of a path, whatever is put before and behind it.
		if filepath.Base(name) != name || !filepath.IsLocal(name) || strings.HasPrefix(name, ".") || len(".new-"+name+".json") > 255 ||
			filepath.Join("/pool", name) != "/pool/"+name {
			t.Errorf("%q is an id", name)
		}
	})
}

func FuzzParseName(f *testing.F) {
	for _, seed := range []string{"local", "Fast NVMe", "größe", "a/b", "\xff", "a\u202eb", strings.Repeat("ß", 127)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := pool.ParseName(s)
		if err != nil {
			wantInvalid(t, err)
			return
		}
		again, err := pool.ParseName(name.String())
		if name.String() != s || again != name || err != nil || name == (pool.Name{}) {
			t.Errorf("%q is parsed to %q, and that to %q, %v", s, name, again, err)
		}
		if strings.ContainsAny(s, "/\x00\n\r") || !utf8.ValidString(s) || len(s) > 253 {
			t.Errorf("%q is a name", s)
		}
	})
}

func FuzzParseBytes(f *testing.F) {
	for _, seed := range []string{"10Gi", "1.5M", "1e18", "e", "1e999999999", "9223372036854775807", "8Ei", "0.0000000000000000000000001", "1e+3", "+1", "1.e1Ki"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		bytes, err := pool.ParseBytes(s)
		if err != nil {
			wantInvalid(t, err)
			return
		}
		if again, err := pool.ParseBytes(strconv.FormatInt(bytes, 10)); again != bytes || err != nil || bytes < 0 {
			t.Errorf("%q is %d, and that is %d, %v", s, bytes, again, err)
		}
		if plain, err := strconv.ParseInt(s, 10, 64); err == nil && plain != bytes {
			t.Errorf("%q is %d", s, bytes)
		}
		if strings.ContainsAny(s, "-/_xX \n") {
			t.Errorf("%q is %d", s, bytes)
		}
	})
}

func FuzzParseConfigs(f *testing.F) {
	for _, seed := range []string{
		`[{"name":"local","path":"/var/hpvolumes","reserve":"5%"}]`,
		`[{"name":"a","path":"a/../.."}]`,
		`[{"name":"a","path":"/a","reserve":4096},{"name":"b","path":"/b/c","snapshotPath":"/b/c/s","snapshotProvider":"reflink","shared":true}]`,
		`[{"name":"a","path":"/a","overprovision":1e-300,"bytesPerInode":1,"allocation":"thin","relabel":"none","enforcement":"none","requireMount":true}]`,
		`[{"name":"a","path":"/a"},{"NAME":"a","Path":"/a/"}]`, `[{"name":"a","path":"/a","path":"/"}]`, `[null]`, `{}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		configs, err := pool.ParseConfigs(s, "/work")
		if err != nil {
			wantInvalid(t, err)
			return
		}
		for i, c := range configs {
			if !filepath.IsAbs(c.Path) || filepath.Clean(c.Path) != c.Path || c.Path == "/" || c.Overprovision <= 0 || c.BytesPerInode < 0 {
				t.Errorf("%+v is a pool", c)
			}
			for _, other := range configs[:i] {
				if below, err := filepath.Rel(c.Path, other.Path); err != nil || filepath.IsLocal(below) || other.Name == c.Name {
					t.Errorf("%+v and %+v are two pools", c, other)
				}
			}
		}
		again, err := pool.ParseConfigs(written(t, configs), "/elsewhere")
		if err != nil {
			t.Fatalf("what was read is not accepted again: %v", err)
		}
		for i := range configs {
			configs[i].Reserve = pool.Reserve{} // it has no text
		}
		if diff := cmp.Diff(configs, again, cmp.Comparer(func(a, b pool.Name) bool { return a == b }), cmp.Comparer(func(a, b pool.Reserve) bool { return a == b })); diff != "" {
			t.Errorf("read again (-first +second):\n%s", diff)
		}
	})
}

// written is the configuration as text, all but the reserve.
func written(t *testing.T, configs []pool.Config) string {
	var all []map[string]any
	for _, c := range configs {
		one := map[string]any{
			"name": c.Name.String(), "path": c.Path, "shared": c.Shared, "requireMount": c.RequireMount, "enforcement": c.Enforcement,
			"overprovision": c.Overprovision, "bytesPerInode": c.BytesPerInode,
			"allocation": []string{"thick", "thin"}[c.Allocation], "relabel": []string{"root", "recursive", "none"}[c.Relabel],
		}
		if c.SnapshotPath != "" {
			one["snapshotPath"] = c.SnapshotPath
		}
		all = append(all, one)
	}
	text, err := json.Marshal(all)
	must(t, err)
	return string(text)
}
