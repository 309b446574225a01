package devices

import (
	"context"
	"fmt"
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
		return Problem{Path: j.path, Reason: Twice, Detail: fmt.Sprintf("it is the disk %s, which the node %s has reserved", disk, node)}
	}
	return nil
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

// givenUp are the disks that may be reserved and that no volume of the node has, nor a device that it may offer, nor a record with data of
// a claim. One that another node has a volume of is left to that.
func (p *pass) givenUp() (disks []string) {
	used := make(map[string]bool)
	err := p.Records.each(func(record Record) {
		if record.hasData() {
			used[reservable(record.alike())] = true
		}
	})
	if err != nil {
		p.Log.Error(err, "Failed to read which disks have data of claims: none is given up")
		return nil
	}
	for _, v := range p.Volumes {
		used[reservable(v.Identity)] = true
		if record, err := p.Records.Get(v.Path); err != nil || record.State != "" {
			used[reservable(record.alike())] = true
		}
	}
	for _, j := range p.jobs {
		if !j.finished() || reasonOf(j.err) != Twice {
			used[j.disk] = true
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for disk := range p.reserved {
		if !used[disk] {
			disks = append(disks, disk)
		}
	}
	slices.Sort(disks)
	return disks
}

// Unreserved notes that a disk that was given up is not reserved for this node any more.
func (a *Agent) Unreserved(disk string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.reserved, disk)
}
