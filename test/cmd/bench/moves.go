package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

const (
	// movedID is the volume that moves, changedID one whose pod writes meanwhile, and otherID one that does not move.
	movedID   = "pvc-moved"
	changedID = "pvc-changed"
	otherID   = "pvc-other"
	// changedBytes are written after all passes but the last.
	changedBytes = 100 << 20
	// readBytes is the most of a volume that is read as a whole while no pod has it, since its filesystem shares no blocks.
	readBytes = 256 << 20
	// sharing is the filesystem of the harness that shares blocks, whatever the pools are on.
	sharing = "shares"
	// perFile is more than a small file takes on a filesystem, with its inode and its name.
	perFile = 8 << 10
	// mostMoverBytes is what a mover may have, however many files it copies.
	mostMoverBytes = 64 << 20
)

// moveRows compare moves with what else copies as much over the same kind of connection from and to the same disk, and look at what the
// programs of a move do to the node.
func moveRows(h *harness) []row {
	t := h.tunnel()
	h.makeFilesystem(sharing, "xfs", max(filesystemBytes, 6*h.moved))
	large := t.largeFile()
	rows := append(append([]row{t.fileRow(large)}, t.filesRows()...), t.differenceRow(large))
	p := t.passage("fs")
	return append(append(rows, p.standstillRow(min(t.s.moved, readBytes), ""), t.passage(sharing).standstillRow(t.s.moved, ", XFS")), p.moverRows()...)
}

// A tunnel makes connections between the two sides of a move, which are on this machine.
type tunnel struct {
	s *harness
	// on is a directory of the filesystem that is measured.
	on             string
	source, target mover.Identity
}

func (h *harness) tunnel() *tunnel {
	t := &tunnel{s: h, on: h.path("fs/transfers")}
	check(os.MkdirAll(t.on, 0o750), os.Mkdir(h.path("certificates"), 0o700))
	authority := got(drivertest.NewAuthority(h.path("certificates")))
	issue := func(name string, use x509.ExtKeyUsage) mover.Identity {
		certificate, key, err := authority.Issue(name, use)
		check(err)
		return mover.Identity{CertFile: certificate, KeyFile: key, CAFile: authority.File}
	}
	t.source, t.target = issue(mover.SourceName, x509.ExtKeyUsageClientAuth), issue(mover.TargetName, x509.ExtKeyUsageServerAuth)
	return t
}

func (t *tunnel) path(name string) string { return filepath.Join(t.on, name) }

// connect makes a connection as movers do.
func (t *tunnel) connect() (here, there *tls.Conn) {
	listener := got(mover.Listen(t.s.ctx, "127.0.0.1:0", t.target, mover.Silence))
	defer func() { check(listener.Close()) }()
	dial := got(mover.Dialer(listener.Addr().String(), t.source, mover.Silence))
	done := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			there = conn.(*tls.Conn)
			err = there.HandshakeContext(t.s.ctx)
		}
		done <- err
	}()
	here = got(dial(t.s.ctx)).(*tls.Conn)
	check(<-done)
	return here, there
}

// copying measures how many units are copied in a second from one directory to another, which is made anew, with making them durable.
func (t *tunnel) copying(units float64, to string, do func(here, there *tls.Conn)) func() float64 {
	var here, there *tls.Conn
	took := timed(func() {
		check(os.RemoveAll(to), os.Mkdir(to, 0o755))
		syncfs(to)
		here, there = t.connect()
	}, func() {
		do(here, there)
	}, func() {
		_, _ = here.Close(), there.Close() // all was said
		check(os.RemoveAll(to))            // it may be large
	})
	return func() float64 { return units * 1e6 / took() }
}

// both runs two sides at once. If one fails, the connection is closed, and the other ends too.
func (t *tunnel) both(here, there *tls.Conn, send, receive action) {
	received := make(chan error, 1)
	side := func(conn io.Closer, do action) error {
		err := try(do)
		if err != nil {
			_ = conn.Close() // the error of do counts
		}
		return err
	}
	go func() { received <- side(there, receive) }()
	err := side(here, send)
	check(err, <-received)
}

// transfer copies as a mover does.
func (t *tunnel) transfer(from, to string) func(here, there *tls.Conn) {
	return t.pass(from, to, transfer.Pass{Still: true})
}

func (t *tunnel) pass(from, to string, p transfer.Pass) func(here, there *tls.Conn) {
	return func(here, there *tls.Conn) {
		src, dst := got(dir.Open(from)), got(dir.Open(to))
		defer func() { check(src.Close(), dst.Close()) }()
		t.both(here, there, func() {
			sender := transfer.NewSender(here, transfer.Options{})
			got(sender.Pass(t.s.ctx, src, p))
			check(sender.Finish(t.s.ctx))
		}, func() {
			check(transfer.Receive(t.s.ctx, there, dst, transfer.Options{}))
		})
	}
}

// largeFile makes the file that is copied, on a filesystem that shares blocks, and returns it.
func (t *tunnel) largeFile() *os.File {
	from := filepath.Join(t.s.path(sharing), "volume")
	check(os.Mkdir(from, 0o755))
	file := got(os.Create(filepath.Join(from, diskFile)))
	t.s.ends = append(t.s.ends, file.Close)
	got(io.CopyN(file, rand.Reader, t.s.moved)) // what is zero would not be sent
	syncfs(from)
	return file
}

// fileRow compares a large file with io.Copy.
func (t *tunnel) fileRow(file *os.File) row {
	from, to := filepath.Dir(file.Name()), filepath.Join(t.s.path(sharing), "received")
	mib := float64(t.s.moved) / (1 << 20)
	return row{
		name: fmt.Sprintf("moving a file of %s MiB, XFS", thousands(int(t.s.moved>>20))), unit: "MiB/s", budget: budget{atLeast: 0.8},
		ours: t.copying(mib, to, t.transfer(from, to)),
		limit: t.copying(mib, to, func(here, there *tls.Conn) {
			in, out := got(os.Open(file.Name())), got(os.Create(filepath.Join(to, diskFile)))
			defer func() { check(in.Close(), out.Close()) }()
			t.both(here, there, func() {
				got(io.Copy(here, in))
				check(here.CloseWrite())
			}, func() {
				got(io.Copy(out, there))
				syncfs(to)
			})
		}),
	}
}

// differenceRow compares finding and sending 1 % of a file that was changed since a base with sending as much.
func (t *tunnel) differenceRow(file *os.File) row {
	const part, apart = 1 << 20, 100 << 20
	at := func(name string) string { return filepath.Join(t.s.path(sharing), name) }
	from, to, base, other, size := filepath.Dir(file.Name()), at("copy"), at("base"), at("other"), t.s.moved
	t.share(from, to)
	syncfs(from)

	var here, there *tls.Conn
	var on *dir.Dir
	hangUp := func() { _, _ = here.Close(), there.Close() } // all was said
	ours := timed(func() {
		t.share(from, base)
		content := make([]byte, part)
		for offset := int64(0); offset < size; offset += apart {
			_, _ = rand.Read(content)
			got(file.WriteAt(content, offset))
		}
		syncfs(from)
		on = got(dir.Open(base))
		here, there = t.connect()
	}, func() {
		t.pass(from, to, transfer.Pass{Still: true, Base: on})(here, there)
	}, func() {
		hangUp()
		check(on.Close(), os.RemoveAll(base))
	})
	limit := timed(func() {
		check(os.Mkdir(other, 0o755))
		syncfs(other)
		here, there = t.connect()
	}, func() {
		out := got(os.Create(filepath.Join(other, diskFile)))
		defer func() { check(out.Close()) }()
		t.both(here, there, func() {
			for offset := int64(0); offset < size; offset += apart {
				got(io.Copy(here, io.NewSectionReader(file, offset, part)))
			}
			check(here.CloseWrite())
		}, func() {
			got(io.Copy(out, there))
			syncfs(other)
		})
	}, func() {
		hangUp()
		check(os.RemoveAll(other)) // it is large
	})
	name := fmt.Sprintf("finding and sending 1 %% of %s MiB", thousands(int(size>>20)))
	return row{name: name, unit: micros, budget: budget{atMost: 2}, samples: 5, ours: ours, limit: limit}
}

// share copies a tree on a filesystem that shares blocks.
func (t *tunnel) share(from, to string) {
	check(os.Mkdir(to, 0o755))
	src, dst := got(dir.Open(from)), got(dir.Open(to))
	defer func() { check(src.Close(), dst.Close()) }()
	got(clone.Tree(t.s.ctx, src, dst, clone.Options{Method: clone.Share, Rounds: 1}))
}

// filesRows compare small files with tar.
func (t *tunnel) filesRows() []row {
	from, to := t.path("files"), t.path("files.copy")
	check(os.Mkdir(from, 0o755))
	files := t.s.files / 2
	scatter(from, files, bytes.Repeat([]byte("bench"), 820)[:4<<10])
	return []row{{
		name: fmt.Sprintf("moving %s files of 4 KiB", thousands(files)), unit: "files/s", budget: budget{atLeast: 0.6},
		ours: t.copying(float64(files), to, t.transfer(from, to)),
		limit: t.copying(float64(files), to, func(here, there *tls.Conn) {
			t.both(here, there, func() {
				pack := exec.CommandContext(t.s.ctx, "tar", "--create", "--directory="+from, ".")
				packed := got(pack.StdoutPipe())
				check(pack.Start())
				got(io.Copy(here, packed))
				check(pack.Wait(), here.CloseWrite())
			}, func() {
				unpack := exec.CommandContext(t.s.ctx, "tar", "--extract", "--directory="+to)
				packed := got(unpack.StdinPipe())
				check(unpack.Start())
				got(io.Copy(packed, there))
				check(packed.Close(), unpack.Wait())
				syncfs(to)
			})
		}),
	}}
}

// A passage is two drivers, and volumes that go from one to the other and back, by the real movers.
type passage struct {
	*tunnel
	from, to *actor
	moves    int
	others   []call
	// Of the last move: the most memory of each mover, in MiB, and how long the others' calls took meanwhile, in microseconds.
	memory map[string]float64
	calls  []float64
}

const (
	moveOut = "move-out"
	moveIn  = "move-in"
)

func (t *tunnel) passage(filesystem string) *passage {
	return &passage{tunnel: t, from: t.s.enter(filesystem), to: t.s.enter(filesystem), memory: map[string]float64{}}
}

// standstillRow is the time in which no pod can have a volume of so many bytes of which a part was changed since the passes: from the end of
// NodeUnpublishVolume on the source to that of NodePublishVolume on the target.
func (p *passage) standstillRow(size int64, on string) row {
	p.from.create(changedID, size+fullBytes)()
	file := filepath.Join(p.from.pool(), changedID, "disk.img")
	write := func(bytes int64) {
		f := got(os.OpenFile(file, os.O_WRONLY|os.O_CREATE, 0o600))
		got(io.CopyN(f, rand.Reader, bytes))
		check(f.Close())
	}
	write(size)
	ours := func() float64 {
		p.from.publish(changedID)()
		out, in := p.copy(changedID, "--verify=changed")
		select {
		case <-out.waiting:
		case <-out.ended:
			check(out.err, errors.New("move-out has not waited for the pod"))
		}
		write(min(changedBytes, size))
		p.from.unpublish(changedID)()
		began := time.Now()
		check(out.wait(), in.wait(), p.start(changedID, moveIn, "confirm", "--fence="+out.fence).wait())
		p.to.publish(changedID)()
		took := time.Since(began)
		p.to.unpublish(changedID)()
		p.undo(changedID, "--even-confirmed")
		return took.Seconds()
	}
	name := fmt.Sprintf("standstill with %d MiB changed of %s MiB%s", min(changedBytes, size)>>20, thousands(int(size>>20)), on)
	return row{name: name, unit: "s", budget: budget{max: 5}, ours: ours}
}

// moverRows are those of a move of very many files: the memory of the movers, and what the drivers do meanwhile.
func (p *passage) moverRows() (rows []row) {
	files := p.s.moverFiles
	p.from.create(movedID, fullBytes+int64(files)*perFile)()
	scatter(filepath.Join(p.from.pool(), movedID), files, []byte("bench"))
	with := fmt.Sprintf("%s files", thousands(files))
	// The first row of a round moves, and the others are of that move.
	memory := func(of string) row {
		return row{name: "memory of " + of + ", " + with, unit: "MiB", budget: budget{max: mostMoverBytes >> 20}, ours: func() float64 { return p.memory[of] }}
	}
	out := memory(moveOut)
	out.ours = func() float64 {
		p.move()
		return p.memory[moveOut]
	}
	rows = append(rows, out, memory(moveIn))
	p.others = append(p.from.pods("source"), p.to.pods("target")...)
	for i, c := range p.others {
		rows = append(rows, row{
			name: fmt.Sprintf("%s while %s move", c.name, with), unit: micros, budget: budget{atMost: 2},
			ours:  func() float64 { return p.calls[i] },
			limit: func() float64 { return median(repeat(p.s.fewer(3), c.measure)) },
		})
	}
	return rows
}

func repeat(times int, measure func() float64) (all []float64) {
	for range times {
		all = append(all, measure())
	}
	return all
}

// A call is one for another volume than the one that moves.
type call struct {
	name    string
	measure func() float64
}

// pods are the calls that pods wait for.
func (a *actor) pods(side string) []call {
	fresh := a.volume("pvc-fresh")
	a.create(otherID, volumeBytes)()
	return []call{
		{"NodePublishVolume on the " + side, timed(nothing, a.publish(otherID), a.unpublish(otherID))},
		{"CreateVolume on the " + side, timed(nothing, fresh.do, fresh.undo)},
	}
}

// copy starts both sides of a move, which end when the volume is handed over.
func (p *passage) copy(id string, more ...string) (out, in *moverProcess) {
	p.moves++
	listener := got(net.Listen("tcp", "127.0.0.1:0"))
	address := "--address=" + listener.Addr().String()
	check(listener.Close())
	in = p.start(id, moveIn, "copy", address)
	return p.start(id, moveOut, "copy", append(more, address)...), in
}

// undo undoes a move that was handed over.
func (p *passage) undo(id string, more ...string) {
	check(p.start(id, moveIn, "abort", more...).wait(), p.start(id, moveOut, "undo", "--target-aborted").wait())
	p.s.settled(p.from.pool())()
	p.s.settled(p.to.pool())()
}

// move moves the volume until it is handed over, makes calls for others meanwhile, and undoes the move.
func (p *passage) move() {
	out, in := p.copy(movedID)
	samples := make([][]float64, len(p.others))
	for running := true; running; {
		for i, c := range p.others {
			samples[i] = append(samples[i], c.measure())
		}
		select {
		case <-out.ended:
			running = false
		default:
		}
	}
	check(out.wait(), in.wait())
	p.memory[moveOut], p.memory[moveIn] = out.peak, in.peak
	p.calls = nil
	for _, of := range samples {
		p.calls = append(p.calls, median(of))
	}
	p.undo(movedID)
}

// A moverProcess is a mover that runs.
type moverProcess struct {
	command string
	// waiting is closed when all passes but the last were made, and the volume is still published.
	waiting, ended chan struct{}
	// When it has ended.
	err   error
	fence string
	peak  float64 // MiB
}

// start runs a step of a mover.
func (p *passage) start(id, command, step string, more ...string) *moverProcess {
	a, identity := p.from, p.source
	if command == moveIn {
		a, identity = p.to, p.target
	}
	args := []string{
		command, "--step=" + step, "--endpoint=" + a.Process.Endpoint(), "--volume=" + id, fmt.Sprintf("--move=move-%d", p.moves), "--peer=other-node",
		"--datadir=" + string(got(json.Marshal([]drivertest.PoolConfig{{Name: poolName, Path: a.pool()}}))),
		"--cert-file=" + identity.CertFile, "--key-file=" + identity.KeyFile, "--ca-file=" + identity.CAFile,
	}
	m := &moverProcess{command: command + " --step=" + step, waiting: make(chan struct{}), ended: make(chan struct{})}
	go m.run(p.s.ctx, p.s.binary, append(args, more...))
	return m
}

func (m *moverProcess) run(ctx context.Context, program string, args []string) {
	defer close(m.ended)
	// The death signal is tied to the thread that forks.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var said bytes.Buffer
	cmd.Stderr = &said
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if m.err = err; err != nil {
		return
	}
	ended, watched := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(watched)
		m.watch(cmd.Process.Pid, ended)
	}()
	last := m.follow(events)
	if err := cmd.Wait(); err != nil {
		m.err = fmt.Errorf("%s: %w\n%s%s", m.command, err, last.Error, &said)
	}
	close(ended)
	<-watched
}

// follow reads the events of a mover, and returns the last one.
func (m *moverProcess) follow(events io.Reader) (last mover.Event) {
	waited := false
	for lines := json.NewDecoder(events); ; {
		var e mover.Event
		if lines.Decode(&e) != nil {
			return last // it has ended
		}
		if e.Event == mover.Waiting && !waited {
			waited = true
			close(m.waiting)
		}
		m.fence = e.Fence
		last = e
	}
}

// watch looks at the most memory that a process had so far. What wait4(2) returns counts that of this process too, which it was forked from.
func (m *moverProcess) watch(pid int, ended <-chan struct{}) {
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		m.peak = max(m.peak, peakOf(pid))
		select {
		case <-again.C:
		case <-ended:
			return
		}
	}
}

func (m *moverProcess) wait() error {
	<-m.ended
	return m.err
}
