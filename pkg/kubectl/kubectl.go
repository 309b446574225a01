// Package kubectl is what `kubectl hostpath` shows of a cluster, the pools and volumes of all nodes, and how it moves volumes.
//
// It asks through kubectl itself, which knows how the user reaches the cluster and as whom. It needs no service of its own: what is on
// a node is what `inspect` reports in the driver's pod there. It links nothing of the driver, so that it runs where kubectl does.
package kubectl

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"
)

// A Kubectl runs kubectl.
type Kubectl struct {
	// Program is a name in the PATH, or a path.
	Program string
	// Flags come first in each command, such as --context=test.
	Flags []string
	// Namespace is that of the driver. Pods in other namespaces are not asked, whatever their labels: any user who can create pods
	// can label them like the driver's, and have them report what is not so.
	Namespace string
	// Within is how long the API server may take for a call amid moves, which is made again then; 0 for half a minute.
	Within time.Duration
}

// grace is how long kubectl may take to end after its time is over.
const grace = time.Second

// run returns what kubectl printed. The error has what it said, and is an *exec.ExitError where it or the command that it ran failed.
func (k Kubectl) run(ctx context.Context, arguments ...string) ([]byte, error) {
	return k.feed(ctx, nil, arguments...)
}

// feed is run, with something for kubectl to read.
func (k Kubectl) feed(ctx context.Context, in io.Reader, arguments ...string) ([]byte, error) {
	command := exec.CommandContext(ctx, k.Program, append(append([]string{}, k.Flags...), arguments...)...)
	command.Stdin = in
	var said bytes.Buffer
	command.Stderr = &said
	command.WaitDelay = grace
	out, err := command.Output()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return out, fmt.Errorf("%w: %s", err, lastLine(said.String()))
	}
	return out, nil
}

// lastLine is the one that has the reason. It may be a node's, and is shown on a terminal.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return printable(lines[len(lines)-1])
}

// get reads objects of a kind in all namespaces.
func get[T any](ctx context.Context, k Kubectl, to *[]T, kind string, more ...string) error {
	return list(ctx, k, to, kind, append([]string{"--all-namespaces"}, more...)...)
}

func list[T any](ctx context.Context, k Kubectl, to *[]T, kind string, more ...string) error {
	out, err := k.run(ctx, append([]string{"get", kind, "--output=json"}, more...)...)
	var list struct{ Items []T }
	if err == nil {
		err = json.Unmarshal(out, &list)
	}
	if err != nil {
		return fmt.Errorf("list %s: %w", kind, err)
	}
	*to = list.Items
	return nil
}

// abnormal is the exit status of inspect where something is wrong: the report is whole.
const abnormal = 2

// Inspect asks the driver's pod for its report, and returns that as it is.
func (k Kubectl) Inspect(ctx context.Context, d Driver) (json.RawMessage, error) {
	out, err := k.run(ctx, "exec", "--namespace="+d.Namespace, d.Pod, "--container="+container, "--", "/hostpath-csi-driver", "inspect", "--output=json")
	var failed *exec.ExitError
	if errors.As(err, &failed) && failed.ExitCode() == abnormal && json.Valid(out) {
		return out, nil
	}
	return out, err
}
