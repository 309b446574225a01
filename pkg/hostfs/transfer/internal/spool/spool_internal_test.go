package spool

import (
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestSpool(t *testing.T) {
	d := must.Value(dir.Open(t.TempDir()))(t)
	defer func() { must.Succeed(t, d.Close()) }()
	s := New(d)
	defer s.Close()
	s.limit = 10
	var want []uint64
	check := func(from int) {
		t.Helper()
		var got []uint64
		must.Succeed(t, s.Each(int64(from), func(number uint64) { got = append(got, number) }))
		if !slices.Equal(got, want[from:]) || s.Size() != int64(len(want)) {
			t.Errorf("from %d: %d, want %d", from, got, want[from:])
		}
	}
	for i := range uint64(5000) {
		want = append(want, i*i, i)
		must.Succeed(t, s.Push(i*i, i))
	}
	check(0)
	check(4321)
	for _, to := range []int{9995, 4321, 4320, 7, 0} {
		want = want[:to]
		s.Cut(int64(to))
		check(0)
		check(to)
		for i := range uint64(23) {
			want = append(want, i)
			must.Succeed(t, s.Push(i))
		}
		check(to)
		want = want[:to]
		s.Cut(int64(to))
	}
	if found, err := d.Exists("spool"); found || err != nil {
		t.Errorf("the spool has a name: %v", err)
	}
}
