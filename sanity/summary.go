package sanity

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// A run is the suite's result with one configuration.
type run struct {
	name  string
	specs []spec
}

// count returns how many specs ended in a state.
func (r run) count(state string) int {
	n := 0
	for _, s := range r.specs {
		if s.state == state {
			n++
		}
	}
	return n
}

// problems are the specs that failed or were skipped without leave, and why. A
// run in which nothing passed is one too.
func (r run) problems() []string {
	var found []string
	for _, s := range r.specs {
		switch s.state {
		case passed, pending:
		case skipped:
			if _, err := missingFor(s); err != nil {
				found = append(found, fmt.Sprintf("%s: %v", s.name, err))
			}
		default:
			found = append(found, fmt.Sprintf("%s: %s: %s", s.name, s.state, s.message))
		}
	}
	if r.count(passed) == 0 {
		found = append(found, "no spec has passed")
	}
	return found
}

// copies are in the names of specs of snapshots, restores and clones, of which one each has to pass: a spec that is renamed, or
// not in the suite any more, is not among those that are skipped.
var copies = []string{"CreateSnapshot", "DeleteSnapshot", "ListSnapshots", "GetSnapshot", "existing source snapshot", "existing source volume"}

// untried are those of some names of which no spec has passed.
func (r run) untried(names []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		return slices.ContainsFunc(r.specs, func(s spec) bool { return s.state == passed && strings.Contains(s.name, name) })
	})
}

// summarise prints how each run ended, which specs were skipped, and why.
func summarise(runs []run) string {
	var b strings.Builder
	counts(&b, runs)
	why := make(map[string]map[string][]string) // reason, spec, runs
	note := func(reason, spec, run string) {
		if why[reason] == nil {
			why[reason] = make(map[string][]string)
		}
		why[reason][spec] = append(why[reason][spec], run)
	}
	for _, r := range runs {
		for _, s := range r.specs {
			switch s.state {
			case skipped:
				note(reason(s), s.name, r.name)
			case pending:
				note("switched off by csi-sanity itself", s.name, r.name)
			}
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(why)) {
		specs := why[reason]
		fmt.Fprintf(&b, "\nnot run (%d): %s\n", len(specs), reason)
		for _, spec := range slices.Sorted(maps.Keys(specs)) {
			fmt.Fprintf(&b, "  - %s%s\n", spec, onlyIn(specs[spec], runs))
		}
	}
	return b.String()
}

func reason(s spec) string {
	needed, err := missingFor(s)
	if err != nil {
		return "AGAINST THE RULES, " + err.Error()
	}
	return fmt.Sprintf("%s is not advertised", needed)
}

func counts(b *strings.Builder, runs []run) {
	width := 14
	for _, r := range runs {
		width = max(width, len(r.name))
	}
	fmt.Fprintf(b, "%-*s%9s%9s%9s%9s\n", width, "csi-sanity", "passed", "failed", "skipped", "pending")
	for _, r := range runs {
		ok, skips, off := r.count(passed), r.count(skipped), r.count(pending)
		fmt.Fprintf(b, "%-*s%9d%9d%9d%9d\n", width, r.name, ok, len(r.specs)-ok-skips-off, skips, off)
	}
}

// onlyIn names the runs, unless it was all of them.
func onlyIn(some []string, all []run) string {
	if len(some) == len(all) {
		return ""
	}
	return fmt.Sprintf(" (only %s)", strings.Join(some, ", "))
}
