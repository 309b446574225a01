package loop_test

import (
	"strconv"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func BenchmarkAttachAndDetach(b *testing.B) {
	for name, o := range map[string]loop.Options{"": {}, "with discards": {Discard: true}} {
		b.Run(name, func(b *testing.B) {
			k := kernel(b)
			f := file(b, open(b, testenv.Tmpfs(b, 64*mib)), "a", mib)
			for b.Loop() {
				d, err := k.Attach(f, o)
				must.Succeed(b, err)
				must.Succeed(b, k.Detach(b.Context(), d))
			}
		})
	}
}

// What a second target of a device costs, and the statistics of one.
func BenchmarkAmongOthers(b *testing.B) {
	for _, others := range []int{0, 100} {
		k := kernel(b)
		root := open(b, testenv.Tmpfs(b, 64*mib))
		f := file(b, root, "a", mib)
		d := attach(b, k, f, loop.Options{})
		for i := range others {
			attach(b, k, file(b, root, strconv.Itoa(i), mib), loop.Options{})
		}
		b.Run("attach again/"+strconv.Itoa(others), func(b *testing.B) {
			for b.Loop() {
				_, err := k.Attach(f, loop.Options{})
				must.Succeed(b, err)
			}
		})
		b.Run("inspect/"+strconv.Itoa(others), func(b *testing.B) {
			for b.Loop() {
				_, err := k.Inspect(d.Name)
				must.Succeed(b, err)
			}
		})
	}
}
