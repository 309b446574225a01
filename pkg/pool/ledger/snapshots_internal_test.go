package ledger

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// The sum is that of what is there, whatever it was before.
func TestSnapshotSum(t *testing.T) {
	id := func(name string) volume.ID {
		id, err := volume.ParseSnapshot(name)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	whole := HasDirectory | HasRecord
	var x index
	x.put(idOf("pvc-1"), Info{Promised: 100, flags: whole | IsUnverified})
	for _, step := range []struct {
		name string
		info Info
		want SnapshotSum
	}{
		{"a", Info{Promised: 1, flags: whole}, SnapshotSum{Count: 1, Promised: 1, PointInTime: 1}},
		{"b", Info{Promised: 2, flags: whole | IsUnverified}, SnapshotSum{Count: 2, Promised: 3, PointInTime: 1, Unverified: 1}},
		{"c", Info{Promised: 4, flags: whole | IsCrashConsistent}, SnapshotSum{Count: 3, Promised: 7, PointInTime: 1, CrashConsistent: 1, Unverified: 1}},
		{"b", Info{Promised: 2, flags: HasRecord | IsUnverified}, SnapshotSum{Count: 3, Lost: 1, Promised: 7, PointInTime: 1, CrashConsistent: 1, Unverified: 1}},
		{"a", Info{flags: HasDirectory | HasDamage}, SnapshotSum{Count: 3, Lost: 2, Promised: 6, CrashConsistent: 1, Unverified: 1}},
		{"a", Info{}, SnapshotSum{Count: 2, Lost: 1, Promised: 6, CrashConsistent: 1, Unverified: 1}},
		{"b", Info{}, SnapshotSum{Count: 1, Promised: 4, CrashConsistent: 1}},
		{"c", Info{}, SnapshotSum{}},
	} {
		x.put(id(step.name), step.info)
		if x.snapshots != step.want {
			t.Errorf("after snapshot %s is %+v the sum is %+v, want %+v", step.name, step.info, x.snapshots, step.want)
		}
	}
}
