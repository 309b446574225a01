package transfer_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone/clonetest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// A cutter is a connection that is cut after a number of frames were written to it.
type cutter struct {
	net.Conn
	left int
	head []byte // of a frame that is not complete
	rest int    // of it
	seen int
}

func (c *cutter) Write(b []byte) (int, error) {
	for at := 0; at < len(b); {
		n := 0
		if c.rest == 0 {
			n = min(5-len(c.head), len(b)-at)
			if c.head = append(c.head, b[at:at+n]...); len(c.head) == 5 {
				c.rest = int(binary.BigEndian.Uint32(c.head[1:]))
			}
		} else {
			n = min(c.rest, len(b)-at)
			c.rest -= n
		}
		if at += n; len(c.head) == 5 && c.rest == 0 {
			c.head = c.head[:0]
			if c.seen++; c.seen == c.left {
				_, _ = c.Conn.Write(b[:at])
				return at, errors.Join(net.ErrClosed, c.Close())
			}
		}
	}
	return c.Conn.Write(b)
}

// connectBy is connect with a connection that is made of the sender's end of another.
func connectBy(t testing.TB, dst string, wrap func(net.Conn) net.Conn) *connection {
	t.Helper()
	here, there := net.Pipe()
	conn := wrap(here)
	c := &connection{transfer.NewSender(conn, transfer.Options{}), t, conn, make(chan error, 1)}
	into := open(t, dst)
	go func() {
		defer close(c.received)
		c.received <- transfer.Receive(context.Background(), there, into, transfer.Options{})
		_ = there.Close()
	}()
	t.Cleanup(c.cut)
	return c
}

func TestConnectionThatIsCutAtAnyFrame(t *testing.T) {
	src, dst := onXFS(t)
	clonetest.Hostile(t, src)
	must.Succeed(t, os.WriteFile(filepath.Join(src, "large"), bytes.Repeat([]byte("content "), 100_000), 0o600))
	for _, before := range []string{"nothing", "another tree"} {
		t.Run("the target has "+before, func(t *testing.T) {
			frames := 1 << 30
			for n := 1; n < frames; n += 3 {
				to := filepath.Join(dst, "volume")
				must.Succeed(t, os.RemoveAll(to), os.Mkdir(to, 0o700))
				if before != "nothing" {
					must.Succeed(t, os.Mkdir(filepath.Join(to, "file"), 0o700), os.Mkdir(filepath.Join(to, "a"), 0o700))
					write(t, filepath.Join(to, "large"), "something else")
					write(t, filepath.Join(to, "three"), "something else")
					must.Succeed(t, os.Link(filepath.Join(to, "three"), filepath.Join(to, "gone")), os.Link(filepath.Join(to, "three"), filepath.Join(to, "empty")))
				}
				cut := &cutter{left: n}
				c := connectBy(t, to, func(conn net.Conn) net.Conn { cut.Conn = conn; return cut })
				_, err := c.Pass(t.Context(), open(t, src), transfer.Pass{Still: true})
				if err == nil {
					err = c.Finish(t.Context())
				}
				received := <-c.received
				if cut.seen < n {
					frames = n // the end
					must.Succeed(t, err, received)
				} else if err == nil && received == nil {
					t.Fatalf("cut at frame %d: no error", n)
				}
				send(t, src, to)
				if n%40 == 1 || n == frames {
					clonetest.Same(t, src, to)
				}
			}
		})
	}
}

func TestContextEndsWhatWaitsForPeer(t *testing.T) {
	src, dst := onXFS(t)
	write(t, filepath.Join(src, "file"), "content")
	peers := map[string]func(there net.Conn){
		"a peer that does nothing": func(net.Conn) {},
		"a peer that only reads":   func(there net.Conn) { _, _ = io.Copy(io.Discard, there) },
		"a peer that says hello and no more": func(there net.Conn) {
			go func() { _, _ = there.Write(hello(101)) }()
			_, _ = io.Copy(io.Discard, there)
		},
	}
	for name, peer := range peers {
		t.Run(name, func(t *testing.T) {
			here, there := net.Pipe()
			defer func() { _, _ = here.Close(), there.Close() }()
			go peer(there)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			_, err := transfer.NewSender(here, transfer.Options{}).Pass(ctx, open(t, src), transfer.Pass{})
			must.ErrorIs(t, err, context.DeadlineExceeded)
		})
	}
	t.Run("a sender that does nothing", func(t *testing.T) {
		here, there := net.Pipe()
		defer func() { _, _ = here.Close(), there.Close() }()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		into := open(t, dst)
		go func() { done <- transfer.Receive(ctx, there, into, transfer.Options{}) }()
		cancel()
		must.ErrorIs(t, <-done, context.Canceled)
	})
	t.Run("a connection that nothing can interrupt", func(t *testing.T) {
		_, err := transfer.NewSender(struct{ io.ReadWriter }{}, transfer.Options{}).Pass(t.Context(), open(t, src), transfer.Pass{})
		must.ErrorIs(t, err, transfer.ErrConnection)
	})
	t.Run("in the middle of a pass", func(t *testing.T) {
		must.Succeed(t, os.Truncate(filepath.Join(src, "file"), 0))
		f := must.Value(os.OpenFile(filepath.Join(src, "file"), os.O_WRONLY, 0))(t)
		_, err := f.Write(bytes.Repeat([]byte("content "), 1<<20))
		must.Succeed(t, err, f.Close())
		ctx, cancel := context.WithCancel(t.Context())
		c := connect(t, dst, transfer.Options{BytesPerSecond: 1 << 20, Progress: func(p transfer.Progress) {
			if p.Bytes > 0 {
				cancel()
			}
		}})
		_, err = c.Pass(ctx, open(t, src), transfer.Pass{})
		must.ErrorIs(t, err, context.Canceled)
		if _, again := c.Pass(t.Context(), open(t, src), transfer.Pass{}); again == nil {
			t.Error("the connection was used again")
		}
	})
}

// frame puts one together.
func frame(kind byte, payload ...[]byte) []byte {
	all := bytes.Join(payload, nil)
	return append(append([]byte{kind}, binary.BigEndian.AppendUint32(nil, uint32(len(all)))...), all...)
}

func text(s string) []byte { return append(binary.BigEndian.AppendUint32(nil, uint32(len(s))), s...) }

func hello(kind byte) []byte { return frame(kind, text("hostpath transfer"), []byte{0, 0, 0, 2}) }

func TestVersionsAndOthers(t *testing.T) {
	src, dst := onXFS(t)
	for name, test := range map[string]struct {
		says []byte
		want error
	}{
		"another version": {frame(101, text("hostpath transfer"), []byte{0, 0, 0, 1}), transfer.ErrVersion},
		"something else":  {[]byte("HTTP/1.1 400 Bad Request\r\n"), transfer.ErrProtocol},
		"an error":        {frame(110, text("no")), transfer.ErrPeer},
		"nothing":         {nil, io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			for _, side := range []string{"sender", "receiver"} {
				here, there := net.Pipe()
				go func() {
					says := bytes.Clone(test.says)
					if len(says) > 0 && says[0] == 101 && side == "receiver" {
						says[0] = 1
					}
					go func() { _, _ = io.Copy(io.Discard, there) }()
					_, _ = there.Write(says)
					_ = there.Close()
				}()
				var err error
				if side == "sender" {
					_, err = transfer.NewSender(here, transfer.Options{}).Pass(t.Context(), open(t, src), transfer.Pass{})
					must.ErrorIs(t, err, test.want)
				} else if err = transfer.Receive(t.Context(), here, open(t, dst), transfer.Options{}); err == nil {
					t.Error("no error")
				}
				_ = here.Close()
			}
		})
	}
}

// attributes are those of a frame.
func attributes(mode uint32, size int64) []byte {
	b := binary.BigEndian.AppendUint32(nil, mode)
	b = append(b, make([]byte, 8)...)
	b = binary.BigEndian.AppendUint64(b, uint64(size))
	return append(b, make([]byte, 8+12+12)...)
}

// A sender that lies reaches nothing but the tree.
func TestSenderThatLies(t *testing.T) {
	file := func(id uint64, name string) []byte {
		return frame(5, number(id), []byte{2}, attributes(unix.S_IFREG|0o644, 10), make([]byte, 16), text(name))
	}
	linked := func(id uint64, flags byte, name string) []byte {
		return frame(5, number(id), []byte{4 | flags}, attributes(unix.S_IFREG|0o644, 10), make([]byte, 16), text(name))
	}
	for name, frames := range map[string][][]byte{
		"dot dot":                        {frame(2), frame(3, text(".."))},
		"dot":                            {frame(2), frame(3, text("."))},
		"a path":                         {frame(2), frame(3, text("a/b"))},
		"an absolute path":               {frame(2), file(1, "/outside")},
		"a name with NUL":                {frame(2), file(1, "a\x00b")},
		"a long name":                    {frame(2), file(1, string(bytes.Repeat([]byte("n"), 256)))},
		"no name":                        {frame(2), file(1, "")},
		"up from the root":               {frame(2), frame(4, attributes(unix.S_IFDIR|0o755, 0)), frame(14), frame(4, attributes(unix.S_IFDIR|0o755, 0)), frame(14), frame(15)},
		"a file before a round":          {file(1, "file")},
		"content of no file":             {frame(2), frame(8, number(0), []byte("content"))},
		"content far out":                {frame(2), file(1, "file"), frame(8, number(1<<63), []byte("content"))},
		"a file that was not asked for":  {frame(2), frame(7, number(7))},
		"an id of the past":              {frame(2), file(0, "file")},
		"a file that is a directory":     {frame(2), frame(5, number(1), []byte{2}, attributes(unix.S_IFDIR|0o644, 10), make([]byte, 16), text("file"))},
		"a node that is a file":          {frame(2), frame(6, []byte{0}, attributes(unix.S_IFREG|0o644, 10), make([]byte, 16), text("file"), text(""))},
		"a negative size":                {frame(2), frame(5, number(1), []byte{2}, attributes(unix.S_IFREG|0o644, -1), make([]byte, 16), text("file"))},
		"a huge frame":                   {{2, 0xff, 0xff, 0xff, 0xff}},
		"an unknown frame":               {frame(2), frame(77)},
		"an answer":                      {frame(103, number(1))},
		"a round that is not complete":   {frame(2), frame(3, text("sub")), frame(15, []byte{0})},
		"a comparison amid a round":      {frame(2), frame(16, attributes(unix.S_IFDIR, 0), make([]byte, 96))},
		"an attribute of nothing":        {frame(2), frame(12, text("user.a"), []byte("v"))},
		"a verified tree without a word": {frame(20)},
		"content of a name of a file that is there": {frame(2), linked(1, 0, "one"), linked(2, 2, "two"), frame(12, text("user.a"), []byte("v"))},
		"content of a file that is as it was":       {frame(2), linked(1, 2|1, "one")},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			into := filepath.Join(root, "into")
			must.Succeed(t, os.Mkdir(into, 0o700))
			stream := bytes.Join(append([][]byte{hello(1)}, frames...), nil)
			err := transfer.Receive(t.Context(), &recorded{in: bytes.NewReader(stream)}, open(t, into), transfer.Options{})
			must.ErrorIs(t, err, transfer.ErrProtocol)
			if found := must.Value(os.ReadDir(root))(t); len(found) != 1 {
				t.Errorf("made %v", found)
			}
		})
	}
}

// A liar is a receiver that answers each kind of frame with others, whatever it has.
type liar map[byte][]byte

const (
	aBegin, aFile, anEnd, aVerified, aFinish              = 2, 5, 15, 21, 22
	aReady, aHave, aRound, aDifferences, aFinished        = 102, 103, 107, 108, 109
	wantHole, wantDigests, wantBase                       = 105, 106, 111
	blockOfLiar, sizeForLiar                       uint64 = 128 << 10, 300_000
)

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// honest has all of the one file, equal, and says so when it is asked.
func honest() liar {
	return liar{
		1: hello(101), aBegin: frame(aReady, []byte{0}), aFile: frame(aHave, number(1)), anEnd: frame(aRound, number(0), text("")),
		aVerified: frame(aDifferences, number(0), number(0), make([]byte, 4)), aFinish: frame(aFinished),
	}
}

// answer is until the connection ends, or the liar has no answer, and says how that is.
func (l liar) answer(there net.Conn, none func(net.Conn)) {
	for in := bufio.NewReader(there); ; {
		var head [5]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return
		}
		if _, err := io.CopyN(io.Discard, in, int64(binary.BigEndian.Uint32(head[1:]))); err != nil {
			return
		}
		says, told := l[head[0]]
		if told && says == nil {
			none(there)
			return
		}
		if _, err := there.Write(says); err != nil {
			return
		}
	}
}

// sendToLiar sends a tree with one file, and compares.
func sendToLiar(t *testing.T, l liar, none func(net.Conn), within time.Duration) error {
	t.Helper()
	src := t.TempDir()
	content := bytes.Repeat([]byte("x"), int(sizeForLiar))
	must.Succeed(t, os.WriteFile(filepath.Join(src, "file"), content, 0o600))
	here, there := net.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.answer(there, none)
	}()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	s := transfer.NewSender(here, transfer.Options{})
	_, err := s.Pass(ctx, open(t, src), transfer.Pass{Still: true, Verify: transfer.VerifyAll})
	if err == nil {
		err = s.Finish(ctx)
	}
	_, _ = here.Close(), there.Close()
	<-ended
	if is := must.Value(os.ReadFile(filepath.Join(src, "file")))(t); !bytes.Equal(is, content) {
		t.Error("the source is another")
	}
	return err
}

// A receiver that lies gets an error, soon, however much it says.
func TestReceiverThatLies(t *testing.T) {
	want := func(kind byte, id, offset, length uint64, digests int) []byte {
		return frame(kind, number(id), number(offset), number(length), make([]byte, digests))
	}
	const many = 10_000
	for name, says := range map[string]map[byte][]byte{
		"a file that was not offered":        {aFile: want(wantDigests, 2, 0, blockOfLiar, 32)},
		"no file":                            {aFile: want(wantDigests, 0, 0, blockOfLiar, 32)},
		"a part before its turn":             {aFile: want(wantDigests, 1, blockOfLiar, blockOfLiar, 32)},
		"a part twice":                       {aFile: bytes.Repeat(want(wantDigests, 1, 0, blockOfLiar, 32), 2)},
		"a part behind the end":              {aFile: want(wantHole, 1, 0, sizeForLiar+1, 0)},
		"a part far behind the end":          {aFile: want(wantHole, 1, 0, 1<<62, 0)},
		"a negative part":                    {aFile: want(wantHole, 1, 0, 1<<63, 0)},
		"no part":                            {aFile: want(wantHole, 1, 0, 0, 0)},
		"a part that ends amid a block":      {aFile: want(wantHole, 1, 0, 1, 0)},
		"digests that begin amid a block":    {aFile: want(wantDigests, 1, 1, blockOfLiar, 32)},
		"too few digests":                    {aFile: want(wantDigests, 1, 0, sizeForLiar, 64)},
		"too many digests":                   {aFile: want(wantDigests, 1, 0, blockOfLiar, 64)},
		"half a digest":                      {aFile: want(wantDigests, 1, 0, blockOfLiar, 48)},
		"a short digest":                     {aFile: want(wantDigests, 1, 0, blockOfLiar, 31)},
		"more digests than are asked for":    {aFile: want(wantDigests, 1, 0, 65*blockOfLiar, 65*32)},
		"a base that was not offered":        {aFile: want(wantBase, 1, 0, sizeForLiar, 0)},
		"many answers to one question":       {aFile: bytes.Repeat(frame(aHave, number(1)), many)},
		"many answers at the end":            {anEnd: bytes.Repeat(frame(aHave, number(1)), many)},
		"many answers after the comparison":  {aVerified: bytes.Repeat(frame(aHave, number(1)), many)},
		"many answers about a file to come":  {aBegin: bytes.Repeat(frame(aHave, number(1)), many)},
		"many rounds":                        {aBegin: bytes.Repeat(frame(aReady, []byte{0}), many)},
		"many comparisons":                   {aBegin: bytes.Repeat(frame(aDifferences, number(1), number(1), []byte{0, 0, 0, 1}, text(string(make([]byte, 2048)))), many)},
		"the end of a round amid it":         {aFile: frame(aRound, number(0), text(""))},
		"equality before it is asked":        {aFile: frame(aDifferences, number(0), number(0), make([]byte, 4))},
		"the end before it is asked":         {aFile: frame(aFinished)},
		"a frame of a sender":                {aFile: frame(8, number(0), []byte("content"))},
		"an unknown frame":                   {aFile: frame(177)},
		"a second welcome":                   {aFile: hello(101)},
		"a huge frame":                       {aFile: {wantDigests, 0xff, 0xff, 0xff, 0xff}},
		"more in a frame than it has":        {aFile: frame(aHave, number(1), []byte{0})},
		"less in a frame than it has":        {aFile: frame(aHave, []byte{0})},
		"more differences than were said":    {aVerified: frame(aDifferences, number(1), number(0), []byte{0, 0, 0, 0}, text("more"))},
		"fewer differences than were said":   {aVerified: frame(aDifferences, number(1), number(0), []byte{0xff, 0xff, 0xff, 0xff}, text("one"))},
		"a difference in more than one word": {aVerified: frame(aDifferences, number(1), number(0), []byte{0, 0, 0, 1}, text(string(make([]byte, 2049))))},
	} {
		t.Run(name, func(t *testing.T) {
			l := honest()
			maps.Copy(l, says)
			must.ErrorIs(t, sendToLiar(t, l, nil, time.Minute), transfer.ErrProtocol)
		})
	}
}

// Wherever a receiver ends, or says nothing more, the sender gets an error.
func TestReceiverThatEnds(t *testing.T) {
	for kind := range honest() {
		for name, test := range map[string]struct {
			none   func(net.Conn)
			within time.Duration
			want   error
		}{
			"ends":             {func(there net.Conn) { _ = there.Close() }, time.Minute, io.EOF},
			"ends amid a word": {func(there net.Conn) { _, _ = there.Write([]byte{aHave, 0}); _ = there.Close() }, time.Minute, io.ErrUnexpectedEOF},
			"says nothing":     {func(there net.Conn) { _, _ = io.Copy(io.Discard, there) }, 50 * time.Millisecond, context.DeadlineExceeded},
		} {
			t.Run(fmt.Sprint(name, " at a frame of kind ", kind), func(t *testing.T) {
				l := honest()
				l[kind] = nil
				must.ErrorIs(t, sendToLiar(t, l, test.none, test.within), test.want)
			})
		}
	}
}

// Whether the trees are equal says the receiver, which has the copy. One that lies about it harms the copy, and nothing else.
func TestReceiverThatClaimsEquality(t *testing.T) {
	must.Succeed(t, sendToLiar(t, honest(), nil, time.Minute))
	l := honest()
	l[aVerified] = frame(aDifferences, number(7), number(0), make([]byte, 4))
	must.ErrorIs(t, sendToLiar(t, l, nil, time.Minute), transfer.ErrDiffers)
}

// A recorded connection is what a peer would have said.
type recorded struct {
	in  *bytes.Reader
	out bytes.Buffer
}

func (r *recorded) Read(b []byte) (int, error)  { return r.in.Read(b) }
func (r *recorded) Write(b []byte) (int, error) { return r.out.Write(b) }
func (r *recorded) Close() error                { return nil }

// A tap notes what goes through a connection.
type tap struct {
	net.Conn
	mu            sync.Mutex
	read, written []byte
}

func (p *tap) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.read = append(p.read, b[:n]...)
	return n, err
}

func (p *tap) Write(b []byte) (int, error) {
	p.mu.Lock()
	p.written = append(p.written, b...)
	p.mu.Unlock()
	return p.Conn.Write(b)
}

// heard is what went through so far.
func (p *tap) heard() (read, written []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.read), slices.Clone(p.written)
}

// inMemory is a directory that needs no disk to be made durable, if there is one.
func inMemory(t testing.TB) string {
	d, err := os.MkdirTemp("/dev/shm", "transfer") //nolint:usetesting // t.TempDir is on a disk
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { must.Succeed(t, os.RemoveAll(d)) })
	return d
}

// conversations are what a sender and a receiver say about a tree to an empty target, and to one that differs.
func conversations(f *testing.F) (src string, sender, receiver [][]byte) {
	f.Helper()
	root := inMemory(f)
	src = filepath.Join(root, "src")
	dst := filepath.Join(root, "dst")
	must.Succeed(f, os.Mkdir(src, 0o755), os.Mkdir(dst, 0o755), os.Mkdir(filepath.Join(src, "sub"), 0o755))
	write(f, filepath.Join(src, "file"), "content")
	write(f, filepath.Join(src, "sub", "one"), "content")
	must.Succeed(f, os.Link(filepath.Join(src, "sub", "one"), filepath.Join(src, "two")), os.Symlink("/etc/passwd", filepath.Join(src, "link")))
	for range 2 {
		var one *tap
		c := connectBy(f, dst, func(conn net.Conn) net.Conn { one = &tap{Conn: conn}; return one })
		_, err := c.Pass(f.Context(), open(f, src), whole)
		must.Succeed(f, err, c.Finish(f.Context()), <-c.received)
		read, written := one.heard()
		sender, receiver = append(sender, written), append(receiver, read)
		write(f, filepath.Join(dst, "file"), "another content")
	}
	return src, sender, receiver
}

func FuzzReceive(f *testing.F) {
	_, sender, _ := conversations(f)
	for _, stream := range sender {
		f.Add(stream)
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		root := inMemory(t)
		must.Succeed(t, os.Mkdir(filepath.Join(root, "into"), 0o700), os.WriteFile(filepath.Join(root, "outside"), []byte("as it was"), 0o600))
		into := must.Value(dir.Open(filepath.Join(root, "into")))(t)
		defer func() { _ = into.Close() }()
		_ = transfer.Receive(t.Context(), &recorded{in: bytes.NewReader(stream)}, into, transfer.Options{})
		if found := must.Value(os.ReadDir(root))(t); len(found) != 2 {
			t.Errorf("made %v", found)
		}
		if got := must.Value(os.ReadFile(filepath.Join(root, "outside")))(t); string(got) != "as it was" {
			t.Errorf("changed what is outside to %q", got)
		}
	})
}

func FuzzSend(f *testing.F) {
	src, _, receiver := conversations(f)
	for _, stream := range receiver {
		f.Add(stream)
	}
	from := open(f, src)
	f.Fuzz(func(t *testing.T, stream []byte) {
		s := transfer.NewSender(&recorded{in: bytes.NewReader(stream)}, transfer.Options{})
		if _, err := s.Pass(t.Context(), from, whole); err == nil {
			_ = s.Finish(t.Context())
		}
	})
}
