package move

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
)

// answering is how long a kubelet may take for a log: other moves wait meanwhile.
const answering = 5 * time.Second

// A copying is the two movers that copy, until the source has handed the volume over.
type copying struct {
	move    *v1alpha1.VolumeMove
	api     apiServer
	objects objects
	movers  movers
	users   users
	reports Reports
	times   timeline
}

// run keeps the two movers running, shows what they report, and has pods stop at the fence. It says what is waited for, and nothing
// when the volume is handed over. What was copied when it was looked at last is so for as long as the movers work.
func (c copying) run(ctx context.Context, volume *corev1.PersistentVolume, copied bool) (outcome, error) {
	if ready, err := c.objects.connect(ctx, roleOut, roleIn); err != nil || !ready {
		return wait("Copying", "renew the certificates of the movers"), err
	}
	target, ended, err := c.movers.pod(ctx, roleIn, c.movers.args(roleIn, volume))
	if err != nil || target == nil {
		return wait("Copying", "start the mover on node %s: %s", c.move.Status.TargetNode, ended), err
	}
	address, waits := addressOf(target)
	if address == "" {
		return wait("Copying", "start the mover on node %s: %s", c.move.Status.TargetNode, waits), nil
	}
	source, ended, err := c.movers.pod(ctx, roleOut, append(c.movers.args(roleOut, volume), "--address="+address))
	if err != nil || source == nil {
		return wait("Copying", "start the mover on node %s: %s", c.move.Status.SourceNode, ended), err
	}
	if err := c.movers.letFence(ctx, source); err != nil {
		return outcome{}, err
	}
	report, err := c.read(ctx, source)
	done := source.Status.Phase == corev1.PodSucceeded
	if done && (hasNone(err) || err == nil && report.fence == "") { // the log is lost: it hands the volume over again
		return wait("Copying", "ask the mover on node %s again", c.move.Status.SourceNode), c.api.delete(ctx, source)
	}
	if err != nil {
		return c.unheard(ctx, err)
	}
	report.copied = report.copied || copied // a long pass fills what is read of the log
	report.show(&c.move.Status)
	c.times.fenced(report)
	c.times.heard(report, source, target)
	if done {
		c.move.Status.Fence = report.fence
		c.times.unused(report)
		return outcome{}, nil
	}
	return c.progress(ctx, source, target, report)
}

// addressOf is where a target listens, or what it waits for.
func addressOf(target *corev1.Pod) (address, waits string) {
	switch {
	case target.Status.PodIP != "":
		return net.JoinHostPort(target.Status.PodIP, strconv.Itoa(port)), ""
	case target.Status.Phase == corev1.PodSucceeded:
		// The source has ended too, or has only to repeat what it said.
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), ""
	}
	return "", cmp.Or(trouble(target), state(target))
}

// read is what a mover has reported.
func (c copying) read(ctx context.Context, pod *corev1.Pod) (progress, error) {
	if pod.Status.Phase != corev1.PodRunning && pod.Status.Phase != corev1.PodSucceeded {
		return progress{}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, answering)
	defer cancel()
	text, err := c.reports.Lines(ctx, pod.Namespace, pod.Name)
	return parseReport(text), err
}

// hasNone says that kubelet has answered, and has no log: where its disk is full it removes the containers of pods that have ended.
func hasNone(err error) bool { return apierrors.IsBadRequest(err) || apierrors.IsNotFound(err) }

// unheard waits for a log. Other moves do meanwhile what they have to do.
func (c copying) unheard(ctx context.Context, why error) (outcome, error) {
	from := c.move.Status.SourceNode
	said := fmt.Sprintf("the log of the mover on node %s cannot be read: %v; ", from, why)
	since := fencedSince(c.move)
	if since == nil {
		return outcome{"Unheard", said + "pods go on meanwhile", idle}, nil
	}
	said += fmt.Sprintf("it may have fenced the volume, which can start on no node then until the log is read and node %s has given it up", from)
	if c.move.Status.FencedTime == nil && c.times.now().Sub(since.Time) < fences { // what is made in the place of a pod may get the volume still
		return outcome{"Unheard", said, idle}, nil
	}
	waits, err := c.users.release(ctx)
	return outcome{"Unheard", said + ": " + waits, idle}, err
}

// progress says how far the movers are, and stops pods.
func (c copying) progress(ctx context.Context, source, target *corev1.Pod, report progress) (outcome, error) {
	of := cmp.Or(trouble(source), trouble(target))
	if report.copied && of == "" || report.fenced {
		c.move.Status.Phase = v1alpha1.Fenced
	}
	c.times.unused(report)
	switch {
	case of != "":
		return wait("Retrying", "%s", of), nil
	case c.move.Status.Standstill != nil: // what was reported is a part of the log, which a long pass fills
		return wait("Copying", "no pod uses the volume any more: copy what has changed, and compare"), nil
	case report.fenced:
		waits, err := c.users.release(ctx)
		return wait("WaitingForPods", "the volume can start on no node until it is given up on node %s: %s", c.move.Status.SourceNode, waits), err
	case c.move.Status.Phase == v1alpha1.Fenced:
		return wait("Fencing", "have the mover on node %s fence the volume: pass %d, %s sent", c.move.Status.SourceNode, report.passes, quantity(c.move.Status.BytesSent)), nil
	}
	return wait("Copying", "copy the volume while pods go on: pass %d, %s sent", report.passes+1, quantity(c.move.Status.BytesSent)), nil
}

func quantity(bytes int64) string {
	return fmt.Sprintf("%d MiB", bytes>>20)
}
