package transfer

import (
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestSpool(t *testing.T) {
	d := must.Value(dir.Open(t.TempDir()))(t)
	defer func() { must.Succeed(t, d.Close()) }()
	s := newSpool(d)
	defer s.close()
	s.limit = 10
	var want []uint64
	check := func(from int) {
		t.Helper()
		var got []uint64
		must.Succeed(t, s.each(int64(from), func(number uint64) { got = append(got, number) }))
		if !slices.Equal(got, want[from:]) || s.size() != int64(len(want)) {
			t.Errorf("from %d: %d, want %d", from, got, want[from:])
		}
	}
	for i := range uint64(5000) {
		want = append(want, i*i, i)
		must.Succeed(t, s.push(i*i, i))
	}
	check(0)
	check(4321)
	for _, to := range []int{9995, 4321, 4320, 7, 0} {
		want = want[:to]
		s.cut(int64(to))
		check(0)
		check(to)
		for i := range uint64(23) {
			want = append(want, i)
			must.Succeed(t, s.push(i))
		}
		check(to)
		want = want[:to]
		s.cut(int64(to))
	}
	if found, err := d.Exists("spool"); found || err != nil {
		t.Errorf("the spool has a name: %v", err)
	}
}

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
			c := &compared{pairs: pairs{newSpool(d)}}
			defer c.pairs.all.close()
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
