package devices

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// reservable is what the disk of an identity is reserved by: the same for all paths to it and all of its partitions, on any node. It is
// empty for one that no other node can see.
func reservable(identity string) string {
	if identity == "" || !shared(identity) {
		return ""
	}
	disk, _ := blockdev.DiskAndPart(identity)
	return disk
}

// reserve has other nodes leave a disk alone before the API is asked for its volumes: two nodes that see a new disk at once find none.
func (a *Agent) reserve(ctx context.Context, j *job, facts blockdev.Facts, record Record) error {
	disk := reservable(facts.Alike)
	if disk == "" {
		return nil
	}
	a.mu.Lock()
	a.reserved[disk] = true
	a.mu.Unlock()
	j.reserves = true
	node, err := a.API.Reserve(ctx, disk)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return Problem{Path: j.path, Reason: NotConfirmed, Detail: err.Error()}
	case node != a.Node:
		if err := a.disown(j, record); err != nil {
			return err
		}
		return Problem{Path: j.path, Reason: Twice, Detail: reservedBy(disk, node)}
	}
	return nil
}

func reservedBy(disk, node string) string {
	return fmt.Sprintf("it is the disk %s, which the node %s has reserved", disk, node)
}

// disown has a disk that another node has, and may write to, be judged by what is on it from then on, not by what this node has done to it. No other
// node writes to that of a volume of this one.
func (a *Agent) disown(j *job, record Record) error {
	if record.State == "" || j.volume.Name != "" {
		return nil
	}
	record.State, record.ClaimUID, record.Claim, record.Wipe = Offered, "", "", ""
	return a.Records.Put(record)
}

// Reserve reserves a disk that a Report has as NotReserved. If another node has it, the next pass says so.
func (a *Agent) Reserve(ctx context.Context, disk string) error {
	node, err := a.API.Reserve(ctx, disk)
	if err != nil {
		return fmt.Errorf("reserve the disk %s: %w", disk, err)
	}
	before := a.others[disk]
	if node == a.Node {
		a.mu.Lock()
		a.reserved[disk] = true
		a.mu.Unlock()
		delete(a.others, disk)
		node = ""
	} else {
		a.others[disk] = node
	}
	if node != before {
		a.Changed()
	}
	return nil
}

// Unreserved notes that a disk that was given up is not reserved for this node any more.
func (a *Agent) Unreserved(disk string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.reserved, disk)
}

// reservations compares what is reserved for this node with what it has. Nothing is given up while a record is not understood, which may be of any disk.
func (p *pass) reservations() {
	unused := p.unused()
	if p.Frozen {
		unused = nil
	}
	if p.Reserved == nil && len(unused) == 0 && len(p.others) == 0 {
		return
	}
	withData, err := p.withData()
	if p.Reserved != nil {
		maps.DeleteFunc(p.others, func(disk, _ string) bool { return withData[disk] == "" })
		p.report.NotReserved = slices.DeleteFunc(slices.Sorted(maps.Keys(withData)), func(disk string) bool { return slices.Contains(p.Reserved, disk) })
	}
	p.ofOthers(withData)
	switch {
	case err == nil:
		p.report.GivenUp = slices.DeleteFunc(unused, func(disk string) bool { return withData[disk] != "" })
	case len(unused) > 0:
		p.Log.Error(err, "Failed to read which disks have data of claims: none is given up")
	}
}

// withData are the disks that have, or may have, data of a claim, whatever is seen of them now, each with the path of the device. They are not all
// if there is an error.
func (p *pass) withData() (paths map[string]string, err error) {
	paths, err = p.Records.disks()
	maps.Copy(paths, p.doubted)
	for _, v := range p.Volumes {
		if v.Used || v.Released {
			paths[p.diskOf(v)] = v.Path
		}
	}
	delete(paths, "")
	return paths, err
}

// diskOf is what the disk of a volume is reserved by. One of another program does not say of which it was made.
func (p *pass) diskOf(v Volume) string { return reservable(cmp.Or(v.Identity, p.alike[v.Path])) }

// ofOthers reports the disks with data that another node has reserved, unless it is reported of their volumes or devices why they cannot be used.
func (p *pass) ofOthers(withData map[string]string) {
	for _, disk := range slices.Sorted(maps.Keys(p.others)) {
		about := slices.DeleteFunc(slices.Clone(p.Volumes), func(v Volume) bool { return p.diskOf(v) != disk })
		if len(about) == 0 && withData[disk] != "" {
			about = []Volume{{Path: withData[disk]}}
		}
		for _, v := range about {
			if !slices.ContainsFunc(p.report.Problems, func(r Problem) bool { return r.Volume == v.Name && r.Path == v.Path }) {
				p.problem(v.Name, v.Path, Twice, "%s", reservedBy(disk, p.others[disk]))
			}
		}
	}
}

// unused are the disks that may be reserved and that no volume of the node has, nor a device for which that was asked or that was cleaned. One that
// another node has a volume of is left to that.
func (p *pass) unused() (disks []string) {
	used := maps.Clone(p.remains)
	for _, j := range p.jobs {
		if j.finished() && reasonOf(j.err) == Twice {
			delete(used, j.disk)
		}
	}
	for _, j := range p.jobs { // which may be of a part of the same disk
		if !j.finished() || j.reserves && reasonOf(j.err) != Twice {
			used[j.disk] = true
		}
	}
	for _, v := range p.Volumes {
		used[p.diskOf(v)] = true
		if record, err := p.Records.Get(v.Path); err != nil || record.State != "" {
			used[reservable(record.alike())] = true
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.Reserved != nil {
		clear(p.reserved)
		for _, disk := range p.Reserved {
			p.reserved[disk] = true
		}
	}
	for disk := range p.reserved {
		if !used[disk] {
			disks = append(disks, disk)
		}
	}
	slices.Sort(disks)
	return disks
}
