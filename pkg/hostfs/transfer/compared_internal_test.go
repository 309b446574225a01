package transfer

import (
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer/internal/spool"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// Links are compared in parts, so that a table of all need not fit into memory.
func TestLinksAreComparedInParts(t *testing.T) {
	d := must.Value(dir.Open(t.TempDir()))(t)
	defer func() { must.Succeed(t, d.Close()) }()
	const many = 3*linksAtOnce + 5
	for name, test := range map[string]struct {
		last [2]uint64
		want int64
	}{
		"the same":                      {[2]uint64{7, 1007}, 0},
		"one of the source is two":      {[2]uint64{7, 5}, 1},
		"two of the source are one":     {[2]uint64{many + 1, 1007}, 1},
		"names of others are exchanged": {[2]uint64{7, 1008}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			c := &compared{pairs: pairs{spool.New(d)}}
			defer c.pairs.all.Close()
			for i := range uint64(many) {
				must.Succeed(t, c.pairs.add(i, i+1000))
			}
			must.Succeed(t, c.pairs.add(test.last[0], test.last[1]), c.links())
			if c.found.count != test.want {
				t.Errorf("found %d differences, want %d", c.found.count, test.want)
			}
		})
	}
}
