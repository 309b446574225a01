package volumes

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// writerVariable makes this test binary a writer.
const writerVariable = "VOLUMES_WRITER"

// nobody is a user without any privilege.
const nobody = 65534

// A writer is a process that appends to a file and syncs it, and that goes on after
// it was refused. What it writes encodes its place in the file.
type writer struct {
	h       *harness
	path    string
	orders  io.WriteCloser
	answers *bufio.Reader
	wait    func() error
}

func (h *harness) writer(path string, uid uint32) *writer {
	h.Helper()
	// The path is closed to others than root: the writer gets the open file.
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	h.Must(err)
	defer file.Close()
	cmd := exec.CommandContext(h.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), writerVariable+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stderr = os.Stderr
	orders, err := cmd.StdinPipe()
	h.Must(err)
	answers, err := cmd.StdoutPipe()
	h.Must(err)
	h.Must(cmd.Start())
	return &writer{h: h, path: path, orders: orders, answers: bufio.NewReader(answers), wait: cmd.Wait}
}

// write has the file grow to that many bytes, and returns how many it has and why
// they are not more.
func (w *writer) write(wanted int64) (size int64, err error) {
	w.h.Helper()
	fmt.Fprintln(w.orders, wanted)
	var refused syscall.Errno
	if _, err := fmt.Fscanln(w.answers, &size, &refused); err != nil {
		w.h.Fatalf("the writer of %s: %v", w.path, errors.Join(err, w.wait()))
	}
	if refused != 0 {
		return size, refused
	}
	return size, nil
}

// close ends the writer and expects everything that it wrote to be in the file.
func (w *writer) close(size int64) {
	w.h.Helper()
	w.h.Must(w.orders.Close())
	w.h.Must(w.wait())
	file, err := os.Open(w.path)
	w.h.Must(err)
	defer file.Close()
	// Read what is on the disk, and not what was written.
	w.h.Must(unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED))
	chunk := make([]byte, chunkSize)
	for at := int64(0); ; {
		n, err := io.ReadFull(file, chunk)
		if at += int64(n); !bytes.Equal(chunk[:n], content(at-int64(n), n)) {
			w.h.Fatalf("%s has lost something between %d and %d", w.path, at-int64(n), at)
		}
		if err != nil {
			if at != size {
				w.h.Errorf("%s has %d bytes, %v; want %d", w.path, at, err, size)
			}
			return
		}
	}
}

const chunkSize = 64 << 10

// pattern is longer than a chunk by a bit, so that none is like the next.
var pattern = func() []byte {
	random := rand.New(rand.NewPCG(1, 2))
	once := make([]byte, chunkSize+4099)
	for i := range once {
		once[i] = byte(random.Uint32())
	}
	return append(once, once...)
}()

// content is what a writer writes at a place, a chunk at most.
func content(at int64, length int) []byte {
	return pattern[at%int64(len(pattern)/2):][:length]
}

// runWriter is the child's part: for each size on the standard input it answers the
// size that the file has, and the error number that kept it from growing, or 0.
func runWriter() int {
	file := os.NewFile(3, "file")
	var size, wanted int64
	for {
		if _, err := fmt.Scanln(&wanted); err != nil {
			return 0
		}
		refused, err := appendUntil(file, &size, wanted)
		// What was accepted has to stay.
		if err = errors.Join(err, file.Sync()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		fmt.Println(size, int(refused))
	}
}

// appendUntil takes smaller steps when it is refused, down to a single byte, and
// larger ones when it gets on: the limit may rise meanwhile, and what was a byte from
// it is far from it then.
func appendUntil(file io.Writer, size *int64, wanted int64) (refused syscall.Errno, err error) {
	for step := int64(chunkSize); *size < wanted && step > 0; {
		n, err := file.Write(content(*size, int(min(step, wanted-*size))))
		*size += int64(n)
		switch {
		case err == nil:
			refused, step = 0, min(2*step, chunkSize)
		case errors.As(err, &refused):
			step /= 2
		default:
			return 0, err
		}
	}
	return refused, nil
}
