package transfer

import "fmt"

// An answer is a frame of the receiver.
type answer struct {
	kind           kind
	id             uint64
	offset, length int64
	digests        []digest
	flags          byte
	count, bytes   int64
	messages       []string
}

// Answers are the frames of the receiver, as they come.
type answers struct {
	wire *wire
	all  chan answer
	// failed is why there are no more, once their channel is closed.
	failed error
	lastID uint64 // of the files that were offered
	// late is how many may come still that are about files of which nothing is asked any more.
	late int
}

// maxAnswers the sender has not dealt with: more of them a receiver does not send.
const maxAnswers = window*(sections+1) + 16

func newAnswers(w *wire) *answers { return &answers{wire: w, all: make(chan answer, maxAnswers)} }

// listen reads all.
func (s *answers) listen() {
	for {
		a, err := s.read()
		if err == nil {
			select {
			case s.all <- a:
				continue
			default:
				err = fmt.Errorf("%w: too many answers", ErrProtocol)
			}
		}
		s.failed = err
		close(s.all)
		s.wire.interrupt() // who is sending
		return
	}
}

func (s *answers) read() (answer, error) {
	k, p, err := s.wire.read()
	if err != nil {
		return answer{}, err
	}
	a := answer{kind: k}
	switch k {
	case kindReady:
		a.flags = p.u8()
	case kindHave, kindSkip:
		a.id = uint64(p.i64())
	case kindWantHole, kindWantBase:
		a.id = uint64(p.i64())
		a.offset, a.length = p.extent()
	case kindWant:
		a.id = uint64(p.i64())
		a.offset, a.length = p.extent()
		if !p.failed && len(p.rest)%len(digest{}) == 0 && len(p.rest) <= sectionBlocks*len(digest{}) {
			for len(p.rest) > 0 {
				a.digests = append(a.digests, digest(p.bytes(len(digest{}))))
			}
		}
		p.failed = p.failed || a.offset%blockBytes != 0 || blocks(a.length) != int64(len(a.digests))
	case kindRound:
		a.count = p.i64()
		a.messages = []string{p.text(maxMessage)}
	case kindDifferences:
		a.count, a.bytes = p.i64(), p.i64()
		for range min(p.u32(), maxFirst) {
			a.messages = append(a.messages, p.text(maxMessage))
		}
	case kindFinished:
	case kindFailure:
		message := p.text(maxMessage)
		if err := p.end(); err != nil {
			return answer{}, err
		}
		return answer{}, fmt.Errorf("%w: %q", ErrPeer, message)
	default:
		return answer{}, fmt.Errorf("%w: a frame of kind %d", ErrProtocol, k)
	}
	return a, p.end()
}

// nextID is that of a file that is offered now.
func (s *answers) nextID() uint64 {
	s.lastID++
	return s.lastID
}

// isOfFile says that one is about a file that was offered.
func (s *answers) isOfFile(a answer) bool { return a.id > 0 && a.id <= s.lastID }

// passOver is for one that asks nothing of what goes on: it is about a file that was offered, and late.
func (s *answers) passOver(a answer) error {
	if !s.isOfFile(a) {
		return fmt.Errorf("%w: an answer of kind %d to no question", ErrProtocol, a.kind)
	}
	if s.late--; s.late < 0 {
		return fmt.Errorf("%w: an answer of kind %d to a question that was answered", ErrProtocol, a.kind)
	}
	return nil
}

// some says that there is one, or more.
func (s *answers) some() bool { return len(s.all) > 0 }

// receive waits for one.
func (s *answers) receive() (answer, error) {
	if err := s.wire.w.Flush(); err != nil {
		return answer{}, err
	}
	a, more := <-s.all
	if !more {
		return answer{}, s.failed
	}
	return a, nil
}

// await waits for one of that kind. Others are to what an earlier round asked.
func (s *answers) await(k kind) (answer, error) {
	for {
		a, err := s.receive()
		if err != nil || a.kind == k {
			return a, err
		}
		if err := s.passOver(a); err != nil {
			return answer{}, err
		}
	}
}
