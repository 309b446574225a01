package clone

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestSetBack(t *testing.T) {
	const ms = time.Millisecond
	start := time.Now()
	at := func(filesystem, before, after time.Duration) moment {
		changed, err := unix.TimeToTimespec(start.Add(filesystem))
		if err != nil {
			t.Fatal(err)
		}
		return moment{set: true, changed: changed, before: start.Add(before), after: start.Add(after)}
	}
	for _, tt := range []struct {
		name         string
		first, later moment
		want         bool
	}{
		{"both clocks agree", at(0, 0, 0), at(100*ms, 100*ms, 100*ms), false},
		{"the clock of the filesystem is some ticks late", at(0, 0, 0), at(85*ms, 100*ms, 100*ms), false},
		{"it was set back", at(0, 0, 0), at(50*ms, 100*ms, 100*ms), true},
		{"it was set forward", at(0, 0, 0), at(time.Hour, 100*ms, 100*ms), false},
		{"the process waited before the file was made", at(60*ms, 0, 60*ms), at(100*ms, 100*ms, 100*ms), false},
		{"and afterwards", at(0, 0, 60*ms), at(40*ms, 40*ms, 100*ms), false},
		{"it waited, and the clock was set back", at(60*ms, 0, 60*ms), at(60*ms, 100*ms, 100*ms), true},
	} {
		if got := tt.first.setBack(tt.later); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
