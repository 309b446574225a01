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
		watch := func(d time.Duration) {
			for range d / (10 * time.Second) {
				time.Sleep(10 * time.Second)
				signs.Look(true)
			}
		}
		signs.Look(true)
		want("a", "1970", 0)
		watch(time.Minute)
		want("a", "1970", time.Minute)
		want("b", "2100", 0)
		watch(time.Minute)
		want("a", "1969", 0) // a clock that was set back
		want("b", "2100", time.Minute)
		watch(time.Minute)
		want("a", "1969", time.Minute)
		want("b", "2100", 2*time.Minute)
		for within, is := range map[time.Duration]bool{2 * time.Minute: false, 2*time.Minute + 1: true} {
			if got := signs.Within(within)("b", "2100"); got != is {
				t.Errorf("b is taken to be alive within %v: %v, want %v", within, got, is)
			}
		}
	})
}

// What counts is the time between two looks that saw the signs, and by which this driver could show its own.
func TestSignsAgeOnlyWhileTheyAreWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var signs store.Signs
		look := func(after time.Duration, able bool, want time.Duration) {
			t.Helper()
			time.Sleep(after)
			signs.Look(able)
			if got := signs.Unchanged("a", "sign"); got != want {
				t.Errorf("unchanged for %v, want %v", got, want)
			}
		}
		look(time.Hour, true, 0)
		look(10*time.Second, true, 10*time.Second)
		look(time.Hour, true, 10*time.Second) // nothing answered
		look(10*time.Second, true, 20*time.Second)
		look(10*time.Second, false, 20*time.Second) // read-only
		look(10*time.Second, false, 20*time.Second)
		look(10*time.Second, true, 20*time.Second)
		look(20*time.Second, true, 40*time.Second)
		time.Sleep(9 * time.Second)
		signs.See("b", "sign") // by a call
		look(time.Second, true, 50*time.Second)
		if got := signs.Unchanged("b", "sign"); got != time.Second {
			t.Errorf("what a call has seen first a second ago is unchanged for %v", got)
		}
	})
}
