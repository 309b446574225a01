package quota

import (
	"slices"
	"testing"
)

// What fits on devices of these sizes, in each profile.
func TestMostOnDevices(t *testing.T) {
	for _, test := range []struct {
		of   profile
		free []int64
		want int64
	}{
		{0, []int64{40, 10, 10}, 60},
		{isDup, []int64{40, 10, 10}, 30},
		{isRaid0, []int64{40, 10, 20}, 50},
		{isRaid0, []int64{40}, 0},
		{isRaid1, []int64{30, 30}, 30},
		{isRaid1, []int64{10, 40, 10}, 20},
		{isRaid1, []int64{20, 20, 20}, 30},
		{isRaid1, []int64{40}, 0},
		{isRaid1C3, []int64{40, 30, 10}, 10},
		{isRaid1C3, []int64{30, 30, 30, 30}, 40},
		{isRaid1C3, []int64{40, 40, 10, 10}, 20},
		{isRaid1C4, []int64{40, 40, 40, 10, 5}, 15},
		{isRaid1C4, []int64{40, 40, 40}, 0},
		{isRaid10, []int64{40, 20, 20, 20}, 40},
		{isRaid10, []int64{20, 20, 20}, 0},
		{isRaid5, []int64{40, 20, 10}, 30},
		{isRaid5, []int64{20, 20, 20}, 40},
		{isRaid6, []int64{20, 20, 20, 20}, 40},
		{isRaid6, []int64{40, 20, 0}, 0},
	} {
		before := slices.Clone(test.free)
		if got := test.of.most(test.free); got != test.want {
			t.Errorf("profile %#x on devices of %d takes %d, want %d", test.of, test.free, got, test.want)
		}
		if !slices.Equal(before, test.free) {
			t.Errorf("profile %#x has changed %d to %d", test.of, before, test.free)
		}
	}
}

// What trees can take of two disks depends on these, unless data is where they are, or each chunk of them is on one disk.
func TestRoomOfTrees(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	disks := []device{{Total: 100*gib + mib, Used: 10 * gib}, {Total: 40*gib + mib, Used: 30 * gib}, {Total: 90 * gib}}
	disks[0].Path[0], disks[1].Path[0] = '/', '/' // the third is missing
	for name, test := range map[string]struct {
		found []chunks
		want  Room
	}{
		"in one chunk":        {[]chunks{{isData | isMetadata | isRaid1, gib, 0}}, Room{}},
		"with the data":       {[]chunks{{isData | isRaid1, gib, 0}, {isMetadata | isRaid1, gib, 0}}, Room{}},
		"on one disk":         {[]chunks{{isData | isRaid1, gib, 0}, {isMetadata, gib, 0}}, Room{}},
		"twice on one disk":   {[]chunks{{isData, gib, 0}, {isMetadata | isDup, gib, 0}}, Room{}},
		"on two disks":        {[]chunks{{isData, gib, 0}, {isMetadata | isRaid1, gib, gib / 2}}, Room{true, 10*gib + gib/2, 40 * gib, 1}},
		"data twice":          {[]chunks{{isData | isDup, gib, 0}, {isMetadata | isRaid1, gib, gib}}, Room{true, 10 * gib, 40 * gib, 2}},
		"data with parity":    {[]chunks{{isData | isRaid5, gib, 0}, {isMetadata | isRaid1, gib, gib}}, Room{true, 10 * gib, 40 * gib, 2}},
		"on three":            {[]chunks{{isData, gib, 0}, {isMetadata | isRaid1C3, gib, gib}}, Room{true, 0, 0, 1}},
		"in stripes":          {[]chunks{{isData, gib, 0}, {isMetadata | isRaid0, gib, gib}}, Room{true, 20 * gib, 0, 1}},
		"while one converts":  {[]chunks{{isData | isRaid1, gib, 0}, {isMetadata | isRaid1, gib, gib}, {isMetadata, gib, gib}}, Room{true, 10 * gib, 40 * gib, 2}},
		"the kernel's own is": {[]chunks{{isData, gib, 0}, {isMetadata | isRaid1, gib, gib}, {isReserve | isMetadata, gib, 0}}, Room{true, 10 * gib, 40 * gib, 1}},
	} {
		all := spaces{Slots: 32, Total: uint64(len(test.found))}
		copy(all.Spaces[:], test.found)
		var got Room
		if all.bounded() {
			got = all.room(disks)
		}
		if got != test.want {
			t.Errorf("trees %s have %+v, want %+v", name, got, test.want)
		}
	}
}
