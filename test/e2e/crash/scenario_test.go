package crash

import (
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The sizes of the volume that calls are made for: at first, grown, and in between.
const (
	small  = 24 * mib
	medium = 32 * mib
	large  = 40 * mib
)

// A state is what there is of the volume. The zero state is nothing.
type state struct {
	bytes     int64
	block     bool
	inline    bool
	published bool
	// copied: it was made from another entry, and has its content.
	copied bool
}

// A scenario is a call that brings the volume from one state to another.
type scenario struct {
	name     string
	from, to state
	// between are the other states that a crash may leave: what is inline is made and
	// published by one call, and is neither answered for nor lost in between.
	between []state
	call    func(*harness) answer
	// reaps: what the call removes goes in the background.
	reaps bool
	// otherwise is what may be asked for after a crash in place of the same again.
	otherwise func(*harness) answer
	// otherwiseTo is what that leads to from what the crash has left.
	otherwiseTo func(left state) state
	gaveUp      bool
}

// givenUp is the scenario of a client that asks for something else after the crash.
func (s scenario) givenUp() scenario {
	s.gaveUp = true
	return s
}

func to(s state) func(state) state { return func(state) state { return s } }

// atLeast: volumes do not shrink.
func atLeast(s state) func(state) state {
	return func(left state) state {
		if left.bytes > s.bytes {
			return left
		}
		return s
	}
}

func scenarios(block bool) []scenario {
	none := state{}
	made := state{bytes: small, block: block}
	published := state{bytes: small, block: block, published: true}
	grown := state{bytes: large, block: block, published: true}
	between := state{bytes: medium, block: block, published: true}
	all := []scenario{
		{name: "create", from: none, to: made, call: creating(block, small), otherwise: (*harness).delete, otherwiseTo: to(none)},
		{name: "publish", from: made, to: published, call: publishing(block, false), otherwise: (*harness).unpublish, otherwiseTo: to(made)},
		{name: "expand", from: published, to: grown, call: expanding(block, large), otherwise: expanding(block, medium), otherwiseTo: atLeast(between)},
		{name: "unpublish", from: published, to: made, call: (*harness).unpublish},
		{name: "delete", from: made, to: none, call: (*harness).delete, reaps: true},
	}
	if !block {
		inline := state{bytes: small, inline: true}
		inlined := state{bytes: small, inline: true, published: true}
		all = append(all,
			scenario{name: "publish inline", from: none, to: inlined, between: []state{inline}, call: publishing(false, true), otherwise: (*harness).unpublish, otherwiseTo: to(none)},
			scenario{name: "unpublish inline", from: inlined, to: none, between: []state{inline}, call: (*harness).unpublish, reaps: true})
	}
	for i := range all {
		all[i].name = map[bool]string{false: "mount ", true: "block "}[block] + all[i].name
	}
	return all
}

// A place is where a pool is made, and how it is configured.
type place struct {
	name     string
	kind     quota.Kind
	enforced bool
	thin     bool
	shared   bool
	mount    func(t *testing.T) string
	mounted  string
	// modes are of the volumes that calls are made for there.
	modes []bool
	// every says which steps are tried where time is short: each, every other, and so on; 0 for none, at a place that differs
	// from others in what the host has too.
	every int
}

func (p place) scenarios() []scenario {
	var all []scenario
	for _, block := range p.modes {
		all = append(all, scenarios(block)...)
	}
	return all
}

const (
	mountMode = false
	blockMode = true
)

// places are where time is short those that are attacked.
func places() []place {
	return slices.DeleteFunc(everywhere(), func(p place) bool { return testing.Short() && p.every == 0 })
}

func everywhere() []place {
	both, blockOnly := []bool{mountMode, blockMode}, []bool{blockMode}
	if testenv.Guest() {
		xfs, ext4 := testenv.GuestDisk("HOSTPATH_KERNEL_XFS"), testenv.GuestDisk("HOSTPATH_KERNEL_EXT4")
		return []place{
			{name: "xfs with limits", kind: quota.XFS, enforced: true, mount: xfs, modes: both, every: 17},
			{name: "ext4 with limits", kind: quota.Ext4, enforced: true, mount: ext4, modes: both, every: 29},
			{name: "xfs thin with limits", kind: quota.XFS, enforced: true, thin: true, mount: xfs, modes: blockOnly},
			{name: "ext4 shared with limits", kind: quota.Ext4, enforced: true, shared: true, mount: ext4, modes: both},
		}
	}
	return []place{
		{name: "btrfs with limits", kind: quota.Btrfs, enforced: true, mount: func(t *testing.T) string { return testenv.CountingBtrfs(t, 1<<30) }, modes: both, every: 1},
		{name: "ext4", mount: onLoop("ext4"), modes: both, every: 7},
		{name: "xfs thin", thin: true, mount: onLoop("xfs"), modes: blockOnly, every: 7},
		{name: "ext4 shared", shared: true, mount: onLoop("ext4"), modes: both, every: 7},
	}
}

func onLoop(kind string) func(*testing.T) string {
	return func(t *testing.T) string {
		t.Helper()
		return testenv.LoopFS(t, kind, 512*mib)
	}
}
