package serve_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestLocks(t *testing.T) {
	var l serve.Locks[string]
	type lock func(string) (func(), error)
	take := func(title string, by lock, want error) (undo func()) {
		t.Helper()
		undo, err := by("a")
		if !errors.Is(err, want) {
			t.Fatalf("%s: %v, want %v", title, err, want)
		}
		return undo
	}
	unlock := take("lock", l.TryLock, nil)
	take("second lock", l.TryLock, volume.ErrBusy)
	take("share of what is locked", l.TryShare, volume.ErrBusy)
	other := must.Value(l.TryLock("b"))(t)
	other()
	unlock()
	one := take("share", l.TryShare, nil)
	two := take("second share", l.TryShare, nil)
	take("lock of what is shared", l.TryLock, volume.ErrBusy)
	take("alone, with another share", l.TryAlone, volume.ErrBusy)
	two()
	done := take("alone", l.TryAlone, nil)
	take("share of what one has alone", l.TryShare, volume.ErrBusy)
	done()
	take("share again", l.TryShare, nil)()
	one()
	take("lock of what is free again", l.TryLock, nil)()
}

// What its caller knows nothing of makes neither a call return ErrBusy, nor a check believe that a call is at work.
func TestCallsAndChecksWaitForChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l serve.Locks[string]
		for name, lock := range map[string]func(string) (func(), error){"lock": l.TryLock, "share": l.TryShare, "check": l.TryCheck} {
			end := must.Value(l.TryCheck("a"))(t)
			had := make(chan error, 1)
			go func() {
				unlock, err := lock("a")
				if err == nil {
					unlock()
				}
				had <- err
			}()
			synctest.Wait()
			if len(had) > 0 {
				t.Errorf("%s during a check: %v", name, <-had)
				continue
			}
			end()
			must.Succeed(t, <-had)
		}
		for name, call := range map[string]func(string) (func(), error){"lock": l.TryLock, "share": l.TryShare} {
			unlock := must.Value(call("a"))(t)
			if _, err := l.TryCheck("a"); !errors.Is(err, volume.ErrBusy) {
				t.Errorf("check during a %s: %v, want %v", name, err, volume.ErrBusy)
			}
			unlock()
		}
	})
}

func TestCallDoesNotWaitForHangingCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l serve.Locks[string]
		end := must.Value(l.TryCheck("a"))(t)
		defer end()
		if _, err := l.TryLock("a"); !errors.Is(err, volume.ErrUnavailable) {
			t.Errorf("lock: %v, want %v", err, volume.ErrUnavailable)
		}
	})
}

func TestTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var turns serve.Turns[string]
		end := must.Value(turns.Wait(t.Context(), "a"))(t)
		ended, cancel := context.WithCancelCause(t.Context())
		reason := errors.New("the call is over")
		cancel(reason)
		if _, err := turns.Wait(ended, "a"); !errors.Is(err, reason) {
			t.Errorf("waited with an ended context: %v, want %v", err, reason)
		}
		had := make(chan int, 2)
		for i := range 2 {
			go func() {
				end, err := turns.Wait(context.Background(), "a")
				if err != nil {
					t.Error(err)
					return
				}
				had <- i
				end()
			}()
		}
		synctest.Wait()
		if len(had) > 0 {
			t.Error("two had the turn at once")
		}
		end()
		synctest.Wait()
		if len(had) != 2 {
			t.Errorf("%d of 2 who waited had their turn", len(had))
		}
	})
}
