// Package inspect is a check at a node: what its pools hold, what was promised, where
// it is published and what is not in order, as a document for programs and as tables
// for people. It changes nothing, and works beside the driver as well as without it.
// What it tells is seen by pkg/pool, and the conditions are those that the driver
// answers.
package inspect

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// Look looks at pools, at all of them at once, so that one which hangs holds no other
// up. The report has them in the order of the configuration.
func Look(ctx context.Context, configs []poolconfig.Pool, options pool.Options) Report {
	report := Report{Version: documentVersion, Node: options.Node.String(), Pools: []Pool{}}
	for _, view := range pool.See(ctx, configs, options) {
		report.Pools = append(report.Pools, describe(view))
	}
	report.compare()
	report.count()
	return report
}

// compare tells of pools that are one directory, or copies of each other. A driver serves
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

// Only leaves nothing in the report but one volume, and reports whether it is there.
func (r *Report) Only(id volume.ID) bool {
	found := false
	for i := range r.Pools {
		p := &r.Pools[i]
		p.Volumes = slices.DeleteFunc(p.Volumes, func(v Volume) bool { return v.ID != id.String() })
		p.Staging = slices.DeleteFunc(p.Staging, func(l Leftover) bool { return l.Name != id.String() })
		// In the trash the name has a suffix, which has no dot.
		p.Trash = slices.DeleteFunc(p.Trash, func(l Leftover) bool {
			suffix, ok := strings.CutPrefix(l.Name, id.String()+".")
			return !ok || strings.Contains(suffix, ".")
		})
		found = found || len(p.Volumes)+len(p.Staging)+len(p.Trash) > 0
	}
	r.count()
	return found
}

// Answered reports whether every pool could be checked.
func (r *Report) Answered() bool {
	return !slices.ContainsFunc(r.Pools, func(p Pool) bool { return !p.Readable })
}

// count counts what is not in order.
func (r *Report) count() {
	r.Abnormal = 0
	note := func(abnormal bool) {
		if abnormal {
			r.Abnormal++
		}
	}
	for _, p := range r.Pools {
		note(p.Abnormal)
		note(p.DevicesError != "")
		for _, v := range p.Volumes {
			note(v.Abnormal)
		}
		for _, l := range slices.Concat(p.Staging, p.Trash) {
			note(l.Abnormal)
		}
	}
}

func describe(v pool.View) Pool {
	p := Pool{
		Name:      v.Name.String(),
		Path:      v.Path,
		Shared:    v.Shared,
		Abnormal:  v.Condition.Abnormal,
		Condition: v.Condition.Message,
		Reason:    string(v.Condition.Reason),
		Readable:  v.UUID != "",
		Volumes:   []Volume{},
		Staging:   leftovers(v.Staging),
		Trash:     leftovers(v.Trash),
	}
	if !p.Readable {
		return p
	}
	p.UUID, p.Created = v.UUID, v.Created
	p.ReadOnly, p.SystemDisk = v.Space.ReadOnly, v.SystemDisk
	p.SizeBytes, p.FreeBytes = &v.Space.SizeBytes, &v.Space.FreeBytes
	for _, name := range v.SharesWith {
		p.SharesWith = append(p.SharesWith, name.String())
	}
	p.PromisedBytes, p.TrashHeldBytes, p.AvailableBytes = &v.Promised, known(v.Held), &v.Available
	if v.Space.Inodes > 0 {
		p.Inodes, p.InodesFree = &v.Space.Inodes, &v.Space.InodesFree
	}
	p.Quota = string(v.Quota)
	if v.Unenforced != nil {
		p.Unenforced = v.Unenforced.Error()
	}
	if v.Devices != nil {
		p.DevicesError = v.Devices.Error()
	}
	for _, volume := range v.Volumes {
		p.Volumes = append(p.Volumes, describeVolume(volume))
	}
	return p
}

func describeVolume(v pool.VolumeView) Volume {
	d := Volume{
		ID:             v.ID.String(),
		Mode:           string(v.Mode),
		Abnormal:       v.Condition.Abnormal,
		Condition:      v.Condition.Message,
		Reason:         string(v.Condition.Reason),
		Recorded:       v.Recorded,
		Lost:           v.Lost,
		Enforced:       v.Enforced,
		Thin:           v.Thin,
		Inline:         v.Inline,
		LimitBytes:     known(v.LimitBytes),
		UsedBytes:      known(v.UsedBytes),
		QuotaID:        uint64(v.Carried),
		RecordQuotaID:  uint64(v.ProjectID),
		FileBytes:      known(v.FileBytes),
		AllocatedBytes: known(v.AllocatedBytes),
		Published:      []Place{},
		Nodes:          []string{},
		Devices:        []Device{},
	}
	if !v.Created.IsZero() {
		d.Created, d.PromisedBytes = &v.Created, &v.Bytes
	}
	for _, at := range v.Published {
		d.Published = append(d.Published, Place{Path: at.Path, Inside: at.Inside})
	}
	slices.SortFunc(d.Published, func(a, b Place) int { return strings.Compare(a.Path, b.Path) })
	for _, node := range v.Nodes {
		d.Nodes = append(d.Nodes, node.String())
	}
	for _, device := range v.Devices {
		d.Devices = append(d.Devices, describeDevice(device))
	}
	return d
}

func describeDevice(d loop.Device) Device {
	return Device{Name: d.Name, SizeBytes: d.SizeBytes, ReadOnly: d.ReadOnly, Foreign: !d.Ours}
}

func leftovers(all []pool.Leftover) []Leftover {
	described := []Leftover{}
	for _, l := range all {
		described = append(described, Leftover{
			Node:      l.Node,
			Name:      l.Name,
			Changed:   l.Changed.UTC(),
			UsedBytes: known(l.UsedBytes),
			HeldBytes: known(l.HeldBytes),
			Abnormal:  l.Condition.Abnormal,
			Condition: l.Condition.Message,
		})
	}
	return described
}

func known(bytes int64) *int64 {
	if bytes == volume.Unknown {
		return nil
	}
	return &bytes
}
