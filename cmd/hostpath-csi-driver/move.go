package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/driver/moves"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const (
	moveOutCommand = "move-out"
	moveInCommand  = "move-in"
)

// The steps of the two commands.
const (
	stepCopy        = "copy"
	stepUndo        = "undo"
	stepGiveUp      = "give-up"
	stepRemove      = "remove"
	stepConfirm     = "confirm"
	stepVouch       = "vouch"
	stepAbort       = "abort"
	stepAbortUndone = "abort-undone"
)

// A moving is the validated command line of a mover.
type moving struct {
	pools              []poolconfig.Config
	socket             string
	volume, move, peer string
	step               string
	address            string
	identity           mover.Identity
	bytesPerSecond     int64
	silence            time.Duration

	// The source's.
	bytes          int64
	mayFence       string
	leaveSnapshots bool
	verify         transfer.Verify
	aborted        bool
	// The target's.
	pool, fence   string
	evenConfirmed bool
}

// parseMoving reads the command line and reports all problems at once.
func parseMoving(command string, args []string, getenv func(string) string, output io.Writer) (moving, error) {
	var m moving
	var datadir, endpoint, verify string
	flags := flag.NewFlagSet("hostpath-csi-driver "+command, flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&datadir, "datadir", getenv(datadirVariable), "storage pools, the driver's --datadir; default $"+datadirVariable)
	flags.StringVar(&endpoint, "endpoint", defaultEndpoint, "the driver's socket")
	flags.StringVar(&m.volume, "volume", "", "the volume to move; required")
	flags.StringVar(&m.move, "move", "", "uid of the move; required")
	flags.StringVar(&m.peer, "peer", "", "name of the other node; required")
	flags.StringVar(&m.identity.CertFile, "cert-file", "", "TLS certificate of this side, made for this move")
	flags.StringVar(&m.identity.KeyFile, "key-file", "", "private key of --cert-file")
	flags.StringVar(&m.identity.CAFile, "ca-file", "", "certificate of the authority of both sides, made for this move")
	flags.Int64Var(&m.bytesPerSecond, "bytes-per-second", 0, "limit of what is sent; 0 for none")
	flags.DurationVar(&m.silence, "silence", mover.Silence, "end a connection on which the other node has answered nothing for so long, at least 1s")
	if command == moveOutCommand {
		flags.StringVar(&m.step, "step", stepCopy, "copy: copy the volume and hand it over; undo: publish it here again; give-up: the same of a volume that no claim wants and whose copy is aborted, and that may be gone; remove: remove it, after its copy was confirmed")
		flags.StringVar(&m.address, "address", "", "address of move-in on the other node; with --step=remove that of one with --step=vouch, or empty to remove what nothing vouches for; with --step=undo that of one with --step=abort-undone, or empty")
		flags.Int64Var(&m.bytes, "bytes", 0, "size of a volume without a record; one that holds more has the size of that")
		flags.StringVar(&m.mayFence, "may-fence", "", "file that has the uid of the move once the volume may be fenced; empty to fence it as soon as little is left to copy")
		flags.BoolVar(&m.leaveSnapshots, "leave-snapshots", false, "leave snapshots of the volume on this node; otherwise a volume with any is refused")
		flags.StringVar(&verify, "verify", "all", "files whose content is compared at the end: all, or changed, which misses asynchronous direct writes that took over a second")
		flags.BoolVar(&m.aborted, "target-aborted", false, "the copy on the other node was aborted: undo a volume that was handed over")
	} else {
		flags.StringVar(&m.step, "step", stepCopy, "copy: receive the volume until it is handed over; confirm: make the copy the volume; vouch: tell the other node whether it is, when that removes its own; abort: remove the copy; abort-undone: that, one that may be whole when move-out says with --step=undo that the other node has the volume")
		flags.StringVar(&m.address, "address", ":8444", "address to listen on for move-out")
		flags.StringVar(&m.pool, "pool", "", "pool of the copy; may be empty where there is one")
		flags.StringVar(&m.fence, "fence", "", "what move-out has reported as fence when it handed the volume over; required to confirm and to vouch")
		flags.BoolVar(&m.evenConfirmed, "even-confirmed", false, "abort a copy that was confirmed too: no pod has used it, and the other node has all of the volume")
	}
	problems := cmdline.ParseAll(flags, args)
	if errors.Is(problems, flag.ErrHelp) {
		return moving{}, flag.ErrHelp
	}
	var err error
	m.socket, err = driver.ParseEndpoint(endpoint)
	problems = errors.Join(problems, named("endpoint", err), m.check(command, verify))
	if m.step == stepCopy {
		m.pools, err = inspectedPools(datadir)
		problems = errors.Join(problems, named("datadir", err))
	}
	return m, problems
}

// named is a problem of a flag.
func named(flag string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("--%s: %w", flag, err)
}

func (m *moving) check(command, verify string) error {
	_, volumeErr := volume.ParseID(m.volume)
	_, moveErr := volume.ParseMoveID(m.move)
	_, peerErr := volume.ParseNodeID(m.peer)
	problems := errors.Join(named("volume", volumeErr), named("move", moveErr), named("peer", peerErr))
	others := map[string][]string{moveOutCommand: {stepUndo, stepGiveUp, stepRemove}, moveInCommand: {stepConfirm, stepVouch, stepAbort, stepAbortUndone}}[command]
	if m.step != stepCopy && !slices.Contains(others, m.step) {
		problems = errors.Join(problems, fmt.Errorf("--step: %q is none of %s and %s", m.step, stepCopy, strings.Join(others, ", ")))
	}
	if m.connects() {
		if m.address == "" {
			problems = errors.Join(problems, errors.New("--address: required"))
		}
		problems = errors.Join(problems, named("address", cmdline.CheckAddress(m.address)))
		if m.identity.CertFile == "" || m.identity.KeyFile == "" || m.identity.CAFile == "" {
			problems = errors.Join(problems, errors.New("--cert-file, --key-file and --ca-file: required"))
		}
	}
	if (m.step == stepConfirm || m.step == stepVouch) && m.fence == "" {
		problems = errors.Join(problems, errors.New("--fence: required to confirm and to vouch"))
	}
	if m.bytes < 0 || m.bytesPerSecond < 0 {
		problems = errors.Join(problems, errors.New("--bytes and --bytes-per-second: must not be negative"))
	}
	if m.silence < time.Second {
		problems = errors.Join(problems, errors.New("--silence: must be at least 1s"))
	}
	switch verify {
	case "", "changed":
		m.verify = transfer.VerifyChanged
	case "all":
		m.verify = transfer.VerifyAll
	default:
		problems = errors.Join(problems, fmt.Errorf("--verify: %q is neither changed nor all", verify))
	}
	return problems
}

// connects says whether the step needs the other node.
func (m *moving) connects() bool {
	switch m.step {
	case stepCopy, stepVouch, stepAbortUndone:
		return true
	case stepRemove, stepUndo:
		return m.address != ""
	}
	return false
}

// runMove does a step of a move, reports what it does as lines of JSON, and returns the exit status.
func runMove(command string, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	m, err := parseMoving(command, args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return healthy
	}
	if err != nil {
		fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", command, err)
		return failed
	}
	report := reporter(stdout)
	last, err := m.run(command, report)
	if err != nil {
		said := oneLine(err)
		report(mover.Event{Event: mover.Failed, Error: said})
		fmt.Fprintf(stderr, "hostpath-csi-driver %s: %s\n", command, said)
		return failed
	}
	report(last)
	return healthy
}

// mostSaid is how long an error is at most. Both outputs are to be in the last 2 KiB of a log, which kubelet keeps of a container that failed.
const mostSaid = 700

// oneLine is what an error says. It may have a name that a pod gave a file, of which a line of its own would be taken for an event: in the
// log of a pod both outputs are one.
func oneLine(err error) string {
	said := strings.Map(func(r rune) rune {
		switch {
		case r == '\n':
			return ' '
		case unicode.IsPrint(r):
			return r
		}
		return '?'
	}, err.Error())
	return strings.ToValidUTF8(said[:min(len(said), mostSaid)], "")
}

// reporter writes events as lines of JSON. What is only progress is written once a second.
func reporter(out io.Writer) func(mover.Event) {
	var mu sync.Mutex
	var last time.Time
	lines := json.NewEncoder(out)
	return func(e mover.Event) {
		mu.Lock()
		defer mu.Unlock()
		e.Time = time.Now().UTC()
		if e.Event == mover.Passing {
			if e.Time.Sub(last) < time.Second {
				return
			}
			last = e.Time
		}
		_ = lines.Encode(e) // a reader that went away does not stop a move
	}
}

func (m moving) run(command string, report func(mover.Event)) (last mover.Event, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	client, err := moves.Dial(m.socket)
	if err != nil {
		return last, err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	open := func(ctx context.Context, id string, v moves.Volume) (*dir.Dir, error) {
		kernel, err := bind.NewKernel()
		if err != nil {
			return nil, err
		}
		d, err := mover.Pools{Configs: m.pools, Mounts: kernel}.Open(ctx, id, v)
		return d, errors.Join(err, kernel.Close())
	}
	if command == moveInCommand {
		return mover.Event{Event: mover.Ended}, m.in(ctx, client, open, report)
	}
	return m.out(ctx, client, open, report)
}

func (m moving) in(ctx context.Context, client *moves.Client, open mover.Open, report func(mover.Event)) error {
	in := &mover.In{
		Driver: client, Open: open, Volume: m.volume, Move: m.move, Peer: m.peer, Pool: m.pool, Report: report,
		Receive: func(ctx context.Context, conn net.Conn, into *dir.Dir, is mover.Receiving, finished func() error) error {
			o := m.options(report)
			o.Allocated, o.Doubted, o.Finished = is.Block, is.Doubted, finished
			return transfer.Receive(ctx, conn, into, o)
		},
	}
	switch m.step {
	case stepConfirm:
		return in.Confirm(ctx, m.fence)
	case stepAbort:
		return in.Abort(ctx, m.evenConfirmed)
	case stepAbortUndone:
		in.Aborts = true
	case stepVouch:
		in.Fence = m.fence
	}
	if err := in.Ready(ctx); err != nil {
		return err
	}
	listener, err := mover.Listen(ctx, m.address, m.identity, m.silence)
	if err != nil {
		return err
	}
	return in.Serve(ctx, listener)
}

func (m moving) out(ctx context.Context, client *moves.Client, open mover.Open, report func(mover.Event)) (last mover.Event, err error) {
	out := &mover.Out{
		Driver: client, Open: open, Volume: m.volume, Move: m.move, Peer: m.peer, Bytes: m.bytes, LeaveSnapshots: m.leaveSnapshots, Report: report,
		Verify: map[transfer.Verify]string{transfer.VerifyAll: "all", transfer.VerifyChanged: "changed"}[m.verify],
		Sender: func(conn net.Conn) mover.Sender { return sender{transfer.NewSender(conn, m.options(report)), m.verify} },
	}
	if m.connects() {
		if out.Dial, err = mover.Dialer(m.address, m.identity, m.silence); err != nil {
			return last, err
		}
	}
	last = mover.Event{Event: mover.Ended}
	switch m.step {
	case stepUndo:
		undo := out.Undo
		if m.connects() {
			undo = out.UndoAndTell
		}
		return last, undo(ctx, m.aborted)
	case stepGiveUp:
		return last, out.GiveUp(ctx)
	case stepRemove:
		return last, out.Remove(ctx)
	}
	if m.mayFence != "" {
		out.MayFence = m.hasLeave
	}
	last.Event = mover.HandedOver
	last.Fence, err = out.Copy(ctx)
	last.PromisedBytes = out.Promised()
	return last, err
}

// hasLeave says whether the file of it names this move. Kubelet makes one without content.
func (m moving) hasLeave() (bool, error) {
	text, err := os.ReadFile(m.mayFence)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return strings.TrimSpace(string(text)) == m.move, err
}

func (m moving) options(report func(mover.Event)) transfer.Options {
	return transfer.Options{BytesPerSecond: m.bytesPerSecond, Progress: func(p transfer.Progress) {
		report(mover.Event{Event: mover.Passing, Entries: p.Entries, Files: p.Files, Bytes: p.Bytes, Compared: p.Compared})
	}}
}

// A sender is a mover.Sender.
type sender struct {
	*transfer.Sender
	verify transfer.Verify
}

func (s sender) Pass(ctx context.Context, from *dir.Dir, p mover.Pass) (mover.Result, error) {
	pass := transfer.Pass{Since: p.Since, Base: p.Base}
	if p.Last || p.Reference {
		pass.Still, pass.Verify = true, s.verify
	}
	if p.Reference && p.Base == nil && s.verify == transfer.VerifyChanged { // all of it was just sent
		pass.Verify = transfer.VerifyNone
	}
	r, err := s.Sender.Pass(ctx, from, pass)
	if errors.Is(err, transfer.ErrNoRoom) {
		err = fmt.Errorf("%w: %w", mover.ErrNoRoom, err)
	}
	return mover.Result{Began: r.Began, Entries: r.Entries, Files: r.Sent, Bytes: r.Bytes, Compared: r.BytesCompared}, err
}
