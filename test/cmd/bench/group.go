package main

import (
	"context"
	"errors"
	"io"
	"slices"
)

// A group is figures that have a scene in common. Each group is measured by itself,
// for what one does to the disk is not to be seen in another.
type group struct {
	name  string // for --only
	title string
	// prepare sets up what is measured; scene.strike takes it away.
	prepare func(ctx context.Context, s *scene) ([]comparison, error)
}

var groups = []group{
	{"mounts", "Publishing", prepareMounts},
	{"calls", "Calls that only report", prepareCalls},
	{"creation", "Making and removing", prepareCreation},
	{"removal", "Removing what is full", prepareRemoval},
	{"snapshots", "Snapshots", prepareSnapshots},
	{"parallel", "Making many at once", prepareParallel},
	{"scale", "With many volumes", prepareScale},
	{"size", "Size", prepareSize},
	{"blocks", "IO to a block volume", prepareBlocks},
}

func groupNames() []string {
	var names []string
	for _, g := range groups {
		names = append(names, g.name)
	}
	return names
}

// chosen are the groups of those names in the usual order; all for no names.
func chosen(names []string) []group {
	if len(names) == 0 {
		return groups
	}
	return slices.DeleteFunc(slices.Clone(groups), func(g group) bool { return !slices.Contains(names, g.name) })
}

// measure has a group on the scene, and off again.
func (s *scene) measure(ctx context.Context, g group, progress io.Writer) ([]result, error) {
	comparisons, err := g.prepare(ctx, s)
	var results []result
	if err == nil {
		results, err = compare(ctx, comparisons, s.order.rounds, progress)
	}
	for i := range results {
		results[i].Group = g.title
	}
	return results, errors.Join(err, s.strike())
}
