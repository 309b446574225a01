package quota

import "testing"

func TestTrees(t *testing.T) {
	const mib, gib = 1 << 20, 1 << 30
	reserve := chunks{isReserve | isMetadata, 4 * mib, 0}
	for name, test := range map[string]struct {
		found []chunks
		size  int64
		want  Trees
	}{
		"twice on one disk": {
			[]chunks{{isData, gib, 5 * mib}, {isMetadata | isDup, 256 * mib, 56 * mib}, reserve}, 100 * gib,
			Trees{Copies: 2, Reserve: 2*(512*mib+gib) + gib, Spare: 400 * mib, Uncounted: 2*56*mib + 4*mib},
		},
		"once": {
			[]chunks{{isData, gib, 0}, {isMetadata, 256 * mib, 56 * mib}, reserve}, 32 * gib,
			Trees{Copies: 1, Reserve: 512*mib + 256*mib + gib, Spare: 200 * mib, Uncounted: 60 * mib},
		},
		"data and trees on two disks": {
			[]chunks{{isData | isRaid1, gib, 0}, {isMetadata | isRaid1, 256 * mib, 56 * mib}}, 32 * gib,
			Trees{Copies: 1, Reserve: 512*mib + 256*mib + gib, Spare: 200 * mib, Uncounted: 56 * mib},
		},
		"in the same chunks": {[]chunks{{isData | isMetadata, gib, 120 * mib}, reserve}, 3200 * mib, Trees{Copies: 1, Reserve: 356 * mib, Uncounted: 14 * mib}},
	} {
		all := spaces{Slots: 32, Total: uint64(len(test.found))}
		copy(all.Spaces[:], test.found)
		if got := all.trees(test.size); got != test.want {
			t.Errorf("trees %s need %+v, want %+v", name, got, test.want)
		}
	}
}
