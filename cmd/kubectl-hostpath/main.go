// Command kubectl-hostpath shows the storage of all nodes that the driver serves: kubectl runs it as `kubectl hostpath`.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/pkg/kubectl"
	"kubevirt.io/hostpath-provisioner/pkg/version"
)

const usage = `Shows the storage of all nodes that the hostpath CSI driver serves, and moves volumes between nodes.

  kubectl hostpath pools          the pools of each node: size, promised, used, free, condition
  kubectl hostpath volumes        the volumes with their claims: node, pool, size, used, snapshots, condition
  kubectl hostpath doctor         what the driver needs of the cluster, what is missing, and why claims wait
  kubectl hostpath inspect NODE   all that one node reports of itself, as JSON
  kubectl hostpath move NAMESPACE/CLAIM
                                  move the volume of a claim to another node
  kubectl hostpath drain NODE     cordon a node, and move all its volumes to others, with their pods
  kubectl hostpath uninstall -f FILE
                                  remove the operator that was installed from files, with what it deployed; data stays

What is interrupted goes on, and the same command shows it again. It needs the right to list pods and PersistentVolumes, and to run inspect in the driver's pods (create pods/exec); doctor also
to list nodes, classes, claims and their events, pods, workloads, webhooks, policies and kinds, and to ask for rights of other accounts (what
an account may not read is not checked); move and drain
to list claims, pods and capacities, to create VolumeMoves, and to cordon nodes.
The exit status is 0 if all is in order, 2 if something is abnormal or was not moved, and 1 if it failed.

Flags:
`

// Exit statuses.
const (
	failed   = 1
	abnormal = 2
)

type request struct {
	// about is the node or the claim that the command names.
	command, about, output string
	timeout                time.Duration
	kubectl                kubectl.Kubectl

	move   kubectl.MoveOptions
	atOnce int
	dryRun bool

	// files are flags of kubectl for what uninstall removes.
	files []string
	yes   bool
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var status int
	if completes(os.Args[0]) {
		status = complete(ctx, os.Args[1:], os.Stdout)
	} else {
		status = run(ctx, os.Args[1:], os.Stdout, os.Stderr, isTerminal(os.Stderr))
	}
	stop()
	os.Exit(status)
}

// isTerminal reports whether a person sees what is written.
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

func run(ctx context.Context, arguments []string, out, errs io.Writer, terminal bool) (status int) {
	r, err := parse(arguments, errs)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	wrong := false
	if err == nil {
		wrong, err = r.show(ctx, out, errs, terminal)
	}
	switch {
	case err != nil:
		fmt.Fprintf(errs, "kubectl hostpath: %v\n", err)
		return failed
	case wrong:
		return abnormal
	}
	return 0
}

func parse(arguments []string, errs io.Writer) (r request, err error) {
	flags := r.flags()
	words, err := wordsOf(flags, arguments)
	if errors.Is(err, flag.ErrHelp) {
		fmt.Fprint(errs, usage)
		flags.SetOutput(errs)
		flags.PrintDefaults()
	}
	if err != nil {
		return r, err
	}
	return r, r.take(words)
}

func (r *request) flags() *flag.FlagSet {
	flags := flag.NewFlagSet("kubectl hostpath", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&r.output, "output", "table", "table, json or yaml")
	flags.StringVar(&r.output, "o", "table", "the same as --output")
	flags.DurationVar(&r.timeout, "timeout", 30*time.Second, "how long each node may take to answer")
	flags.StringVar(&r.kubectl.Program, "kubectl", "kubectl", "the kubectl that is run")
	flags.StringVar(&r.kubectl.Namespace, "namespace", "hostpath-provisioner", "that of the driver")
	flags.StringVar(&r.kubectl.Namespace, "n", "hostpath-provisioner", "the same as --namespace")
	flags.StringVar(&r.move.Target, "to", "", "move, drain: the node that volumes go to, if not one that the operator chooses")
	flags.BoolVar(&r.move.Evict, "evict", false, "move: evict the pods when most is copied, as drain does; otherwise end them yourself")
	flags.BoolVar(&r.move.Force, "force", false, "move, drain: evict pods too that no controller makes again")
	flags.BoolVar(&r.move.LeaveSnapshots, "leave-snapshots", false, "move, drain: leave snapshots on their node")
	flags.Int64Var(&r.move.BytesPerSecond, "bytes-per-second", 0, "move, drain: a limit for each volume")
	flags.IntVar(&r.atOnce, "at-once", 2, "drain: so many volumes at a time")
	flags.BoolVar(&r.dryRun, "dry-run", false, "move, drain: show what would go where, and what cannot")
	flags.BoolVar(&r.yes, "yes", false, "uninstall: do not ask")
	for name, of := range map[string]string{"filename": "filename", "f": "filename", "kustomize": "kustomize", "k": "kustomize"} {
		flags.Func(name, "uninstall: as for kubectl delete, for what was applied", func(value string) error {
			r.files = append(r.files, "--"+of+"="+value)
			return nil
		})
	}
	for _, name := range []string{"kubeconfig", "context", "cluster", "user", "as"} {
		flags.Func(name, "as for kubectl", func(value string) error {
			r.kubectl.Flags = append(r.kubectl.Flags, "--"+name+"="+value)
			return nil
		})
	}
	return flags
}

// wordsOf sets the flags before and after the command, as kubectl does, and returns the other words.
func wordsOf(flags *flag.FlagSet, arguments []string) (words []string, err error) {
	for rest := arguments; len(rest) > 0; {
		if err := flags.Parse(rest); err != nil {
			return words, err
		}
		if rest = flags.Args(); len(rest) > 0 {
			words, rest = append(words, rest[0]), rest[1:]
		}
	}
	return words, nil
}

// commands are what can be shown, each with the number of words that follow.
var commands = map[string]int{"pools": 0, "volumes": 0, "doctor": 0, "inspect": 1, "move": 1, "drain": 1, "uninstall": 0, "version": 0}

// abouts is what commands have to name.
var abouts = map[string]string{"inspect": "the name of a node", "drain": "the name of a node", "move": "a claim, as NAMESPACE/CLAIM"}

func (r *request) take(words []string) error {
	if len(words) == 0 {
		return errors.New("say what to show or do: pools, volumes, doctor, inspect NODE, move NAMESPACE/CLAIM, drain NODE, or uninstall; --help has more")
	}
	r.command = words[0]
	n, known := commands[r.command]
	switch {
	case !known:
		return fmt.Errorf("%q is unknown: there are pools, volumes, doctor, inspect NODE, move NAMESPACE/CLAIM, drain NODE and uninstall", r.command)
	case len(words)-1 < n:
		return fmt.Errorf("%s needs %s", r.command, abouts[r.command])
	case len(words)-1 > n:
		return fmt.Errorf("unexpected %q after %s", strings.Join(words[n+1:], " "), r.command)
	case r.output != "table" && r.output != "json" && r.output != "yaml":
		return fmt.Errorf("--output is %q: use table, json or yaml", r.output)
	}
	if n == 1 {
		r.about = words[1]
	}
	return errors.Join(r.checkMove(), r.checkUninstall())
}

// progress writes a line for a person who waits, and takes it away at the end.
func progress(errs io.Writer, terminal bool) func(answered, of int) {
	return func(answered, of int) {
		switch {
		case !terminal:
		case answered == of:
			fmt.Fprint(errs, "\r\x1b[K")
		default:
			fmt.Fprintf(errs, "\r%d of %d nodes have answered", answered, of)
		}
	}
}

func (r request) show(ctx context.Context, out, errs io.Writer, terminal bool) (wrong bool, err error) {
	switch r.command {
	case "version":
		_, err := fmt.Fprintln(out, version.Of())
		return false, err
	case "inspect":
		return r.inspect(ctx, out)
	case "move", "drain":
		return r.moves(ctx, out, moving(errs, terminal))
	case "uninstall":
		return false, r.uninstall(ctx, os.Stdin, out, errs)
	}
	nodes, err := kubectl.Nodes(ctx, r.kubectl, r.timeout, progress(errs, terminal))
	if err != nil {
		return false, err
	}
	if r.command == "doctor" {
		rows, err := kubectl.Doctor(ctx, r.kubectl, nodes)
		if err != nil {
			return false, err
		}
		for _, row := range rows {
			wrong = wrong || row.Problem != ""
		}
		return wrong, write(r, out, kubectl.FindingHeadings, rows)
	}
	if r.command == "pools" {
		rows := kubectl.Pools(nodes)
		for _, row := range rows {
			wrong = wrong || row.Abnormal
		}
		return wrong, write(r, out, kubectl.PoolHeadings, rows)
	}
	rows, err := kubectl.Volumes(ctx, r.kubectl, nodes)
	if err != nil {
		return false, err
	}
	for _, n := range nodes {
		if n.Err != nil {
			wrong = true
			fmt.Fprintf(errs, "node %s gave no report: %v\n", n.Driver.Node, n.Err)
		}
	}
	for _, row := range rows {
		wrong = wrong || row.Abnormal
	}
	return wrong, write(r, out, kubectl.VolumeHeadings, rows)
}

func write[R kubectl.Row](r request, out io.Writer, headings []string, rows []R) error {
	if r.output == "table" {
		return kubectl.WriteTable(out, headings, rows)
	}
	if rows == nil {
		rows = []R{}
	}
	text, err := json.MarshalIndent(rows, "", "  ")
	if err == nil && r.output == "yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(out, strings.TrimSuffix(string(text), "\n"))
	return err
}

// inspect prints the report of one node as it is.
func (r request) inspect(ctx context.Context, out io.Writer) (wrong bool, err error) {
	n, err := kubectl.NodeNamed(ctx, r.kubectl, r.about, r.timeout)
	if err == nil {
		err = n.Err
	}
	if err != nil {
		return false, fmt.Errorf("inspect node %s: %w", r.about, err)
	}
	text := []byte(n.Raw)
	if r.output == "yaml" {
		if text, err = yaml.JSONToYAML(text); err != nil {
			return false, err
		}
	}
	_, err = fmt.Fprintln(out, strings.TrimSpace(string(text)))
	return n.Report.Abnormal > 0, err
}
