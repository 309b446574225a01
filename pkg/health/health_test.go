package health_test

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func TestCondition(t *testing.T) {
	broken := errors.New("cause")
	// healthy is what a volume with space and inodes looks like.
	healthy := health.Facts{Room: health.Room{FreeBytes: 1, InodesCounted: true, FreeInodes: 1}}
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
		"a pool that hangs":                             {with(func(f *health.Facts) { f.Pool = fmt.Errorf("it: %w", hang.Stuck(1)) }), health.PoolHangs, "hangs"},
		"a pool that is not mounted":                    {with(func(f *health.Facts) { f.Pool = volume.PoolMissing("away") }), health.PoolMissing, "away"},
		"a pool whose disk fails":                       {with(func(f *health.Facts) { f.Pool = fmt.Errorf("read: %w", syscall.EIO) }), health.PoolFailing, "input/output"},
		"a read that failed":                            {with(func(f *health.Facts) { f.IO = broken }), health.ReadFailed, "cause"},
		"an IO error":                                   {with(func(f *health.Facts) { f.IO = fmt.Errorf("read: %w", syscall.EIO) }), health.DataUnreadable, "input/output"},
		"a wrong checksum":                              {with(func(f *health.Facts) { f.IO = syscall.EBADMSG }), health.DataUnreadable, "bad message"},
		"a quota that cannot be read":                   {with(func(f *health.Facts) { f.Uncounted = syscall.EIO }), health.ReadFailed, "input/output"},
		"a file that is missing":                        {with(func(f *health.Facts) { f.IO = fmt.Errorf("open: %w", volume.ErrLost) }), health.FileMissing, "open"},
		"a read-only pool":                              {with(func(f *health.Facts) { f.ReadOnly = true }), health.ReadOnly, "read-only"},
		"a limit that is not set":                       {with(func(f *health.Facts) { f.LimitDiffers = true }), health.LimitDiffers, "limit"},
		"a filesystem with errors":                      {with(func(f *health.Facts) { f.FilesystemErrors = 3 }), health.FilesystemErrors, "3 errors"},
		"a filesystem that an error made read-only":     {with(func(f *health.Facts) { f.FilesystemErrors, f.ReadOnly = 1, true }), health.ReadOnly, "read-only"},
		"a full volume on a filesystem with errors":     {with(func(f *health.Facts) { f.FilesystemErrors, f.FreeBytes = 1, 0 }), health.NoSpace, "space"},
		"a lost limit on a filesystem with errors":      {with(func(f *health.Facts) { f.FilesystemErrors, f.LimitDiffers = 1, true }), health.LimitDiffers, "limit"},
		"a file that is too short":                      {with(func(f *health.Facts) { f.Short = true }), health.FileShort, "smaller"},
		"quotas that are gone":                          {with(func(f *health.Facts) { f.LimitOff = "xfs" }), health.LimitOff, "xfs"},
		"subvolumes outside the limit":                  {with(func(f *health.Facts) { f.Outside = 2 }), health.OutsideLimit, "2 subvolumes that were made in the volume are outside"},
		"a subvolume outside the limit":                 {with(func(f *health.Facts) { f.Outside = 1 }), health.OutsideLimit, "1 subvolume that was made in the volume is outside"},
		"a file outside the limit":                      {with(func(f *health.Facts) { f.Strays.Outside = 1 }), health.OutsideLimit, "1 file or directory of the volume is outside its limit, because its owner"},
		"an error of the filesystem":                    {with(func(f *health.Facts) { f.FilesystemErrors = 1 }), health.FilesystemErrors, "has counted 1 error,"},
		"errors of the filesystem":                      {with(func(f *health.Facts) { f.FilesystemErrors = 2 }), health.FilesystemErrors, "has counted 2 errors,"},
		"files outside the limit":                       {with(func(f *health.Facts) { f.Strays.Outside = 3 }), health.OutsideLimit, "3 files"},
		"no promise":                                    {with(func(f *health.Facts) { f.Unpromised = true }), "", "the volume has no record"},
		"a full volume":                                 {with(func(f *health.Facts) { f.FreeBytes = 0 }), health.NoSpace, "space"},
		"a volume with too little left to write":        {with(func(f *health.Facts) { f.FreeBytes, f.SizeBytes = 16<<10, 1<<30 }), health.NoSpace, "space"},
		"a small volume with as much left":              {with(func(f *health.Facts) { f.FreeBytes, f.SizeBytes = 16<<10, 64<<10 }), "", "in order"},
		"a volume with a large block left":              {with(func(f *health.Facts) { f.FreeBytes, f.SizeBytes = 64<<10, 1<<30 }), "", "in order"},
		"a volume without inodes":                       {with(func(f *health.Facts) { f.FreeInodes = 0 }), health.NoInodes, "inodes"},
		"an inline volume without its pod":              {with(func(f *health.Facts) { f.InlineUnpublished = true }), health.InlineUnpublished, "remove-inline"},
		"no inodes where they are not counted is fine":  {health.Facts{Room: health.Room{FreeBytes: 1}}, "", "in order"},
		"space that was not asked for is not a finding": {health.Facts{Room: health.Room{FreeBytes: -1}}, "", "in order"},
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

func TestConditions(t *testing.T) {
	broken := errors.New("cause")
	for name, c := range map[string]struct {
		facts health.Facts
		want  []health.Reason
	}{
		"nothing": {health.Facts{Room: health.Room{FreeBytes: 1}}, nil},
		"all that the pool and the volume have": {
			health.Facts{
				Damaged: broken, ReadOnly: true, Short: true, Limit: health.Limit{LimitDiffers: true, LimitOff: "xfs", Outside: 1},
				Room: health.Room{InodesCounted: true}, InlineUnpublished: true, FilesystemErrors: 1,
			},
			[]health.Reason{
				health.RecordUnreadable, health.FileShort, health.ReadOnly, health.InlineUnpublished, health.LimitDiffers, health.LimitOff,
				health.OutsideLimit, health.NoSpace, health.NoInodes, health.FilesystemErrors,
			},
		},
		"of two ways out of the limit one":              {health.Facts{Room: health.Room{FreeBytes: 1}, Limit: health.Limit{Outside: 1, Strays: quota.Strays{Outside: 1}}}, []health.Reason{health.OutsideLimit}},
		"of a pool that does not serve what memory has": {health.Facts{Pool: broken, Missing: true}, []health.Reason{health.PoolNotServing, health.DirectoryMissing}},
		"of what is lost no space":                      {health.Facts{Missing: true, FilesystemErrors: 1}, []health.Reason{health.DirectoryMissing, health.FilesystemErrors}},
		"of a quota that cannot be read no space":       {health.Facts{Uncounted: broken, ReadOnly: true}, []health.Reason{health.ReadFailed, health.ReadOnly}},
		"of two things that cannot be read one":         {health.Facts{IO: broken, Uncounted: broken}, []health.Reason{health.ReadFailed}},
		"of what cannot be read no space":               {health.Facts{IO: broken, ReadOnly: true}, []health.Reason{health.ReadFailed, health.ReadOnly}},
	} {
		t.Run(name, func(t *testing.T) {
			var got []health.Reason
			for _, condition := range c.facts.Conditions() {
				got = append(got, condition.Reason)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("the reasons are %q, want %q", got, c.want)
			}
		})
	}
}

// CSI takes 16 entries of a volume. Of the pool's reasons it has one.
func TestStatusOfEachReason(t *testing.T) {
	lost, camel := 0, regexp.MustCompile(`^([A-Z][a-z]+)+$`)
	for _, reason := range health.Reasons() {
		if !camel.MatchString(string(reason)) {
			t.Errorf("the reason %q is not in camel case", reason)
		}
		if reason.OfPool() && reason.Status() != health.Inaccessible {
			t.Errorf("the status of %s is %d: a pool that does not serve has lost nothing", reason, reason.Status())
		}
		if reason.Status() == health.DataLoss {
			lost++
		}
	}
	usable := slices.IndexFunc(health.Reasons(), func(r health.Reason) bool { return r.Status() == health.Degraded })
	for _, reason := range health.Reasons()[usable:] {
		if reason.Status() != health.Degraded {
			t.Errorf("%s comes after %s, of which a volume can be used", reason, health.Reasons()[usable])
		}
	}
	if lost != 4 {
		t.Errorf("%d reasons mean that data is gone, want 4", lost)
	}
	if all := len(health.Reasons()) - 3; all > 16 {
		t.Errorf("a volume can have %d reasons, want at most 16", all)
	}
}
