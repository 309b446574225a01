package driver_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A patient is a driver with one volume, "vol", that is published.
type patient struct {
	*harness
	pool   string // its directory
	quota  *quotatest.Fake
	broken atomic.Bool  // reading a quota fails
	nested atomic.Int64 // subvolumes that users made
	errors int64
}

// ailment is a way for a volume to be abnormal, or not to be.
type ailment struct {
	reason  health.Reason // empty for a volume that is in order
	says    string
	options string // of the pool
	block   bool
	keeper  quota.Kind // of sizes; empty for XFS
	// plain is a volume that came as a directory.
	plain bool
	// before is done between two starts of the driver, and after when the volume is
	// published.
	before, after func(t *testing.T, p *patient)
}

var errBroken = errors.New("the quota cannot be read")

// sick has the quotas of a fake, unless reading them fails.
type sick struct {
	quota.Facility
	patient *patient
}

func (s sick) Usage(d *dir.Dir, id quota.ID) (quota.Usage, error) {
	if s.patient.broken.Load() {
		return quota.Usage{}, errBroken
	}
	return s.Facility.Usage(d, id)
}

func (s sick) Outside(*dir.Dir) (int, error) { return int(s.patient.nested.Load()), nil }

func (p *patient) start(t *testing.T, options string) {
	t.Helper()
	p.harness = newHarness(t, setup{
		pools: `[{"name":"local","path":"` + p.pool + `"` + options + `}]`,
		options: func(o *pool.Options) {
			o.DetectQuota = func(*dir.Dir) (quota.Facility, error) {
				if p.quota == nil {
					return nil, quota.ErrNone
				}
				return sick{p.quota, p}, nil
			}
			o.CountErrors = func(*dir.Dir) (int64, error) { return p.errors, nil }
		},
	})
}

func newPatient(t *testing.T, c ailment) *patient {
	t.Helper()
	p := &patient{pool: testenv.Tmpfs(t, 64*mib), quota: &quotatest.Fake{As: c.keeper}}
	p.start(t, c.options)
	kind := writer()
	if c.block {
		kind = block()
	}
	if c.plain {
		must.Succeed(t, os.Mkdir(filepath.Join(p.pool, "vol"), 0o777))
	} else {
		_, err := p.CreateVolume(t.Context(), createRequest("vol", func(req *csi.CreateVolumeRequest) {
			req.VolumeCapabilities = []*csi.VolumeCapability{kind}
		}))
		must.Succeed(t, err)
	}
	if c.before != nil {
		must.Succeed(t, p.set.Close(t.Context()))
		c.before(t, p)
		p.start(t, c.options)
	}
	_, err := p.NodePublishVolume(t.Context(), publishRequest("vol", p.target("vol"), func(req *csi.NodePublishVolumeRequest) {
		req.VolumeCapability = kind
	}))
	must.Succeed(t, err)
	if c.after != nil {
		c.after(t, p)
	}
	return p
}

// open opens the volume's directory until the test ends.
func (p *patient) open(t *testing.T) *dir.Dir {
	t.Helper()
	d := must.Value(dir.Open(filepath.Join(p.pool, "vol")))(t)
	t.Cleanup(func() { must.Succeed(t, d.Close()) })
	return d
}

func (p *patient) in(elements ...string) string {
	return filepath.Join(append([]string{p.pool}, elements...)...)
}

func removeLimit(t *testing.T, p *patient) {
	t.Helper()
	d := p.open(t)
	id := must.Value(p.quota.IDOf(d))(t)
	must.Succeed(t, p.quota.Limit(d, id, quota.Limit{}))
}

// putPlain puts a directory in the volume's place as a program makes one that copies files.
func putPlain(t *testing.T, p *patient) {
	t.Helper()
	must.Succeed(t, os.Rename(p.in("vol"), p.in(".aside")))
	must.Succeed(t, os.Mkdir(p.in("vol"), 0o777))
}

var ailments = map[string]ailment{
	"a volume that is in order":      {says: "in order"},
	"a block volume that is":         {block: true, says: "in order"},
	"one without enforcement":        {options: `,"enforcement":"none"`, says: "not enforced"},
	"one without a promise":          {plain: true, says: "the volume has no record"},
	"a thin one that is in order":    {block: true, options: `,"allocation":"thin"`, says: "in order"},
	"a volume with space and inodes": {options: `,"bytesPerInode":1048576`, says: "in order"},

	"a block volume of a pool that went away": {block: true, reason: health.PoolMissing, says: "not the pool", after: func(t *testing.T, p *patient) {
		must.Succeed(t, os.Rename(p.in(".hostpath-provisioner"), p.in("away")))
	}},
	"a volume whose directory is a file": {reason: health.DirectoryMissing, says: "missing", after: func(t *testing.T, p *patient) {
		must.Succeed(t, errors.Join(os.Remove(p.in("vol")), os.WriteFile(p.in("vol"), nil, 0o600)))
	}},
	"one whose record is unreadable too": {reason: health.RecordUnreadable, says: "record", after: func(t *testing.T, p *patient) {
		must.Succeed(t, os.WriteFile(p.in(".hostpath-provisioner/volumes/vol.json"), []byte("{"), 0o600))
		must.Succeed(t, os.Remove(p.in("vol")))
	}},
	"a quota that cannot be read": {reason: health.ReadFailed, says: errBroken.Error(), after: func(_ *testing.T, p *patient) {
		p.broken.Store(true)
	}},
	"a block volume without its file": {block: true, reason: health.FileMissing, says: "disk.img", after: func(t *testing.T, p *patient) {
		must.Succeed(t, os.Remove(p.in("vol", "disk.img")))
	}},
	"a filesystem that counted errors": {reason: health.FilesystemErrors, says: "7 errors", before: func(_ *testing.T, p *patient) {
		p.errors = 7
	}},
	"a lost volume of a pool that became read-only": {reason: health.DirectoryMissing, says: "missing", after: func(t *testing.T, p *patient) {
		must.Succeed(t, os.Rename(p.in("vol"), p.in(".aside")))
		must.Succeed(t, syscall.Mount("", p.pool, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	}},
	"a block volume whose file was cut": {block: true, reason: health.FileShort, says: "smaller", after: func(t *testing.T, p *patient) {
		must.Succeed(t, os.Truncate(p.in("vol", "disk.img"), mib))
	}},
	"a limit that was changed": {reason: health.LimitDiffers, says: "limit", after: func(t *testing.T, p *patient) {
		d := p.open(t)
		id := must.Value(p.quota.IDOf(d))(t)
		must.Succeed(t, p.quota.Limit(d, id, quota.Limit{Bytes: 8 * mib}))
	}},
	"a limit that was removed":                     {reason: health.LimitDiffers, says: "limit is missing", after: removeLimit},
	"a limit that was removed from a subvolume":    {keeper: quota.Btrfs, reason: health.LimitDiffers, says: "limit is missing", after: removeLimit},
	"a limit that was removed from a block volume": {block: true, reason: health.LimitDiffers, says: "limit is missing", after: removeLimit},
	"a directory that lost its project id": {reason: health.LimitDiffers, says: "limit is missing", after: func(t *testing.T, p *patient) {
		must.Succeed(t, p.quota.Drop(p.open(t)))
	}},
	"a plain directory in its place":                {reason: health.LimitDiffers, says: "limit is missing", before: putPlain},
	"a plain directory in the place of a subvolume": {keeper: quota.Btrfs, reason: health.LimitDiffers, says: "limit is missing", before: putPlain},
	"a subvolume of its user": {keeper: quota.Btrfs, reason: health.OutsideLimit, says: "1 subvolume that", after: func(_ *testing.T, p *patient) {
		p.nested.Store(1)
	}},
	"quotas that were switched off": {reason: health.LimitOff, says: "xfs", before: func(_ *testing.T, p *patient) {
		p.quota = nil
	}},
	"a thin block volume in a pool that is full": {block: true, options: `,"allocation":"thin"`, reason: health.NoSpace, says: "no space", after: func(t *testing.T, p *patient) {
		if err := os.WriteFile(p.in("foreign"), make([]byte, 64*mib), 0o600); !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("filling the pool ends with %v", err)
		}
	}},
	"a volume without inodes": {options: `,"bytesPerInode":2097152`, reason: health.NoInodes, says: "no inodes", after: func(t *testing.T, p *patient) {
		for range 2 {
			f := must.Value(p.quota.Create(p.open(t)))(t)
			must.Succeed(t, f.Close())
		}
	}},
}

// Whichever call is asked, the condition is the same, to the letter. What the health says is bounded, and has each reason once. TestCondition of pkg/health has all reasons, and
// test/e2e/health the commonest on real filesystems.
func TestAllCallsReportSameCondition(t *testing.T) {
	testenv.NeedRoot(t)
	for name, c := range ailments {
		t.Run(name, func(t *testing.T) {
			p := newPatient(t, c)
			reported := p.conditions(t, "vol")
			stats, err := p.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: p.target("vol")})
			must.Succeed(t, err)
			reported["NodeGetVolumeStats"] = oldcsi.Condition(stats)
			wantEqual(t, "how many calls report it", len(reported), 3)
			for call, condition := range reported {
				wantEqual(t, "the condition by "+call, condition, reported["ListVolumes"])
				if condition.GetAbnormal() != (c.reason != "") || !strings.Contains(condition.GetMessage(), c.says) {
					t.Errorf("%s reports %v, want the reason %q and the words %q", call, condition, c.reason, c.says)
				}
			}
			if c.reason.OfPool() {
				_, err := p.ValidateVolumeCapabilities(t.Context(), validateRequest("vol", writer()))
				wantCode(t, err, codes.Unavailable, "vol", c.says)
			}
			id, err := volume.ParseID("vol")
			must.Succeed(t, err)
			volume, err := p.set.Volume(t.Context(), id)
			must.Succeed(t, err)
			wantEqual(t, "the reason", volume.Condition.Reason, c.reason)

			h := p.nodeHealth(t, "vol", p.target("vol"))
			got := must.Value(p.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: "vol"}))(t)
			wantEqual(t, "the health by the controller", got.GetVolumeHealth(), h)
			seen := make(map[string]bool)
			for _, e := range h.GetHealthStatuses() {
				if seen[e.GetReason()] || len(e.GetMessage()) > 1024 || len(e.GetReason()) > 128 || e.GetStatus() == csi.VolumeHealthErrorType_UNKNOWN_VOLUME_HEALTH_TYPE {
					t.Errorf("the entry %v is twice there, too long or has no status", e)
				}
				seen[e.GetReason()] = true
			}
			if c.reason != "" && !seen[string(c.reason)] || c.reason == "" && len(seen) > 0 {
				t.Errorf("the health is %v, want the reason %q", h, c.reason)
			}
		})
	}
}
