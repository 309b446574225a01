package drivertest

import (
	"bytes"
	"io"
	"sync"
)

// A logBuffer keeps what the driver wrote to its standard error, and copies it
// to a second writer as it comes.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
	also io.Writer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text.Write(p)
	if l.also != nil {
		return l.also.Write(p)
	}
	return len(p), nil
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// tail returns the last lines of the log.
func (l *logBuffer) tail(lines int) string {
	text := bytes.TrimRight([]byte(l.String()), "\n")
	start := len(text)
	for ; lines > 0 && start >= 0; lines-- {
		start = bytes.LastIndexByte(text[:start], '\n')
	}
	return string(text[start+1:])
}
