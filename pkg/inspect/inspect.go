// Package inspect is a check at a node: what its pools hold, what was promised, where
// it is published and what is not in order, as a document for programs and as tables
// for people. It changes nothing, and works while the driver runs as well as without it. It reads
// pools by the packages that the driver reads them by, so that conditions are those which the
// driver answers.
package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/errorcount"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/pool/reconcile"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Mounts has what the mounts of the node say, as bind.Kernel does.
type Mounts interface {
	content.Mounts
	reconcile.Locator
	reconcile.Mounts
}

// Options say how to read the pools of a node.
type Options struct {
	// Node is this one; the zero NodeID if it is not known.
	Node   volume.NodeID
	Mounts Mounts
	// Devices are those of block volumes, and Dev has their nodes: the host's /dev.
	Devices content.Devices
	Dev     *dir.Dir
	// SystemPath is a directory on the operating system's disk.
	SystemPath string
	// DetectQuota asks a pool's filesystem who enforces the sizes of directories; nil
	// for quota.Detect.
	DetectQuota func(*dir.Dir) (quota.Facility, error)
	// CountErrors asks how many errors a pool's filesystem has counted; nil for
	// errorcount.Of.
	CountErrors func(*dir.Dir) (int64, error)
	// SinceBoot is how long the node is up; nil for what the kernel says.
	SinceBoot func() time.Duration
	// Served remembers what pools the driver served; nil for nothing that does.
	Served *served.Memory
	// Files has each file of volumes checked for whether it is in the limit.
	Files bool
	// HangAfter is when a pool of which nothing more is read counts as one that hangs; 0 for
	// 5 seconds.
	HangAfter time.Duration
}

func (o Options) withDefaults() Options {
	if o.DetectQuota == nil {
		o.DetectQuota = quota.Detect
	}
	if o.CountErrors == nil {
		o.CountErrors = errorcount.Of
	}
	if o.SinceBoot == nil {
		o.SinceBoot = reconcile.SinceBoot
	}
	o.HangAfter = cmp.Or(o.HangAfter, 5*time.Second)
	return o
}

// Run reads pools, all of them at once, so that one which hangs holds no other up. The report
// has them in the order of the configuration.
func Run(ctx context.Context, configs []poolconfig.Config, options Options) Report {
	report := Report{Version: documentVersion, Node: options.Node.String(), Pools: readAll(ctx, configs, options)}
	report.compare()
	report.readOutOfUse(ctx, configs, options)
	if err := options.Devices.CheckNodes(); err != nil {
		report.NoDevices = err.Error()
	}
	report.count()
	return report
}

// readOutOfUse finds the pools that the driver has served, and that are not configured any more.
func (r *Report) readOutOfUse(ctx context.Context, configs []poolconfig.Config, options Options) {
	pools, err := options.Served.OutOfUse(options.Configured(ctx, configs))
	if err != nil {
		r.OutOfUseError = fmt.Sprintf("cannot read which pools this node has served: %v", err)
	}
	for _, p := range pools {
		r.OutOfUse = append(r.OutOfUse, OutOfUse{Name: p.Name, Path: p.Path, Volumes: p.Volumes, Partial: p.Partial})
	}
}

// Configured is whether a pool is configured, whatever its path is. One that cannot be read counts as the one that was at its
// path; a directory in which no driver has made a pool does not, unless a filesystem is to be mounted there.
//
// Pools are read all at once, so that those which hang are waited for once.
func (o Options) Configured(ctx context.Context, configs []poolconfig.Config) func(served.Entry) bool {
	at, errs := make([]string, len(configs)), make([]error, len(configs))
	var all sync.WaitGroup
	for i := range configs {
		all.Go(func() { at[i], errs[i] = o.uuidOf(ctx, &configs[i]) })
	}
	all.Wait()
	uuids, unread := make(map[string]bool), make(map[string]bool)
	for i := range configs {
		switch c := &configs[i]; {
		case errs[i] == nil:
			uuids[at[i]] = true
		case c.RequireMount || !errors.Is(errs[i], store.ErrNoLayout):
			unread[c.Path] = true
		}
	}
	return func(p served.Entry) bool { return uuids[p.UUID] || unread[p.Path] }
}

func (o Options) uuidOf(ctx context.Context, c *poolconfig.Config) (string, error) {
	return hang.Run(ctx, cmp.Or(o.HangAfter, 5*time.Second), func() (string, error) {
		s, f, err := store.OpenReadOnly(&store.Location{
			Path: c.Path, ReadOnly: true, Shared: c.Shared,
			Verify: func(root *dir.Dir) error { return reconcile.CheckMount(c, o.Mounts, root) },
			Nested: func(*dir.Dir) error { return nil },
		})
		if err != nil {
			return "", err
		}
		s.Close()
		return f.UUID, nil
	}, nil)
}

// compare finds pools that are one directory, or copies of each other. A driver serves
// the one that it opened first, and only that driver knows which.
func (r *Report) compare() {
	for i := range r.Pools {
		p := &r.Pools[i]
		same := slices.IndexFunc(r.Pools, func(other Pool) bool {
			return other.Name != p.Name && other.Readable && other.UUID == p.UUID
		})
		if same >= 0 && !p.Abnormal {
			p.Abnormal, p.Reason = true, string(health.PoolNotServing)
			p.Condition = fmt.Sprintf("it is the directory of pool %q as well, or a copy of it: a driver serves one of them", r.Pools[same].Name)
		}
	}
}

// Only leaves nothing in the report but one volume and its snapshots, and reports whether it is there.
func (r *Report) Only(id volume.ID) bool {
	found := false
	for i := range r.Pools {
		p := &r.Pools[i]
		p.Volumes = slices.DeleteFunc(p.Volumes, func(v Volume) bool { return v.ID != id.String() })
		p.Snapshots = slices.DeleteFunc(p.Snapshots, func(s Snapshot) bool { return s.Source != id.String() })
		p.Creating = slices.DeleteFunc(p.Creating, func(l Leftover) bool { return l.Name != id.String() })
		p.OnDeleted = slices.DeleteFunc(p.OnDeleted, func(o Orphan) bool { return path.Base(path.Dir(o.File)) != id.String() })
		// In the trash the name has a suffix, which has no dot.
		p.Trash = slices.DeleteFunc(p.Trash, func(l Leftover) bool {
			suffix, ok := strings.CutPrefix(l.Name, id.String()+".")
			return !ok || strings.Contains(suffix, ".")
		})
		found = found || len(p.Volumes)+len(p.Snapshots)+len(p.Creating)+len(p.Trash) > 0
	}
	r.count()
	return found
}

// Answered reports whether every pool could be checked.
func (r *Report) Answered() bool {
	return !slices.ContainsFunc(r.Pools, func(p Pool) bool { return !p.Readable })
}

func (r *Report) count() {
	r.Abnormal = len(r.OutOfUse)
	note := func(abnormal bool) {
		if abnormal {
			r.Abnormal++
		}
	}
	note(r.OutOfUseError != "")
	for _, p := range r.Pools {
		note(p.Abnormal)
		note(p.DevicesError != "")
		note(p.SnapshotsError != "")
		r.Abnormal += len(p.OnDeleted)
		for _, v := range p.Volumes {
			note(v.Abnormal)
		}
		for _, s := range p.Snapshots {
			note(s.Abnormal)
		}
		for _, l := range slices.Concat(p.Creating, p.Trash) {
			note(l.Abnormal)
		}
	}
}
