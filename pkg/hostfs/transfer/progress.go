package transfer

import "time"

// A meter counts what one side has done, and calls Options.Progress a few times a second.
type meter struct {
	done  Progress
	call  func(Progress) // may be nil
	shown time.Time
}

func (m *meter) show() {
	if m.call == nil || time.Since(m.shown) < 100*time.Millisecond {
		return
	}
	m.shown = time.Now()
	m.call(m.done)
}
