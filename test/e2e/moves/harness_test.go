package moves

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

// A victim is the process that is killed.
type victim int

const (
	none victim = iota
	sourceDriver
	targetDriver
	sourceMover
	targetMover
)

func (v victim) String() string {
	return []string{"nothing", "driver of the source", "driver of the target", "move-out", "move-in"}[v]
}

// A node has a driver with one pool.
type node struct {
	*drivertest.Driver
	pool  *drivertest.Pool
	moves *moves.Client
	peer  string
	// free is what the filesystem has while the volume is not there.
	free int64
}

// A harness is two nodes, and a volume that moves from the first to the second.
type harness struct {
	testing.TB
	from, to *node
	volume   drivertest.Volume
	trap     *trap.Trap
	// programs are those of the movers, by their commands.
	programs map[string]string
	// prefix is what programs are run by, and silence what they are given, if a test has them talk over a network.
	prefix  map[string][]string
	silence time.Duration
	address string
	certs   map[string][]string
	count   int         // of moves
	last    mover.Event // of the last pass
	said    string      // by the mover that made it

	writer *drivertest.Writer
}

func newHarness(t *testing.T, way way, of victim) *harness {
	t.Helper()
	driver := drivertest.Built(t)
	h := &harness{TB: t, volume: drivertest.Volume{ID: "pvc-1", Bytes: 24 * mib, Block: way.block}}
	programs := make([]string, targetMover+1)
	for i := range programs {
		programs[i] = driver
	}
	if of != none {
		h.trap = trap.New(t, driver)
		self, err := os.Executable() // which launches the driver
		must.Succeed(t, err)
		programs[of] = self
	}
	h.programs = map[string]string{"move-out": programs[sourceMover], "move-in": programs[targetMover]}
	h.from = newNode(t, way.from, programs[sourceDriver], "target-node")
	h.to = newNode(t, way.to, programs[targetDriver], "source-node")
	h.makeCerts()
	return h
}

func newNode(t *testing.T, p place, program, peer string) *node {
	t.Helper()
	path, err := os.MkdirTemp(p.mount(t), "pool-") //nolint:usetesting // t.TempDir is on another filesystem
	must.Succeed(t, err)
	pool := drivertest.PoolConfig{Name: "local", Path: path, Enforcement: p.enforcement}
	n := &node{pool: &drivertest.Pool{PoolConfig: pool}, peer: peer}
	n.Driver = drivertest.Start(t, drivertest.Config{Binary: program, Pools: []drivertest.PoolConfig{pool}, Flags: []string{"--v=4", drivertest.ServeMetrics}})
	n.pool.Driver = n.Driver
	n.moves, err = moves.Dial(strings.TrimPrefix(n.Process.Endpoint(), "unix://"))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, n.moves.Close()) })
	return n
}

func (h *harness) makeCerts() {
	h.Helper()
	a, err := drivertest.NewAuthority(h.TempDir())
	must.Succeed(h, err)
	h.certs = make(map[string][]string)
	for command, name := range map[string]string{"move-out": mover.SourceName, "move-in": mover.TargetName} {
		use := x509.ExtKeyUsageClientAuth
		if command == "move-in" {
			use = x509.ExtKeyUsageServerAuth
		}
		certificate, key, err := a.Issue(name, use)
		must.Succeed(h, err)
		h.certs[command] = []string{"--cert-file=" + certificate, "--key-file=" + key, "--ca-file=" + a.File}
	}
}

// begin makes the volume on the source, with a pod that writes.
func (h *harness) begin() {
	h.Helper()
	h.count++
	h.address = testenv.FreeAddress(h)
	for _, n := range []*node{h.from, h.to} {
		n.free = n.unused()
	}
	_, err := h.from.Create(h.Context(), h.volume)
	must.Succeed(h, err)
	must.Succeed(h, h.from.Publish(h.Context(), h.volume, "pod"))
	if !h.volume.Block {
		must.Succeed(h, fill(h.from.Target("pod")))
	}
	h.writer = &drivertest.Writer{Block: h.volume.Block}
	h.writer.Start(h.from.Target("pod"))
	h.Cleanup(func() { h.stopWriter() })
}

// fill makes what is harder to copy than a file.
func fill(directory string) error {
	at := func(name string) string { return filepath.Join(directory, name) }
	return errors.Join(
		os.Mkdir(at("dir"), 0o750),
		os.WriteFile(at("dir/file"), bytes.Repeat([]byte("0123456789abcdef"), 20_000), 0o640),
		os.Link(at("dir/file"), at("link")),
		os.Symlink("dir/file", at("symlink")),
		os.Truncate(at("dir/file"), mib),
		os.Chown(at("dir"), 1000, 1000),
	)
}

// end removes the volume from the target, and expects nothing to be left anywhere.
func (h *harness) end() {
	h.Helper()
	h.check(h.to, []drivertest.Kept{{Volume: h.volume}})
	h.check(h.from, nil)
	h.wantContent(h.to)
	h.awake(h.to)
	h.to.Must(drivertest.Repeat(h.Context(), func() error { return h.to.Delete(h.Context(), h.volume.ID) }))
	h.to.pool.AwaitErased()
	h.check(h.to, nil)
	for _, n := range []*node{h.from, h.to} {
		n.pool.AwaitErased()
		// Not GetCapacity: a driver sees within a minute what others have freed.
		n.Eventually("the promise is given back", func() bool { return n.Metric("hostpath_pool_promised_bytes", n.pool.Name) == 0 })
		n.Eventually("the space is free again", func() bool { return n.unused() >= n.free-8*mib }) // of what filesystems keep for their own
	}
}

// unused is what the filesystem of the pool has free.
func (n *node) unused() int64 {
	n.Helper()
	var fs unix.Statfs_t
	n.Must(errors.Join(n.pool.Settle(), unix.Statfs(n.pool.Path, &fs)))
	return int64(fs.Bfree) * fs.Bsize // less than is available on btrfs, where chunks stay allocated
}

// check expects a pool to have these volumes, in order, and nothing else.
func (h *harness) check(n *node, all []drivertest.Kept) {
	h.Helper()
	h.awake(n)
	n.pool.AwaitErased()
	if err := n.pool.Problems(all); err != nil {
		h.Error(err)
	}
}

// size is that of the volume as a pod sees it.
func (h *harness) size(n *node, pod string) int64 {
	h.Helper()
	stats, err := n.Stats(h.Context(), h.volume.ID, pod)
	n.Must(err)
	return stats.GetUsage()[0].GetTotal()
}

// awake runs a driver again that was killed.
func (h *harness) awake(n *node) {
	h.Helper()
	if n.Process.Running() {
		return
	}
	must.Succeed(h, n.Process.Kill())
	for try := 0; ; try++ {
		err := n.Process.Restart(h.Context())
		if err == nil {
			n.AwaitServing()
			return
		}
		if try == 3 { // it may have been killed at its start
			h.Fatal(err)
		}
	}
}

// move moves the volume, whatever is killed meanwhile.
func (h *harness) move() {
	h.Helper()
	out, in := h.start("move-out", "copy"), h.start("move-in", "copy")
	seen, began := 0, time.Now()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for ; !out.ended(); <-again.C {
		h.within(began, out)
		if out.says("waiting") {
			h.stopWriter()
		}
		h.keep(h.from, h.to)
		if !in.running() {
			in = h.start("move-in", "copy")
		}
		if !out.running() && !out.ended() {
			out = h.again(out)
		}
		if now := out.said(); now != seen {
			seen = now
			h.look()
		}
	}
	fence := out.last().Fence
	h.last, h.said = out.lastPass(), out.output()
	in.await("listening") // a program is not killed while it gets into the trap
	in.kill()
	h.run("move-in", "confirm", "--fence="+fence)
	h.look()
	h.run("move-out", "remove")
	h.look()
}

// within ends the test if a mover does not end.
func (h *harness) within(began time.Time, m *moverProcess) {
	h.Helper()
	if time.Since(began) > drivertest.Patience {
		h.Fatalf("%s does not end:\n%s", m.command, m.output())
	}
}

// keep keeps drivers running.
func (h *harness) keep(nodes ...*node) {
	h.Helper()
	for _, n := range nodes {
		h.awake(n)
	}
}

// again runs a mover again that has failed or was killed.
func (h *harness) again(m *moverProcess) *moverProcess {
	h.Helper()
	if m.runs >= 20 {
		h.Fatalf("%s fails each time:\n%s", m.command, m.output())
	}
	next := h.start(m.command, m.step, m.more...)
	next.runs = m.runs + 1
	return next
}

// run does a step of a mover, again and again until it succeeds.
func (h *harness) run(command, step string, more ...string) {
	h.Helper()
	again := time.NewTicker(2 * time.Millisecond)
	defer again.Stop()
	began := time.Now()
	for m := h.start(command, step, more...); !m.ended(); <-again.C {
		h.within(began, m)
		h.keep(h.from, h.to)
		if !m.running() && !m.ended() {
			m = h.again(m)
		}
	}
}

// once does a step of a mover, and returns what it said last.
func (h *harness) once(command, step string, more ...string) mover.Event {
	h.Helper()
	m := h.start(command, step, more...)
	<-m.exited
	return m.last()
}

// look expects no more than one node to publish the volume, and what is published to be the whole of what the pod has written.
func (h *harness) look() {
	h.Helper()
	var published []*node
	nodes := []*node{h.from, h.to}
	for _, n := range nodes {
		switch err := n.Publish(h.Context(), h.volume, "look"); status.Code(err) {
		case codes.OK:
			published = append(published, n)
		case codes.NotFound, codes.FailedPrecondition, codes.Unavailable, codes.Aborted:
		default:
			h.Errorf("publish the volume: %v", err)
		}
	}
	if len(published) > 1 {
		h.Error("both nodes publish the volume")
	}
	if len(published) == 1 && published[0] == h.to {
		h.wantContentAt(h.to.Target("look"))
	}
	for _, n := range nodes { // also one that was killed when it had mounted
		h.unpublish(n, "look")
	}
}

// unpublish takes the volume from a pod, as kubelet does until it succeeds.
func (h *harness) unpublish(n *node, pod string) {
	h.Helper()
	for {
		h.awake(n)
		switch err := n.Unpublish(h.Context(), h.volume.ID, pod); status.Code(err) {
		case codes.OK:
			return
		case codes.Unavailable, codes.Aborted:
		default:
			h.Fatal(err)
		}
	}
}

// wantRefused expects a node not to publish the volume. Its mover may be asking for it at that moment.
func (h *harness) wantRefused(n *node) {
	h.Helper()
	err := drivertest.Repeat(h.Context(), func() error { return n.Publish(h.Context(), h.volume, "refused") })
	n.WantCode("publish a volume that moves", err, codes.FailedPrecondition)
	if err != nil && !strings.Contains(err.Error(), n.peer) {
		h.Errorf("%v does not say which the other node is", err)
	}
}

// stopWriter ends the pod.
func (h *harness) stopWriter() {
	h.Helper()
	if !h.writer.Writes() {
		return
	}
	must.Succeed(h, h.writer.Stop())
	h.unpublish(h.from, "pod")
}

// wantContent expects a node to have all that the pod has written.
func (h *harness) wantContent(n *node) {
	h.Helper()
	h.awake(n)
	must.Succeed(h, drivertest.Repeat(h.Context(), func() error { return n.Publish(h.Context(), h.volume, "read") }))
	h.wantContentAt(n.Target("read"))
	h.unpublish(n, "read")
}

func (h *harness) wantContentAt(target string) {
	h.Helper()
	if err := h.writer.IsAt(target); err != nil {
		h.Error(err)
	}
	if h.volume.Block {
		return
	}
	data, err := os.ReadFile(filepath.Join(target, "symlink"))
	want := append(bytes.Repeat([]byte("0123456789abcdef"), 20_000), make([]byte, mib-320_000)...)
	if err != nil || !bytes.Equal(data, want) {
		h.Errorf("a file is another: %d bytes (%v)", len(data), err)
	}
	one, oneErr := os.Stat(filepath.Join(target, "link"))
	two, twoErr := os.Stat(filepath.Join(target, "dir/file"))
	if oneErr != nil || twoErr != nil || !os.SameFile(one, two) || one.Mode() != 0o640 {
		h.Errorf("a hard link is %v, %v (%v, %v)", one, two, oneErr, twoErr)
	}
}

// A moverProcess is one run of move-out or move-in.
type moverProcess struct {
	command, step string
	more          []string
	runs          int
	cmd           *exec.Cmd
	exited        chan struct{}
	err           error

	mu     sync.Mutex
	events []mover.Event
	errors bytes.Buffer
	news   chan struct{}
}

// start runs a mover.
func (h *harness) start(command, step string, more ...string) *moverProcess {
	h.Helper()
	n := h.from
	if command == "move-in" {
		n = h.to
	}
	pools, err := json.Marshal([]drivertest.PoolConfig{n.pool.PoolConfig})
	must.Succeed(h, err)
	args := append([]string{
		command, "--step=" + step, "--datadir=" + string(pools), "--endpoint=" + n.Process.Endpoint(), "--volume=" + h.volume.ID,
		fmt.Sprintf("--move=move-%d", h.count), "--peer=" + n.peer,
	}, append(h.certs[command], more...)...)
	if step == "copy" {
		args = append(args, "--address="+h.address)
	}
	if h.silence > 0 {
		args = append(args, "--silence="+h.silence.String())
	}
	m := &moverProcess{command: command, step: step, more: more, exited: make(chan struct{}), news: make(chan struct{}, 1)}
	line := slices.Concat(h.prefix[command], []string{h.programs[command]}, args)
	m.cmd = exec.Command(line[0], line[1:]...)
	m.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	m.cmd.Stderr = &m.errors
	said, err := m.cmd.StdoutPipe()
	must.Succeed(h, err)
	must.Succeed(h, drivertest.Spawn(m.cmd, func() {
		m.read(said)
		m.err = m.cmd.Wait()
		close(m.exited)
	}))
	h.Cleanup(m.kill)
	return m
}

func (m *moverProcess) read(said io.Reader) {
	for lines := json.NewDecoder(said); ; {
		var e mover.Event
		if lines.Decode(&e) != nil {
			return // it has ended
		}
		m.mu.Lock()
		m.events = append(m.events, e)
		m.mu.Unlock()
		select {
		case m.news <- struct{}{}:
		default:
		}
	}
}

func (m *moverProcess) kill() {
	_ = m.cmd.Process.Kill() // it may have ended
	<-m.exited
}

// stop has the process stand still, and goOn ends that.
func (m *moverProcess) stop() error { return m.cmd.Process.Signal(syscall.SIGSTOP) }
func (m *moverProcess) goOn() error { return m.cmd.Process.Signal(syscall.SIGCONT) }

func (m *moverProcess) running() bool {
	select {
	case <-m.exited:
		return false
	default:
		return true
	}
}

// ended reports whether the mover has done its step.
func (m *moverProcess) ended() bool { return !m.running() && m.err == nil }

func (m *moverProcess) says(event string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.events {
		if e.Event == event {
			return true
		}
	}
	return false
}

// said is how many events there were.
func (m *moverProcess) said() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.events)
}

func (m *moverProcess) last() mover.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.events) == 0 {
		return mover.Event{}
	}
	return m.events[len(m.events)-1]
}

// lastPass is the event of the last pass, if it was made.
func (m *moverProcess) lastPass() (last mover.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.events {
		if e.Last {
			last = e
		}
	}
	return last
}

// await waits for an event, which is the last one then or was before.
func (m *moverProcess) await(event string) mover.Event {
	for timeout := time.After(drivertest.Patience); ; {
		if m.says(event) {
			return m.last()
		}
		select {
		case <-m.news:
		case <-m.exited:
			if m.says(event) {
				return m.last()
			}
			return mover.Event{Event: "exited", Error: m.output()}
		case <-timeout:
			return mover.Event{Event: "timeout", Error: m.output()}
		}
	}
}

func (m *moverProcess) output() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return fmt.Sprintf("%+v\n%s", m.events, &m.errors)
}
