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

// givenUp are the disks that may be reserved and that the node does not use, but for those with data of a claim, whatever is seen of them.
func (p *pass) givenUp() []string {
	disks := p.unused()
	if len(disks) == 0 {
		return nil
	}
	withData, err := p.Records.disks(Record.hasData)
	if err != nil {
		p.Log.Error(err, "Failed to read which disks have data of claims: none is given up")
		return nil
	}
	return slices.DeleteFunc(disks, func(disk string) bool { return withData[disk] })
}

// unused are the disks that may be reserved and that no volume of the node has, nor a device that it may offer. One that another node
// has a volume of is left to that.
func (p *pass) unused() (disks []string) {
	used := make(map[string]bool)
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
