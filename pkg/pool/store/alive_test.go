package store_test

import (
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
)

func TestUnchanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var signs store.Signs
		want := func(of, sign string, want time.Duration) {
			t.Helper()
			if got := signs.Unchanged(of, sign); got != want {
				t.Errorf("%s with the sign %q is unchanged for %v, want %v", of, sign, got, want)
			}
		}
		want("a", "1970", 0)
		time.Sleep(time.Minute)
		want("a", "1970", time.Minute)
		want("b", "2100", 0)
		time.Sleep(time.Minute)
		want("a", "1969", 0) // a clock that was set back
		want("b", "2100", time.Minute)
		time.Sleep(time.Minute)
		want("a", "1969", time.Minute)
		want("b", "2100", 2*time.Minute)
		for within, is := range map[time.Duration]bool{2 * time.Minute: false, 2*time.Minute + 1: true} {
			if got := signs.Within(within)("b", "2100"); got != is {
				t.Errorf("b is taken to be alive within %v: %v, want %v", within, got, is)
			}
		}
	})
}
