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
	seen := make(map[health.Reason]bool)
	for name, c := range map[string]struct {
		facts  health.Facts
		reason health.Reason // empty for a volume that is in order
		says   string
	}{
		"a healthy volume is in order":                  {healthy, "", "in order"},
		"a pool that does not serve":                    {with(func(f *health.Facts) { f.Pool = broken }), health.PoolNotServing, "cause"},
		"a damaged record":                              {with(func(f *health.Facts) { f.Damaged = broken }), health.RecordUnreadable, "record"},
		"a missing directory":                           {with(func(f *health.Facts) { f.Missing = true }), health.DirectoryMissing, "missing"},
		"an IO error":                                   {with(func(f *health.Facts) { f.IO = broken }), health.ReadFailed, "cause"},
		"a read-only pool":                              {with(func(f *health.Facts) { f.ReadOnly = true }), health.ReadOnly, "read-only"},
		"a limit that is not set":                       {with(func(f *health.Facts) { f.LimitDiffers = true }), health.LimitDiffers, "limit"},
		"a filesystem with errors":                      {with(func(f *health.Facts) { f.FilesystemErrors = 3 }), health.FilesystemErrors, "3 errors"},
		"a filesystem that an error made read-only":     {with(func(f *health.Facts) { f.FilesystemErrors, f.ReadOnly = 1, true }), health.ReadOnly, "read-only"},
		"a full volume on a filesystem with errors":     {with(func(f *health.Facts) { f.FilesystemErrors, f.FreeBytes = 1, 0 }), health.NoSpace, "space"},
		"a lost limit on a filesystem with errors":      {with(func(f *health.Facts) { f.FilesystemErrors, f.LimitDiffers = 1, true }), health.LimitDiffers, "limit"},
		"a file that is too short":                      {with(func(f *health.Facts) { f.Short = true }), health.FileShort, "smaller"},
		"quotas that are gone":                          {with(func(f *health.Facts) { f.LimitOff = "xfs" }), health.LimitOff, "xfs"},
		"subvolumes outside the limit":                  {with(func(f *health.Facts) { f.Outside = 2 }), health.OutsideLimit, "2 subvolumes"},
		"files outside the limit":                       {with(func(f *health.Facts) { f.Strays.Outside = 3 }), health.OutsideLimit, "3 files"},
		"no promise":                                    {with(func(f *health.Facts) { f.Unpromised = true }), "", "the volume has no record"},
		"a full volume":                                 {with(func(f *health.Facts) { f.FreeBytes = 0 }), health.NoSpace, "space"},
		"a volume with too little left to write":        {with(func(f *health.Facts) { f.FreeBytes, f.SizeBytes = 16<<10, 1<<30 }), health.NoSpace, "space"},
		"a small volume with as much left":              {with(func(f *health.Facts) { f.FreeBytes, f.SizeBytes = 16<<10, 64<<10 }), "", "in order"},
		"a volume with a large block left":              {with(func(f *health.Facts) { f.FreeBytes, f.SizeBytes = 64<<10, 1<<30 }), "", "in order"},
		"a volume without inodes":                       {with(func(f *health.Facts) { f.FreeInodes = 0 }), health.NoInodes, "inodes"},
		"an inline volume without its pod":              {with(func(f *health.Facts) { f.InlineUnpublished = true }), health.InlineUnpublished, "remove-inline"},
		"no inodes where they are not counted is fine":  {health.Facts{FreeBytes: 1}, "", "in order"},
		"space that was not asked for is not a finding": {health.Facts{FreeBytes: -1}, "", "in order"},
		"a promise that is not kept is reported":        {with(func(f *health.Facts) { f.Unenforced = true }), "", "not enforced"},
		"the pool outweighs the volume":                 {health.Facts{Pool: broken, Missing: true}, health.PoolNotServing, "pool"},
	} {
		t.Run(name, func(t *testing.T) {
			got := c.facts.Condition()
			if got.Reason != c.reason || got.Abnormal != (c.reason != "") || !strings.Contains(got.Message, c.says) {
				t.Errorf("condition %+v, want the reason %q and a message with %q", got, c.reason, c.says)
			}
			seen[got.Reason] = true
		})
	}
	for _, reason := range health.Reasons() {
		if !seen[reason] {
			t.Errorf("no fact leads to the reason %s", reason)
		}
	}
}
