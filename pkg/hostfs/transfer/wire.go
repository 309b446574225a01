package transfer

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A frame is a kind (1 byte), the length of what follows (4 bytes), and that. Numbers are big-endian. The first frame of each
// side says who it is, and which version of the protocol it has.
type kind byte

// What the sender sends.
const (
	kindHello      kind = iota + 1 // magic, version
	kindBegin                      // a round: what came before and is not complete is forgotten
	kindEnter                      // name: goes into a directory
	kindLeave                      // attributes: of the directory, and up
	kindFile                       // id, flags, attributes, link, name
	kindNode                       // flags, attributes, link, name, target: what is never opened
	kindSelect                     // id: the next frames are of that file
	kindData                       // offset, bytes
	kindHole                       // offset, length
	kindSection                    // the answer to a section is complete
	kindAttributes                 // of the file or node
	kindXattr                      // name, value
	kindDone                       // with the directory, file or node
	kindAbort                      // of a file: it is gone
	kindEnd                        // flags: of the round
	kindVerify                     // attributes and digest of the root: compare from now on
	kindCheck                      // flags, attributes, link, digest of the extended attributes, name, target
	kindDigests                    // offset, digests, each with where data is
	kindCheckHole                  // offset, length
	kindUp                         // entries: of the directory
	kindVerified                   // no more to compare
	kindFinish                     // make all durable
)

// What the receiver sends.
const (
	kindWelcome     kind = iota + 101 // magic, version
	kindReady                         // flags: for the round
	kindHave                          // id: of a file that needs nothing
	kindSkip                          // id: of a file for which there is no room
	kindWantHole                      // id, offset, length: a section of the file that is a hole here
	kindWant                          // id, offset, length, digests: a section of the file
	kindRound                         // number of entries for which there was no room, the first
	kindDifferences                   // count, bytes compared, the first
	kindFinished
	kindFailure  // message: the same in all versions, for what refuses another
	kindWantBase // id, offset, length: what of the file differs from the base
)

const (
	magic   = "hostpath transfer"
	version = 2

	// blockBytes is what is compared and sent as a whole.
	blockBytes = 128 << 10
	// granule is in what holes are compared: no filesystem has larger blocks.
	granule = 64 << 10
	// dataBytes is how much content a frame has at most.
	dataBytes = 256 << 10
	// sectionBlocks are asked for at a time.
	sectionBlocks = 64
	// window is how many files are offered at most of which the sender waits for an answer, or that it sends.
	window = 256
	// sections are how many of a file are on their way at most.
	sections = 2

	maxName    = unix.NAME_MAX
	maxTarget  = unix.PathMax
	maxMessage = 2048
	maxFirst   = 16 // differences that are named
	maxFrame   = dataBytes + 64
)

// Flags of frames.
const (
	flagSettled  = 1 << iota // the file is as it was in the pass before
	flagPush                 // content follows, without a question
	flagLinked               // the entry may have other names
	flagEmpty                // the receiver has no entries
	flagBtrfs                // the receiver keeps the attributes of btrfs
	flagSync                 // make the round durable
	flagContents             // digests follow
	flagBase                 // the receiver may have the file as it was in the base
)

// A wire sends and receives frames.
type wire struct {
	conn  io.ReadWriter
	r     *bufio.Reader
	w     *bufio.Writer
	limit *limiter
	in    []byte // of the last frame that was read
	out   []byte // the frame that is built
}

const headBytes = 5

func newWire(conn io.ReadWriter, o Options) *wire {
	return &wire{
		conn: conn, r: bufio.NewReaderSize(conn, 64<<10), w: bufio.NewWriterSize(conn, 64<<10),
		limit: &limiter{rate: o.BytesPerSecond}, in: make([]byte, maxFrame), out: make([]byte, 0, headBytes+maxFrame),
	}
}

// interrupt has all calls on the connection fail from now on.
func (w *wire) interrupt() {
	if c, ok := w.conn.(interface{ SetDeadline(time.Time) error }); ok && c.SetDeadline(time.Unix(1, 0)) == nil {
		return
	}
	if c, ok := w.conn.(io.Closer); ok {
		_ = c.Close() // a call that waits for it gets an error
	}
}

// bind has the end of ctx interrupt the connection.
func (w *wire) bind(ctx context.Context) (release func() bool, err error) {
	switch w.conn.(type) {
	case interface{ SetDeadline(time.Time) error }, io.Closer:
		return context.AfterFunc(ctx, w.interrupt), nil
	}
	return nil, ErrConnection
}

// read returns a frame, whose content is valid until the next one.
func (w *wire) read() (kind, parser, error) {
	var head [headBytes]byte
	if _, err := io.ReadFull(w.r, head[:]); err != nil {
		return 0, parser{}, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxFrame {
		return 0, parser{}, fmt.Errorf("%w: a frame of %d bytes", ErrProtocol, n)
	}
	if _, err := io.ReadFull(w.r, w.in[:n]); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, parser{}, err
	}
	return kind(head[0]), parser{rest: w.in[:n]}, nil
}

// idle says that reading would have to wait for the peer.
func (w *wire) idle() bool { return w.r.Buffered() < headBytes }

// begin begins a frame, which the put functions add to and send ends.
func (w *wire) begin(k kind) { w.out = append(w.out[:0], byte(k), 0, 0, 0, 0) }

func (w *wire) put8(v byte)    { w.out = append(w.out, v) }
func (w *wire) put32(v uint32) { w.out = binary.BigEndian.AppendUint32(w.out, v) }
func (w *wire) put64(v int64)  { w.out = binary.BigEndian.AppendUint64(w.out, uint64(v)) }
func (w *wire) putRaw(b []byte) {
	w.out = append(w.out, b...)
}

// putString writes what has at most 64 KiB, after its length.
func (w *wire) putString(s string) {
	w.put32(uint32(len(s)))
	w.out = append(w.out, s...)
}

func (w *wire) putAttributes(st *unix.Stat_t) {
	w.put32(st.Mode)
	w.put32(st.Uid)
	w.put32(st.Gid)
	w.put64(st.Size)
	w.put64(int64(st.Rdev))
	for _, at := range []unix.Timespec{st.Atim, st.Mtim} {
		w.put64(at.Sec)
		w.put32(uint32(at.Nsec))
	}
}

// send puts the frame into the buffer of the connection.
func (w *wire) send(ctx context.Context) error {
	binary.BigEndian.PutUint32(w.out[1:], uint32(len(w.out)-headBytes))
	if err := w.limit.take(ctx, len(w.out), w.w.Flush); err != nil {
		return err
	}
	_, err := w.w.Write(w.out)
	return err
}

func (w *wire) sendEmpty(ctx context.Context, k kind) error {
	w.begin(k)
	return w.send(ctx)
}

func (w *wire) sendHello(ctx context.Context, k kind) error {
	w.begin(k)
	w.putString(magic)
	w.put32(version)
	return errors.Join(w.send(ctx), w.w.Flush())
}

// checkHello is for the first frame of a peer.
func checkHello(want, got kind, p parser) error {
	if name := p.text(len(magic)); got != want || p.failed || name != magic {
		return fmt.Errorf("%w: it did not say what it is", ErrProtocol)
	}
	if v := p.u32(); v != version {
		return fmt.Errorf("%w: %d, and this is %d", ErrVersion, v, version)
	}
	return p.end()
}

// A parser takes a frame apart. What is missing reads as zero, and end reports it.
type parser struct {
	rest   []byte
	failed bool
}

func (p *parser) bytes(n int) []byte {
	if p.failed || n > len(p.rest) {
		p.failed = true
		return nil
	}
	b := p.rest[:n]
	p.rest = p.rest[n:]
	return b
}

func (p *parser) u8() byte {
	if b := p.bytes(1); b != nil {
		return b[0]
	}
	return 0
}

func (p *parser) u32() uint32 {
	if b := p.bytes(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (p *parser) i64() int64 {
	if b := p.bytes(8); b != nil {
		return int64(binary.BigEndian.Uint64(b))
	}
	return 0
}

// text is a string of at most so many bytes.
func (p *parser) text(limit int) string {
	n := p.u32()
	if n > uint32(limit) {
		p.failed = true
	}
	return string(p.bytes(int(n)))
}

// name is that of an entry of a directory.
func (p *parser) name() string {
	name := p.text(maxName)
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		p.failed = true
	}
	return name
}

// extent is a part of a file.
func (p *parser) extent() (offset, length int64) {
	offset, length = p.i64(), p.i64()
	if offset < 0 || length < 0 || offset+length < offset {
		p.failed = true
	}
	return offset, length
}

func (p *parser) attributes() *unix.Stat_t {
	st := &unix.Stat_t{Mode: p.u32(), Uid: p.u32(), Gid: p.u32(), Size: p.i64(), Rdev: uint64(p.i64())}
	for _, at := range []*unix.Timespec{&st.Atim, &st.Mtim} {
		at.Sec, at.Nsec = p.i64(), int64(p.u32())
		p.failed = p.failed || at.Nsec >= int64(time.Second)
	}
	p.failed = p.failed || st.Size < 0
	return st
}

func (p *parser) end() error {
	if p.failed || len(p.rest) > 0 {
		return fmt.Errorf("%w: a frame that makes no sense", ErrProtocol)
	}
	return nil
}

// A limiter has the average rate of what is sent stay below a limit.
type limiter struct {
	rate int64 // bytes in a second; 0 for no limit
	free time.Time
}

// burst is for how long more than the rate may be sent.
const burst = 100 * time.Millisecond

// take waits until so many bytes may be sent. Before it waits it calls flush.
func (l *limiter) take(ctx context.Context, bytes int, flush func() error) error {
	if l.rate <= 0 {
		return nil
	}
	now := time.Now()
	if earliest := now.Add(-burst); l.free.Before(earliest) {
		l.free = earliest
	}
	l.free = l.free.Add(time.Duration(float64(bytes) / float64(l.rate) * float64(time.Second)))
	wait := l.free.Sub(now)
	if wait <= 0 {
		return nil
	}
	if err := flush(); err != nil {
		return err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
