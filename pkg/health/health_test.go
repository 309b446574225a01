package health_test

import (
	"errors"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/health"
)

func TestCondition(t *testing.T) {
	broken := errors.New("cause")
	// healthy is what a volume with space and inodes looks like.
	healthy := health.Facts{FreeBytes: 1, InodesCounted: true, FreeInodes: 1}
	with := func(change func(*health.Facts)) health.Facts {
		f := healthy
		change(&f)
		return f
	}
	for name, c := range map[string]struct {
		facts    health.Facts
		abnormal bool
		says     string
	}{
		"a healthy volume is in order":                  {healthy, false, "in order"},
		"a pool that does not serve":                    {with(func(f *health.Facts) { f.Pool = broken }), true, "cause"},
		"a damaged record":                              {with(func(f *health.Facts) { f.Damaged = broken }), true, "record"},
		"a missing directory":                           {with(func(f *health.Facts) { f.Missing = true }), true, "missing"},
		"an IO error":                                   {with(func(f *health.Facts) { f.IO = broken }), true, "cause"},
		"a read-only pool":                              {with(func(f *health.Facts) { f.ReadOnly = true }), true, "read-only"},
		"a limit that is not set":                       {with(func(f *health.Facts) { f.LimitDiffers = true }), true, "limit"},
		"a full volume":                                 {with(func(f *health.Facts) { f.FreeBytes = 0 }), true, "space"},
		"a volume without inodes":                       {with(func(f *health.Facts) { f.FreeInodes = 0 }), true, "inodes"},
		"no inodes where they are not counted is fine":  {health.Facts{FreeBytes: 1}, false, "in order"},
		"space that was not asked for is not a finding": {health.Facts{FreeBytes: -1}, false, "in order"},
		"a promise that is not kept is told":            {with(func(f *health.Facts) { f.Unenforced = true }), false, "not enforced"},
		"the pool outweighs the volume":                 {health.Facts{Pool: broken, Missing: true}, true, "pool"},
	} {
		t.Run(name, func(t *testing.T) {
			got := c.facts.Condition()
			if got.Abnormal != c.abnormal || !strings.Contains(got.Message, c.says) {
				t.Errorf("condition %+v, want abnormal %v and a message with %q", got, c.abnormal, c.says)
			}
		})
	}
}
