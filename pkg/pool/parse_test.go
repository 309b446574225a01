package pool_test

import (
	"errors"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

func TestParseVolumeID(t *testing.T) {
	for _, good := range []string{"pvc-3f2a", "csi-0123456789abcdef", "data", "a", "0", "A.b_c-d", "x..y", strings.Repeat("x", 200)} {
		parsed, err := pool.ParseVolumeID(good)
		if err != nil || parsed.String() != good {
			t.Errorf("ParseVolumeID(%q) = %q, %v", good, parsed, err)
		}
	}
	for _, bad := range []string{"", ".", "..", "../x", "a/b", "/a", "a/", ".hostpath-provisioner", "-rf", "_x", "lost+found",
		"a b", "a\x00b", "a\nb", "ä", strings.Repeat("x", 201)} {
		if parsed, err := pool.ParseVolumeID(bad); !errors.Is(err, pool.ErrInvalid) {
			t.Errorf("ParseVolumeID(%q) = %q, %v; want ErrInvalid", bad, parsed, err)
		}
	}
}

func TestParseName(t *testing.T) {
	for _, good := range []string{"local", "Fast NVMe", "größe", strings.Repeat("x", 253)} {
		if _, err := pool.ParseName(good); err != nil {
			t.Errorf("ParseName(%q): %v", good, err)
		}
	}
	for _, bad := range []string{"", "a/b", "a\nb", "a\x00", "\xff", strings.Repeat("x", 254)} {
		if _, err := pool.ParseName(bad); !errors.Is(err, pool.ErrInvalid) {
			t.Errorf("ParseName(%q): %v, want ErrInvalid", bad, err)
		}
	}
}

func TestParseBytes(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "4096": 4096, "10Gi": 10 << 30, "1.5Gi": 3 << 29, "500M": 5e8, "1k": 1000, "1e9": 1e9, "2E": 2e18, "1.0000001Ki": 1025,
	} {
		if got, err := pool.ParseBytes(text); got != want || err != nil {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]error{
		"": pool.ErrInvalid, "Gi": pool.ErrInvalid, "-1": pool.ErrInvalid, "1Zi": pool.ErrInvalid, "1 Gi": pool.ErrInvalid,
		"1/2": pool.ErrInvalid, "0x10": pool.ErrInvalid, "1e99": pool.ErrInvalid, "1e-9": pool.ErrInvalid, "1iG": pool.ErrInvalid,
		"9Ei": pool.ErrOutOfRange, "1..2": pool.ErrInvalid, "NaN": pool.ErrInvalid,
	} {
		if got, err := pool.ParseBytes(text); !errors.Is(err, want) {
			t.Errorf("ParseBytes(%q) = %d, %v; want %v", text, got, err, want)
		}
	}
}

func TestParseConfigs(t *testing.T) {
	got, err := pool.ParseConfigs(`[
		{"name":"local","path":"/var/hpvolumes/"},
		{"Name":"fast","path":"fast-data-dir/csi","snapshotPath":"fast-data-dir/csi/snapshots","snapshotProvider":"reflink","shared":true,
		 "requireMount":true,"enforcement":"required","overprovision":1.5,"reserve":"5%","relabel":"recursive"}]`, "/work")
	must(t, err)
	if got[0].Path != "/var/hpvolumes" || got[0].Enforcement != pool.EnforceAuto || got[0].Overprovision != 1 || got[0].Relabel != label.Root {
		t.Errorf("first pool %+v, want the defaults", got[0])
	}
	second := got[1]
	if second.Name.String() != "fast" || second.Path != "/work/fast-data-dir/csi" || second.SnapshotPath != "/work/fast-data-dir/csi/snapshots" ||
		!second.Shared || !second.RequireMount || second.Enforcement != pool.EnforceRequired || second.Overprovision != 1.5 || second.Relabel != label.Recursive {
		t.Errorf("second pool %+v", second)
	}
}

func TestParseConfigsReportsEveryProblemAtOnce(t *testing.T) {
	_, err := pool.ParseConfigs(`[
		{"name":"a","path":"/a","typo":1,"overprovision":0,"reserve":"lots"},
		{"name":"a","path":"/a/b","enforcement":"maybe","relabel":"all"},
		{"path":"","snapshotProvider":"reflink"},
		{"name":"c/d","path":"/a"},
		{"name":"e","path":"/","snapshotPath":"/s","snapshotProvider":"lvm"},
		{"name":"f","path":7}]`, "/")
	if !errors.Is(err, pool.ErrInvalid) {
		t.Fatalf("error %v, want ErrInvalid", err)
	}
	for _, want := range []string{
		`"typo"`, "overprovision 0", `"lots"`, `"maybe"`, `relabel "all"`, `two pools are named "a"`, "one in the other", "the pool name is empty",
		"path is missing", "without snapshotPath", `"c/d"`, "same path /a", "root directory", `"lvm"`, "pool 6",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not tell of %s:\n%v", want, err)
		}
	}
}

func TestParseConfigsRefusesWhatIsNoListOfPools(t *testing.T) {
	for _, text := range []string{"", "{}", "[]", "null", "[1]", `[{"name":"a","path":"/a"}`, `[null]`} {
		if got, err := pool.ParseConfigs(text, "/"); !errors.Is(err, pool.ErrInvalid) {
			t.Errorf("ParseConfigs(%s) = %+v, %v; want ErrInvalid", text, got, err)
		}
	}
}
