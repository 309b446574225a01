package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

const (
	tryCommand = "try"
	// tried is the file that it writes.
	tried = "hostpath-csi-driver-try"
)

// runTry writes a file into a directory, reads it back, and removes it, and returns the exit status. A pod of helm test does that on a
// volume: its image has no shell.
func runTry(args []string, stdout, stderr io.Writer) int {
	err := errors.New("give one directory")
	if len(args) == 1 {
		err = try(args[0], stdout)
	}
	if err != nil {
		fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", tryCommand, err)
		return failed
	}
	return healthy
}

func try(path string, stdout io.Writer) (err error) {
	name := filepath.Join(path, tried)
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(name)) }()
	content := time.Now().AppendFormat(nil, time.RFC3339Nano)
	if _, err := f.Write(content); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	read, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	if !bytes.Equal(read, content) {
		return fmt.Errorf("%s: wrote %q, and read %q", name, content, read)
	}
	_, err = fmt.Fprintf(stdout, "wrote %s and read it back\n", name)
	return err
}
