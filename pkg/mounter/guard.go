package mounter

import (
	"errors"
	"strings"

	"k8s.io/utils/exec"
)

// A guard runs programs, but mkfs only on a device that Device.prepare found blank. SafeFormatAndMount asks
// blkid once more, and takes its status 2 for blank, which blkid also answers for a device that it cannot open.
type guard struct {
	exec.Interface
	mayFormat bool
}

// Command is that of exec.Interface.
func (g guard) Command(name string, args ...string) exec.Cmd {
	if strings.HasPrefix(name, "mkfs") && !g.mayFormat {
		return refusal{}
	}
	return g.Interface.Command(name, args...)
}

// A refusal is a command that fails without having been started.
type refusal struct {
	exec.Cmd // nil: mount-utils calls the one method below
}

// CombinedOutput returns the reason.
func (refusal) CombinedOutput() ([]byte, error) {
	return nil, errors.New("not formatted: the device had a filesystem a moment ago, and cannot be read now")
}
