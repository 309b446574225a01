package cluster

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/test/cluster/process"
)

// Summarize prints what a person wants to see first when something has failed:
// the pods, the warnings, and the ends of the driver's logs.
func (c *Cluster) Summarize(ctx context.Context, to io.Writer) {
	if c.Client == nil {
		return
	}
	if pods, err := c.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{}); err != nil {
		fmt.Fprintln(to, "pods:", err)
	} else {
		fmt.Fprintln(to, "pods:")
		for _, pod := range pods.Items {
			fmt.Fprintf(to, "  %s/%s on %s: %s %s\n", pod.Namespace, pod.Name, cmp.Or(pod.Spec.NodeName, "no node"), pod.Status.Phase, State(pod))
		}
	}
	if events, err := c.Client.CoreV1().Events("").List(ctx, metav1.ListOptions{}); err != nil {
		fmt.Fprintln(to, "events:", err)
	} else {
		printWarnings(to, events.Items)
	}
	logs, err := filepath.Glob(filepath.Join(c.Logs, "*-pods", Namespace+"_*", "*", "*.log"))
	if err != nil {
		fmt.Fprintln(to, err)
	}
	for _, log := range logs {
		name, _ := filepath.Rel(c.Logs, log)
		fmt.Fprintf(to, "%s:\n%s\n", name, indent(process.Tail(log, 8)))
	}
}

// printWarnings prints the last of the events that are warnings.
func printWarnings(to io.Writer, events []corev1.Event) {
	events = slices.DeleteFunc(events, func(e corev1.Event) bool { return e.Type == corev1.EventTypeNormal })
	slices.SortFunc(events, func(a, b corev1.Event) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	fmt.Fprintln(to, "warnings:")
	for _, e := range events[max(0, len(events)-30):] {
		fmt.Fprintf(to, "  %s %s/%s: %s: %s\n", e.InvolvedObject.Kind, e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, strings.TrimSpace(e.Message))
	}
}

func indent(text string) string { return "    " + strings.ReplaceAll(text, "\n", "\n    ") }
