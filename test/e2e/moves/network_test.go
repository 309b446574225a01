package moves

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// A network is between the movers of two nodes, which are in network namespaces of their own.
type network struct {
	testing.TB
	sides [2]string // the ids of processes in the namespaces of the source and of the target
	macs  [2]string
}

const device = "veth0" // of both sides

var addresses = [2]string{"192.0.2.1", "192.0.2.2"}

// A direction is which packets are lost.
type direction struct {
	name string
	from [2]bool // from the source, from the target
}

var directions = []direction{
	{"to the target", [2]bool{true, false}},
	{"to the source", [2]bool{false, true}},
	{"both", [2]bool{true, true}},
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip", "tc", "nsenter", "cat")
	n := &network{TB: t}
	for i := range n.sides {
		n.sides[i] = holdNetwork(t)
	}
	n.run("ip", "link", "add", device, "netns", n.sides[0], "type", "veth", "peer", "name", device, "netns", n.sides[1])
	for i := range n.sides {
		n.in(i, "ip", "address", "add", addresses[i]+"/24", "dev", device)
		n.in(i, "ip", "link", "set", device, "up")
		fields := strings.Fields(n.in(i, "ip", "-o", "link", "show", device))
		for at, field := range fields {
			if field == "link/ether" {
				n.macs[i] = fields[at+1]
			}
		}
	}
	n.mend()
	return n
}

// holdNetwork starts a process in a network namespace of its own, and returns its id. It ends with the test, also if that is killed: what
// it reads ends then. The namespace has no name, so that it goes with its last process.
func holdNetwork(t *testing.T) string {
	t.Helper()
	holder := exec.CommandContext(context.WithoutCancel(t.Context()), "cat")
	holder.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	end, err := holder.StdinPipe()
	must.Succeed(t, err, holder.Start())
	t.Cleanup(func() { must.Succeed(t, end.Close(), holder.Wait()) })
	return strconv.Itoa(holder.Process.Pid)
}

// enter is what a program is run by in the namespace of a side.
func (n *network) enter(side int) []string {
	return []string{"nsenter", "--net=/proc/" + n.sides[side] + "/ns/net"}
}

func (n *network) in(side int, command ...string) string {
	n.Helper()
	return n.run(slices.Concat(n.enter(side), command)...)
}

func (n *network) run(command ...string) string {
	n.Helper()
	out, err := exec.CommandContext(n.Context(), command[0], command[1:]...).CombinedOutput()
	if err != nil {
		n.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
	}
	return string(out)
}

// cut has packets be lost without a word: they go to a station that is not there.
func (n *network) cut(d direction) {
	n.Helper()
	for i, lost := range d.from {
		if lost {
			n.neighbour(i, "02:00:00:00:00:ff")
		}
	}
}

func (n *network) mend() {
	n.Helper()
	for i := range n.sides {
		n.neighbour(i, n.macs[1-i])
	}
}

// neighbour has a side send to a station as the other one.
func (n *network) neighbour(of int, station string) {
	n.Helper()
	n.in(of, "ip", "neighbour", "replace", addresses[1-of], "lladdr", station, "dev", device, "nud", "permanent")
}

// slow has both sides send no more than this in a second.
func (n *network) slow(bytes int) {
	n.Helper()
	for side := range n.sides {
		n.in(side, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", fmt.Sprint(bytes, "bps"), "burst", "64kb", "latency", "300ms")
	}
}

func (n *network) fast() {
	n.Helper()
	for side := range n.sides {
		n.in(side, "tc", "qdisc", "del", "dev", device, "root")
	}
}

// over has the movers talk over a network, and give up a side that is silent for a second.
func (h *harness) over(n *network) {
	h.address, h.silence = addresses[1]+":8444", time.Second
	h.prefix = map[string][]string{"move-out": n.enter(0), "move-in": n.enter(1)}
}

// writeBulk writes what takes seconds over a slow link, where the pod writes nothing.
func (h *harness) writeBulk() {
	h.Helper()
	name, at := h.from.Target("pod"), int64(8*mib)
	if !h.volume.Block {
		name, at = filepath.Join(name, "bulk"), 0
	}
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	must.Succeed(h, err)
	_, err = f.WriteAt(bytes.Repeat([]byte("bulk"), 2*mib), at)
	must.Succeed(h, err, f.Sync(), f.Close())
}

// soon is within what a connection ends that was cut: both sides are silent for a second then. What is sent into the dark is repeated for a
// quarter of an hour.
const soon = 30 * time.Second

// The network is cut in a pass over a slow link, and again in the fence. Each time both sides end soon, nothing changes hands, and the movers
// go on when they are run again.
func TestNetworkIsCut(t *testing.T) {
	if testing.Short() {
		testCut(t, ways()[0], directions[0])
		return
	}
	for _, way := range ways() {
		for _, d := range directions {
			t.Run(way.String()+"/"+d.name, func(t *testing.T) { testCut(t, way, d) })
		}
	}
}

func testCut(t *testing.T, way way, d direction) {
	n := newNetwork(t)
	h := newHarness(t, way, none)
	h.begin()
	h.over(n)
	h.writeBulk()
	n.slow(1 << 20)
	in, out := h.start("move-in", "copy"), h.start("move-out", "copy")
	out.awaitBytes()
	n.cut(d)
	cut := time.Now()
	out.await("unbased") // or it ends: from references it goes on with another session
	in.await("refused")
	if took := time.Since(cut); took > soon {
		t.Errorf("both sides end after %v:\n%s\n%s", took, out.output(), in.output())
	}
	h.look()
	if t.Failed() {
		return
	}
	n.mend()
	if testing.Short() {
		n.fast()
	}
	if !out.running() {
		out = h.start("move-out", "copy")
	}
	out.await("waiting")
	n.cut(d)
	h.stopWriter()
	out.await("unused")
	h.wantRefused(h.from)
	h.wantRefused(h.to)
	n.mend()
	out.kill()
	in.kill()
	h.move()
	h.end()
}

// awaitBytes waits until a pass has sent some.
func (m *moverProcess) awaitBytes() {
	for {
		m.mu.Lock()
		for _, e := range m.events {
			if e.Event == mover.Passing && e.Bytes > 0 {
				m.mu.Unlock()
				return
			}
		}
		m.mu.Unlock()
		select {
		case <-m.news:
		case <-m.exited:
			return
		}
	}
}

// A peer that is slow is no peer that is silent: the target takes nothing for much longer than a side may be silent, and goes on.
func TestTargetIsSlow(t *testing.T) {
	n := newNetwork(t)
	h := newHarness(t, ways()[0], none)
	h.begin()
	h.over(n)
	h.writeBulk()
	n.slow(1 << 20)
	in, out := h.start("move-in", "copy"), h.start("move-out", "copy")
	out.awaitBytes()
	must.Succeed(t, in.stop())
	select {
	case <-out.exited:
		t.Errorf("the source gives up a target that is slow:\n%s", out.output())
	case <-time.After(4 * h.silence):
	}
	must.Succeed(t, in.goOn())
	n.fast()
	out.await("waiting")
	h.stopWriter()
	fence := out.await("handed-over").Fence
	in.await("ended")
	h.run("move-in", "confirm", "--fence="+fence)
	h.run("move-out", "remove")
	h.end()
}
