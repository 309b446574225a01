package main

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	var movable, kept []kubectl.Planned
	for _, p := range plan {
		if p.Problem == "" {
			movable = append(movable, p)
		} else {
			kept = append(kept, p)
		}
	}
	if r.dryRun {
		return len(kept) > 0, write(r, out, kubectl.PlanHeadings, plan)
	}
	if r.command == "drain" {
		if err := r.kubectl.Cordon(ctx, r.about); err != nil {
			return false, err
		}
	}
	moved, err := kubectl.Moves(ctx, r.kubectl, movable, r.atOnce, lookEvery, r.move, progress)
	for _, m := range moved {
		wrong = wrong || !m.Done()
	}
	for _, p := range kept {
		wrong = true
		moved = append(moved, kubectl.Moved{Namespace: p.Namespace, Claim: p.Claim, From: p.From, Message: p.Problem})
	}
	return wrong, errors.Join(err, write(r, out, kubectl.MovedHeadings, moved))
}

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

// moving writes a line for a person who waits, and takes it away at the end. A log gets the problems.
func moving(errs io.Writer, terminal bool) func(kubectl.Progress) {
	began, before, problem := time.Now(), int64(-1), ""
	return func(p kubectl.Progress) {
		if !terminal {
			if p.Problem != "" && p.Problem != problem {
				fmt.Fprintln(errs, p.Problem+": it is tried again")
			}
			problem = p.Problem
			return
		}
		fmt.Fprint(errs, "\r\x1b[K")
		if p.Moved+p.Failed == p.Of {
			return
		}
		if before < 0 { // what was sent before this command does not count for its rate
			began, before = time.Now(), p.BytesSent
		}
		fmt.Fprint(errs, kubectl.Line(p, p.BytesSent-before, time.Since(began)))
	}
}
