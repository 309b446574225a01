package poolconfig_test

import (
	"errors"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestParse(t *testing.T) {
	got, err := poolconfig.Parse(`[
		{"name":"local","path":"/var/hpvolumes/"},
		{"Name":"fast","path":"fast-data-dir/csi","snapshotPath":"fast-data-dir/csi/snapshots","snapshotProvider":"reflink","shared":true,
		 "requireMount":true,"enforcement":"required","overprovision":1.5,"reserve":"5%","relabel":"recursive","allowReadWriteMany":true}]`, "/work")
	must.Succeed(t, err)
	if got[0].Path != "/var/hpvolumes" || got[0].Enforcement != limit.Auto || got[0].Overprovision != 1 || got[0].Relabel != label.Root {
		t.Errorf("first pool %+v, want the defaults", got[0])
	}
	second := got[1]
	if second.Name.String() != "fast" || second.Path != "/work/fast-data-dir/csi" || second.SnapshotPath != "/work/fast-data-dir/csi/snapshots" ||
		!second.Shared || !second.RequireMount || second.Enforcement != limit.Required || second.Overprovision != 1.5 || second.Relabel != label.Recursive || !second.AllowReadWriteMany {
		t.Errorf("second pool %+v", second)
	}
}

func TestParseReportsEveryProblemAtOnce(t *testing.T) {
	_, err := poolconfig.Parse(`[
		{"name":"a","path":"/a","typo":1,"overprovision":0,"reserve":"lots"},
		{"name":"a","path":"/a/b","enforcement":"maybe","relabel":"all"},
		{"path":"","snapshotProvider":"reflink"},
		{"name":"c/d","path":"/a"},
		{"name":"e","path":"/","snapshotPath":"/s","snapshotProvider":"lvm"},
		{"name":"f","path":7}]`, "/")
	if !errors.Is(err, volume.ErrInvalid) {
		t.Fatalf("error %v, want ErrInvalid", err)
	}
	for _, want := range []string{
		`"typo"`, "overprovision 0", `"lots"`, `"maybe"`, `relabel "all"`, `two pools are named "a"`, "one in the other", "the pool name is empty",
		"path is missing", "without snapshotPath", `"c/d"`, "same path /a", "root directory", `"lvm"`, "pool 6",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not report %s:\n%v", want, err)
		}
	}
}

func TestParseInvalidList(t *testing.T) {
	for _, text := range []string{"", "{}", "[]", "null", "[1]", `[{"name":"a","path":"/a"}`, `[null]`} {
		if got, err := poolconfig.Parse(text, "/"); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("Parse(%s) = %+v, %v; want ErrInvalid", text, got, err)
		}
	}
}

func TestAllocationThickAndThin(t *testing.T) {
	for text, good := range map[string]bool{"thick": true, "thin": true, "": true, "sparse": false} {
		_, err := poolconfig.Parse(`[{"name":"local","path":"/pool","allocation":"`+text+`"}]`, "/")
		if good != (err == nil) || !good && (!errors.Is(err, volume.ErrInvalid) || !strings.Contains(err.Error(), "thin")) {
			t.Errorf("of %q it says %v, want it good: %v", text, err, good)
		}
	}
}
