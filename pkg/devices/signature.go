package devices

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// A Signature is by what a filesystem, a partition table, a volume manager or the like is recognised on a device.
type Signature struct {
	Type   string `json:"type"`
	Offset string `json:"offset"`
	Label  string `json:"label"`
	UUID   string `json:"uuid"`
}

// String says what it is and where.
func (s Signature) String() string {
	text := s.Type + " at " + s.Offset
	if s.Label != "" {
		text += " (label " + s.Label + ")"
	}
	return text
}

// Signatures are all that util-linux finds on a device, at its head and its tail. It is an error if these cannot be read,
// or are not where they were when it was held.
func Signatures(ctx context.Context, h *Held) ([]Signature, error) {
	if err := h.ReadEnds(); err != nil {
		return nil, err
	}
	output, err := wipefs(ctx, h.File(), "--no-act", "--json")
	if err != nil {
		return nil, err
	}
	// One that was removed has no end any more, and nothing is found on it.
	if err := h.checkSize(); err != nil {
		return nil, err
	}
	var list struct {
		Signatures []Signature `json:"signatures"`
	}
	if len(bytes.TrimSpace(output)) == 0 {
		return nil, nil // it writes nothing if there are none
	}
	if err := json.Unmarshal(output, &list); err != nil {
		return nil, fmt.Errorf("signatures of %s: %v: %s", h, err, output)
	}
	return list.Signatures, nil
}

// eraseSignatures erases them, without backups. --force: the device is held here, so wipefs cannot hold it too, and would then
// not erase partition tables.
func eraseSignatures(ctx context.Context, d *erasable) error {
	_, err := wipefs(ctx, d.writer.File(), "--all", "--force", "--quiet")
	return err
}

// wipefs works on the descriptor that we have, so that no path can lead it elsewhere.
func wipefs(ctx context.Context, d *os.File, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "wipefs", append(args, "/proc/self/fd/3")...)
	cmd.ExtraFiles = append(cmd.ExtraFiles, d)
	cmd.Env = []string{"LC_ALL=C"}
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("wipefs %s %s: %v: %s", strings.Join(args, " "), d.Name(), err, bytes.TrimSpace(stderr.Bytes()))
	}
	return stdout.Bytes(), nil
}
