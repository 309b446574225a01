package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// command is a child that is killed when the context ends and dies with this
// process. Only the main goroutine may start it.
func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, lookUp(name), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		// A Ctrl-C is for this process, which ends its children itself.
		Setpgid: true,
	}
	return cmd
}

// lookUp finds a program also where only root's PATH leads.
func lookUp(name string) string {
	if found, err := exec.LookPath(name); err == nil {
		return found
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if found, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return found
		}
	}
	return name
}

// output runs a child and returns what it prints.
func output(ctx context.Context, name string, args ...string) (string, error) {
	return outputOf(command(ctx, name, args...))
}

func outputOf(cmd *exec.Cmd) (string, error) {
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	text, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, bytes.TrimSpace(complaint.Bytes()))
	}
	return string(text), err
}

// nameless makes a file that has no name, so that however this process ends the
// kernel removes it.
func nameless() (*os.File, error) {
	file, err := os.CreateTemp("", "hostpath-kernel-")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(file.Name()); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// inherit lets a child inherit a file and returns the name that the file has there.
func inherit(cmd *exec.Cmd, file *os.File) string {
	cmd.ExtraFiles = append(cmd.ExtraFiles, file)
	return fmt.Sprintf("/dev/fd/%d", 2+len(cmd.ExtraFiles))
}

func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:6])
}
