package serve

import (
	"context"
	"errors"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A moment is when recovery is done.
type moment uint8

const (
	// atOpen is before the pool serves: no call works on it.
	atOpen moment = 1 << iota
	// atRetry is while it serves, after a start that could not recover all: the pool was
	// read-only, or another node worked on a volume.
	atRetry
	// eachMinute is while it serves, for what changes by hand, and what failed calls and
	// departed nodes left.
	eachMinute
)

// A recoveryStep brings one thing on disk or in memory in order.
type recoveryStep struct {
	at moment // the moments at which it is done
	// writable are the moments at which it is left out while the pool is read-only.
	writable moment
	// only says in which pools it is done; nil for all.
	only func(p *Pool, at moment) bool
	// together: steps that follow each other and have it are all done, also if one fails.
	together bool
	do       func(in *Visit, ctx context.Context) error
}

// recovery is all that recovery does, in its order. What was found by then, and why it may be there, is in
// docs/layout.md. Limits that calls found missing are restored by each check, from a queue: limits.go.
var recovery = []recoveryStep{
	// Take from others the permission to enter the directories of the layout.
	{at: atRetry, do: func(in *Visit, _ context.Context) error { return in.Store.CloseMode() }},
	// Compare the index with the disk.
	{at: eachMinute, do: func(in *Visit, _ context.Context) error { return in.View().Index().Resync() }},
	// Remove records that were being written.
	{at: atOpen | atRetry, writable: atOpen, together: true, do: func(in *Visit, _ context.Context) error { return in.Discard().RecoverRecords() }},
	// Undo creations.
	{at: atOpen | atRetry | eachMinute, writable: atOpen | eachMinute, together: true, do: func(in *Visit, _ context.Context) error {
		return in.Discard().RecoverCreations(in.Store.Creating().Dir())
	}},
	// Remove the references of moves that a crash has ended.
	{at: atOpen | atRetry, writable: atOpen, together: true, do: func(in *Visit, _ context.Context) error { return in.Discard().RecoverReferences() }},
	// Finish removals and queue the trash.
	{at: atOpen | atRetry | eachMinute, writable: atOpen | eachMinute, together: true, do: func(in *Visit, _ context.Context) error { return in.Discard().RecoverTrash() }},
	// Take over what this node left under another name.
	{at: atOpen | atRetry, writable: atOpen, only: notShared, do: quietly(func(in *Visit, _ context.Context) { in.Discard().TakeOver() })},
	// Load the index.
	{at: atOpen, do: func(in *Visit, _ context.Context) error { return in.View().Index().Load() }},
	// Finish growths of files.
	{at: atOpen | atRetry, do: quietly(func(in *Visit, _ context.Context) { in.Repair().Records() })},
	// Restore limits.
	{at: atOpen, do: quietly(func(in *Visit, _ context.Context) { in.Pool.checks.restoreLimits(in) })},
	// Restore limits during calls.
	{at: atRetry, do: quietly(func(in *Visit, _ context.Context) { in.Pool.checks.restoreLimitsAgain(in) })},
	// Remove limits that nothing has.
	{at: atOpen, do: quietly(func(in *Visit, _ context.Context) { in.Discard().ReleaseUnused() })},
	// Detach devices that are not published.
	{at: atOpen | eachMinute, writable: eachMinute, do: quietly(func(in *Visit, ctx context.Context) { in.Repair().DetachUnpublished(ctx) })},
	// Detach devices on deleted files.
	{at: atOpen | eachMinute, writable: eachMinute, do: quietly(func(in *Visit, ctx context.Context) { in.Repair().DetachDeleted(ctx) })},
	// Finish growths of devices.
	{at: atOpen | atRetry, do: quietly(func(in *Visit, _ context.Context) { in.Repair().Devices() })},
	// Take over from nodes that are gone.
	{at: eachMinute, writable: eachMinute, only: shared, do: quietly(func(in *Visit, _ context.Context) { in.Discard().TakeOver() })},
	// Remove stale marks of this node.
	{at: atOpen | eachMinute, writable: eachMinute, do: (*Visit).recoverMarks},
	// Restore marks of what this node has published.
	{at: atOpen | eachMinute, writable: atOpen | eachMinute, only: shared, do: (*Visit).restoreMarks},
	// Count what is left of the trash of other nodes: where the pool was read before it was served, its own was counted with it.
	{at: atOpen, only: notShared, do: quietly(func(in *Visit, _ context.Context) { in.Pool.Ledger.SetOthersTrash(in.View().Index().OthersTrash()) })},
}

// quietly is a step that logs what it cannot do, and does not keep the pool from serving.
func quietly(do func(in *Visit, ctx context.Context)) func(in *Visit, ctx context.Context) error {
	return func(in *Visit, ctx context.Context) error {
		do(in, ctx)
		return nil
	}
}

func shared(p *Pool, _ moment) bool    { return p.Config.Shared }
func notShared(p *Pool, _ moment) bool { return !p.Config.Shared }

// recover does what is to be done at a moment. What a call works on is left to that.
func (in *Visit) recover(ctx context.Context, at moment) error {
	space, err := in.Store.Space()
	if err != nil {
		return err
	}
	if space.ReadOnly && at == atOpen {
		in.Pool.checks.unrecovered = true
	}
	if !space.ReadOnly {
		if err := in.Work(); err != nil {
			return err
		}
	}
	var problems error
	for _, step := range recovery {
		switch {
		case step.at&at == 0, step.writable&at != 0 && space.ReadOnly, step.only != nil && !step.only(in.Pool, at):
			continue
		case problems != nil && !step.together:
			return problems
		}
		err := step.do(in, ctx)
		if err != nil && !step.together {
			return err
		}
		problems = errors.Join(problems, err)
	}
	return problems
}

// begin brings disk and memory in line before the pool serves.
func (c *checks) begin(ctx context.Context, in *Visit) error {
	if err := in.recover(ctx, atOpen); err != nil {
		return err
	}
	// What other nodes work on they finish. What they only read is left to this one.
	c.unrecovered, c.tried = c.unrecovered || c.skipped, time.Now()
	return nil
}

// recoverAgain does what begin could not do: the pool was read-only, or another node worked on
// a volume. Calls are at work by then.
func (c *checks) recoverAgain(ctx context.Context, in *Visit) (done bool, err error) {
	if !c.unrecovered || c.skipped && time.Since(c.tried) < in.Pool.Options.SyncEvery {
		return false, nil
	}
	if space, err := in.Store.Space(); err != nil || space.ReadOnly {
		return false, err
	}
	if err := in.Work(); err != nil {
		return false, err
	}
	c.skipped = false
	if err := in.recover(ctx, atRetry); err != nil {
		return false, err
	}
	c.unrecovered, c.tried = c.skipped, time.Now()
	return true, nil
}

// recoverMarks removes the marks of what this node has published no more: it was restarted, or
// the pool was away when a volume was unpublished.
func (in *Visit) recoverMarks(ctx context.Context) error {
	return in.Store.Nodes().RecoverMarks(func(at string, of volume.ID, remove func() error) {
		in.Pool.problems.left(at, in.unlessBusyOr(of, remove))
	}, func(at string, id volume.ID) {
		in.Pool.problems.left(at, in.Pool.unlessBusy(id, func() error { return in.recoverMark(ctx, id) }))
	})
}

func (in *Visit) recoverMark(ctx context.Context, id volume.ID) error {
	e, d, err := in.View().Lookup(id)
	if err != nil {
		return err
	}
	if d != nil {
		defer func() { _ = d.Close() }()
	}
	return in.UnmarkPublished(ctx, in.Use(id, e, d))
}
