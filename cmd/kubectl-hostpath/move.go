package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/kubectl"
)

// lookEvery is how often the VolumeMoves are looked at.
const lookEvery = 2 * time.Second

// checkMove refuses flags of moves that do not fit the command.
func (r *request) checkMove() error {
	namespace, claim, ok := strings.Cut(r.about, "/")
	switch o := r.move; {
	case r.command != "move" && r.command != "drain":
		if o != (kubectl.MoveOptions{}) || r.dryRun {
			return errors.New("--to is for move and drain, and so are --evict, --force, --leave-snapshots, --bytes-per-second and --dry-run")
		}
		return nil
	case r.command == "move" && (!ok || namespace == "" || claim == ""):
		return fmt.Errorf("%q is no claim: name it as NAMESPACE/CLAIM", r.about)
	case r.command == "move" && o.Force && !o.Evict:
		return errors.New("--force is for pods that are evicted: add --evict")
	case r.command == "drain" && o.Evict:
		return errors.New("--evict is for move: drain evicts the pods of the volumes that it moves")
	case r.command == "drain" && o.Target == r.about:
		return fmt.Errorf("--to is the node itself: %s", r.about)
	case r.atOnce < 1:
		return fmt.Errorf("--at-once is %d: use 1 or more", r.atOnce)
	}
	return nil
}

// moves moves the volume of a claim with those that its pods use too, or all of a node, and shows what became of them.
func (r request) moves(ctx context.Context, out io.Writer, progress func(kubectl.Progress)) (wrong bool, err error) {
	if r.command == "drain" {
		r.move.Evict = true
	}
	plan, err := r.plan(ctx)
	if err != nil {
		return false, fmt.Errorf("%s %s: %w", r.command, r.about, err)
	}
	if r.dryRun {
		return slices.ContainsFunc(plan, stays), write(r, out, kubectl.PlanHeadings, plan)
	}
	if r.command == "drain" {
		if err := r.kubectl.Cordon(ctx, r.about); err != nil {
			return false, err
		}
	}
	moved, err := r.movePlanned(ctx, plan, progress)
	for _, m := range moved {
		wrong = wrong || !m.Done()
	}
	return wrong, errors.Join(err, write(r, out, kubectl.MovedHeadings, moved))
}

// movePlanned moves what is planned, and says what became of that, and what stays. A node that is drained is looked at again until nothing more
// is to move: a pod that was scheduled before the node was cordoned may get its volume after that.
func (r request) movePlanned(ctx context.Context, plan []kubectl.Planned, progress func(kubectl.Progress)) (all []kubectl.Moved, err error) {
	tried := map[string]bool{}
	untried := func(wanted func(kubectl.Planned) bool) (found []kubectl.Planned) {
		for _, p := range plan {
			if !tried[p.Volume] && wanted(p) {
				found = append(found, p)
			}
		}
		return found
	}
	for next := untried(moves); ; next = untried(moves) {
		moved, err := kubectl.Moves(ctx, r.kubectl, next, r.atOnce, lookEvery, r.move, progress)
		all = append(all, moved...)
		for _, p := range next {
			tried[p.Volume] = true
		}
		if err == nil && r.command == "drain" {
			plan, err = r.planAgain(ctx, plan)
		}
		if err == nil && len(untried(moves)) > 0 {
			continue
		}
		for _, p := range untried(stays) {
			all = append(all, kubectl.Moved{Namespace: p.Namespace, Claim: p.Claim, From: p.From, Message: p.Problem})
		}
		return all, err
	}
}

// mostPlans are how often a plan may fail amid moves, which take long: a driver may be away for a moment.
const mostPlans = 30

// planAgain is plan in the place of an earlier one, which it returns with an error.
func (r request) planAgain(ctx context.Context, before []kubectl.Planned) (plan []kubectl.Planned, err error) {
	again := time.NewTicker(lookEvery)
	defer again.Stop()
	for range mostPlans {
		if plan, err = r.plan(ctx); err == nil {
			return plan, nil
		}
		select {
		case <-ctx.Done():
			return before, context.Cause(ctx)
		case <-again.C:
		}
	}
	return before, fmt.Errorf("see what is left on node %s: %w", r.about, err)
}

func moves(p kubectl.Planned) bool { return p.Problem == "" }

func stays(p kubectl.Planned) bool { return !moves(p) }

func (r request) plan(ctx context.Context) ([]kubectl.Planned, error) {
	if r.command == "drain" {
		node, err := kubectl.NodeNamed(ctx, r.kubectl, r.about, r.timeout)
		if err == nil {
			err = node.Err
		}
		if err != nil {
			return nil, err
		}
		return kubectl.PlanDrain(ctx, r.kubectl, node, r.move)
	}
	namespace, claim, _ := strings.Cut(r.about, "/")
	return kubectl.PlanMove(ctx, r.kubectl, namespace, claim, r.move)
}

// moving shows a person who waits how far all moves are and each, and takes that away at the end. A log gets the problems, and a line when moves end.
func moving(errs io.Writer, terminal bool) func(kubectl.Progress) {
	var pace kubectl.Pace
	if terminal {
		above := 0 // lines of what is shown
		return func(p kubectl.Progress) {
			if above > 0 {
				fmt.Fprintf(errs, "\x1b[%dA", above)
			}
			fmt.Fprint(errs, "\r\x1b[J")
			above = 0
			if p.Moved+p.Failed == p.Of {
				return
			}
			lines := pace.Lines(p, time.Now())
			above = len(lines) - 1
			fmt.Fprintf(errs, "\x1b[?7l%s\x1b[?7h", strings.Join(lines, "\n")) // none is wrapped
		}
	}
	problem, ended := "", 0
	return func(p kubectl.Progress) {
		if p.Problem != "" && p.Problem != problem {
			fmt.Fprintln(errs, p.Problem+": it is tried again")
		}
		problem = p.Problem
		p.Problem = ""
		if line := pace.Lines(p, time.Now())[0]; p.Moved+p.Failed > ended {
			fmt.Fprintln(errs, line)
		}
		ended = p.Moved + p.Failed
	}
}
