package progress_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster/progress"
)

func TestUntilConditionHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		start := time.Now()
		err := progress.New(&out).Until(t.Context(), time.Minute, "tea", func(context.Context) (string, error) {
			if time.Since(start) > 10*time.Second {
				return "", nil
			}
			return "brewing", nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Count(out.String(), "tea: brewing"); got != 1 {
			t.Errorf("what does not change is printed %d times, want once:\n%s", got, &out)
		}
	})
}

func TestUntilTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		err := progress.New(&strings.Builder{}).Until(t.Context(), time.Minute, "tea", func(context.Context) (string, error) { return "cold", nil })
		if err == nil || !strings.Contains(err.Error(), "60 s: cold") {
			t.Errorf("the error is %v, want it to say what was seen last", err)
		}
	})
}

func TestUntilError(t *testing.T) {
	broken := errors.New("the kettle is broken")
	err := progress.New(&strings.Builder{}).Until(t.Context(), time.Minute, "tea", func(context.Context) (string, error) { return "", broken })
	if !errors.Is(err, broken) {
		t.Errorf("the error is %v, want %v", err, broken)
	}
}

// A client that is asked to wait longer than it may says only that: what it was asked
// for is what a person needs to know.
func TestUntilErrorNamesLastState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		seen := 0
		err := progress.New(&strings.Builder{}).Until(t.Context(), time.Minute, "tea", func(context.Context) (string, error) {
			if seen++; seen > 3 {
				return "", errors.New("the kettle is broken")
			}
			return "brewing", nil
		})
		if err == nil || !strings.Contains(err.Error(), "brewing") {
			t.Errorf("the error is %v, want it to say what was seen before", err)
		}
	})
}

func TestSlowerMultipliesTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		log := progress.New(&strings.Builder{}).Slower(3)
		err := log.Until(t.Context(), time.Minute, "tea", func(context.Context) (string, error) { return "cold", nil })
		if took := time.Since(start); err == nil || took != 3*time.Minute {
			t.Errorf("gave up after %v with %v, want 3 minutes", took, err)
		}
	})
}
