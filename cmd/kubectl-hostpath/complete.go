package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/kubectl"
)

// completer is the name by which kubectl (1.26 and newer) runs this program for what may follow on the command line: a link beside it.
const completer = "kubectl_complete-hostpath"

// noFiles tells kubectl to offer nothing else (ShellCompDirectiveNoFileComp of github.com/spf13/cobra).
const noFiles = ":4"

// completionTime is how long a person who pressed the tab key waits for the names of nodes.
const completionTime = 3 * time.Second

func completes(program string) bool {
	return strings.TrimSuffix(filepath.Base(program), ".exe") == completer
}

// complete prints what the last of the words may become, a line each. kubectl shows no errors then.
func complete(ctx context.Context, arguments []string, out io.Writer) (status int) {
	if len(arguments) == 0 {
		arguments = []string{""}
	}
	before, last := arguments[:len(arguments)-1], arguments[len(arguments)-1]
	for _, word := range candidates(ctx, before, last) {
		if strings.HasPrefix(word, last) {
			fmt.Fprintln(out, word)
		}
	}
	fmt.Fprintln(out, noFiles)
	return 0
}

func candidates(ctx context.Context, before []string, last string) []string {
	var r request
	flags := r.flags()
	if outputNext(before) {
		return []string{"json", "table", "yaml"}
	}
	words, err := wordsOf(flags, before)
	switch {
	case err != nil: // the value of a flag
		return nil
	case strings.HasPrefix(last, "-"):
		return named(flags)
	case len(words) == 0:
		return slices.Sorted(maps.Keys(commands))
	case len(words) == 1 && (words[0] == "inspect" || words[0] == "drain"):
		ctx, stop := context.WithTimeout(ctx, completionTime)
		defer stop()
		nodes, _ := kubectl.NodeNames(ctx, r.kubectl) // where they are unknown none is offered
		return nodes
	}
	return nil
}

func outputNext(before []string) bool {
	return len(before) > 0 && slices.Contains([]string{"-o", "--output"}, before[len(before)-1])
}

// named are the flags as they are written.
func named(flags *flag.FlagSet) (names []string) {
	flags.VisitAll(func(f *flag.Flag) {
		if len(f.Name) == 1 {
			names = append(names, "-"+f.Name)
		} else {
			names = append(names, "--"+f.Name)
		}
	})
	return names
}
