// Package poolconfig is the configuration of pools: --datadir as the administrator writes it,
// parsed and checked. It touches no disk.
package poolconfig

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool/limit"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Config is what the administrator says of one pool.
type Config struct {
	Name volume.PoolName
	// Path is the pool's directory, absolute.
	Path string
	// SnapshotPath is where snapshots are kept, absolute; empty for none.
	SnapshotPath string
	// Except is a name in the pool's directory that is never a volume, as the pool of another process; empty for none.
	// It is for pools without snapshots.
	Except string
	// Shared says that several nodes serve the pool at once.
	Shared bool
	// RequireMount says that the path must be a mount point.
	RequireMount bool
	Enforcement  limit.Enforcement
	// Overprovision is the factor by which promises may exceed the pool's size.
	Overprovision float64
	Reserve       volume.Reserve
	// BytesPerInode gives a volume one inode for so many bytes of its size; 0 for no limit,
	// and volume.Unknown for the default of the filesystem.
	BytesPerInode int64
	// Allocation says whether the space of a block volume is set aside when it is made.
	Allocation loop.Allocation
	// Relabel says how much of a volume with a foreign SELinux label is relabelled.
	Relabel label.Scope
	// AllowReadWriteMany has volumes made for the access modes of several nodes in a pool that
	// is not shared: for several pods of one node.
	AllowReadWriteMany bool
}

// document is one pool as --datadir has it. The first four keys and shared are
// those of the upstream KubeVirt driver.
type document struct {
	Name             string          `json:"name"`
	Path             string          `json:"path"`
	SnapshotPath     string          `json:"snapshotPath"`
	SnapshotProvider string          `json:"snapshotProvider"`
	Shared           bool            `json:"shared"`
	RequireMount     bool            `json:"requireMount"`
	Enforcement      string          `json:"enforcement"`
	Overprovision    *float64        `json:"overprovision"`
	Reserve          json.RawMessage `json:"reserve"`
	BytesPerInode    *int64          `json:"bytesPerInode"`
	Allocation       string          `json:"allocation"`
	Relabel          string          `json:"relabel"`
	AllowMany        bool            `json:"allowReadWriteMany"`
}

// keys are the names that a document may have.
var keys = []string{"name", "path", "snapshotPath", "snapshotProvider", "shared",
	"requireMount", "enforcement", "overprovision", "reserve", "bytesPerInode", "allocation", "relabel", "allowReadWriteMany"}

// Parse reads the JSON array of pools. Relative paths are taken from
// workdir. All problems are reported together. Nothing is made or changed.
func Parse(text, workdir string) ([]Config, error) {
	var raw []json.RawMessage
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		return nil, fmt.Errorf("%w: the pools are not a JSON array such as "+
			`[{"name":"local","path":"/var/hpvolumes"}]: %w`, volume.ErrInvalid, err)
	}
	if len(raw) == 0 {
		return nil, fmt.Errorf("%w: no pool is configured", volume.ErrInvalid)
	}
	var configs []Config
	var problems []error
	for i, one := range raw {
		config, err := parsePool(one, workdir)
		if err != nil {
			problems = append(problems, fmt.Errorf("pool %d: %w", i+1, err))
		}
		configs = append(configs, config)
	}
	problems = append(problems, conflicts(configs)...)
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	return configs, nil
}

func parsePool(raw json.RawMessage, workdir string) (Config, error) {
	var doc document
	if err := json.Unmarshal(raw, &doc); err != nil {
		return Config{}, fmt.Errorf("%w: %w", volume.ErrInvalid, err)
	}
	problems := []error{unknownKeys(raw)}
	note := func(err error) { problems = append(problems, err) }

	config := Config{Shared: doc.Shared, RequireMount: doc.RequireMount, AllowReadWriteMany: doc.AllowMany}
	var err error
	config.Name, err = volume.ParsePoolName(doc.Name)
	note(err)
	config.Path, err = absolute("path", doc.Path, workdir)
	note(err)
	if doc.SnapshotPath != "" {
		config.SnapshotPath, err = absolute("snapshotPath", doc.SnapshotPath, workdir)
		note(err)
	}
	if config.Path != "" && config.SnapshotPath == config.Path {
		note(fmt.Errorf("%w: snapshotPath is the pool's own path", volume.ErrInvalid))
	}
	note(checkProvider(doc))
	config.Enforcement, err = parseEnforcement(doc.Enforcement)
	note(err)
	config.Overprovision, err = parseOverprovision(doc.Overprovision)
	note(err)
	config.Reserve, err = parseReserve(doc.Reserve)
	note(err)
	config.BytesPerInode, err = parseBytesPerInode(doc.BytesPerInode)
	note(err)
	config.Allocation, err = parseAllocation(doc.Allocation)
	note(err)
	config.Relabel, err = parseRelabel(doc.Relabel)
	note(err)
	return config, errors.Join(problems...)
}

func unknownKeys(raw json.RawMessage) error {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(raw, &all); err != nil {
		return fmt.Errorf("%w: %w", volume.ErrInvalid, err)
	}
	var unknown []string
	for key := range all {
		if !slices.ContainsFunc(keys, func(k string) bool { return strings.EqualFold(k, key) }) {
			unknown = append(unknown, fmt.Sprintf("%q", key))
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	slices.Sort(unknown)
	return fmt.Errorf("%w: unknown keys %s; known are %s", volume.ErrInvalid, strings.Join(unknown, ", "), strings.Join(keys, ", "))
}

func absolute(key, path, workdir string) (string, error) {
	switch {
	case path == "":
		return "", fmt.Errorf("%w: %s is missing", volume.ErrInvalid, key)
	case strings.ContainsRune(path, 0):
		return "", fmt.Errorf("%w: %s contains a NUL byte", volume.ErrInvalid, key)
	case !filepath.IsAbs(path):
		path = filepath.Join(workdir, path)
	}
	path = filepath.Clean(path)
	if path == "/" {
		return "", fmt.Errorf("%w: %s is the root directory; name a directory of its own", volume.ErrInvalid, key)
	}
	return path, nil
}

func checkProvider(doc document) error {
	switch {
	case doc.SnapshotProvider == "":
		return nil
	case doc.SnapshotProvider != "reflink":
		return fmt.Errorf(`%w: snapshotProvider %q is unknown; "reflink" is the only one`, volume.ErrInvalid, doc.SnapshotProvider)
	case doc.SnapshotPath == "":
		return fmt.Errorf("%w: snapshotProvider is given without snapshotPath", volume.ErrInvalid)
	}
	return nil
}

func parseEnforcement(s string) (limit.Enforcement, error) {
	switch e := limit.Enforcement(s); e {
	case "":
		return limit.Auto, nil
	case limit.Auto, limit.Required, limit.None:
		return e, nil
	}
	return "", fmt.Errorf(`%w: enforcement %q is not "auto", "required" or "none"`, volume.ErrInvalid, s)
}

func parseOverprovision(factor *float64) (float64, error) {
	switch {
	case factor == nil:
		return 1, nil
	case *factor <= 0 || *factor > 1000 || math.IsNaN(*factor):
		return 0, fmt.Errorf("%w: overprovision %v is not a factor above 0 and up to 1000", volume.ErrInvalid, *factor)
	}
	return *factor, nil
}

func parseBytesPerInode(bytes *int64) (int64, error) {
	switch {
	case bytes == nil:
		return volume.Unknown, nil
	case *bytes < 0:
		return 0, fmt.Errorf("%w: bytesPerInode %d is negative", volume.ErrInvalid, *bytes)
	}
	return *bytes, nil
}

// parseReserve takes a string, or a plain number of bytes.
func parseReserve(raw json.RawMessage) (volume.Reserve, error) {
	if raw == nil {
		return volume.Reserve{}, nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		text = string(raw)
	}
	reserve, err := volume.ParseReserve(text)
	if err != nil {
		return volume.Reserve{}, fmt.Errorf("reserve: %w", err)
	}
	return reserve, nil
}

func parseAllocation(s string) (loop.Allocation, error) {
	switch s {
	case "", "thick":
		return loop.Thick, nil
	case "thin":
		return loop.Thin, nil
	}
	return 0, fmt.Errorf(`%w: allocation %q is not "thick" or "thin"`, volume.ErrInvalid, s)
}

func parseRelabel(s string) (label.Scope, error) {
	switch s {
	case "", "root":
		return label.Root, nil
	case "recursive":
		return label.Recursive, nil
	case "none":
		return label.None, nil
	}
	return 0, fmt.Errorf(`%w: relabel %q is not "root", "recursive" or "none"`, volume.ErrInvalid, s)
}

// conflicts are the problems of pools with each other. Only the paths as written
// are compared: to follow links would be to touch a disk that may hang. That two
// pools are one directory all the same, or lie one in the other, is noticed when they
// are checked.
func conflicts(configs []Config) []error {
	var problems []error
	for i, a := range configs {
		for j, b := range configs {
			if i != j && a.SnapshotPath != "" && b.Path != "" && (a.SnapshotPath == b.Path || within(a.SnapshotPath, b.Path)) {
				problems = append(problems, fmt.Errorf("%w: the snapshotPath of pool %q lies in pool %q", volume.ErrInvalid, a.Name, b.Name))
			}
		}
		for _, b := range configs[:i] {
			if a.Name == b.Name && a.Name != (volume.PoolName{}) {
				problems = append(problems, fmt.Errorf("%w: two pools are named %q", volume.ErrInvalid, a.Name))
			}
			switch {
			case a.Path == "" || b.Path == "":
			case a.Path == b.Path:
				problems = append(problems, fmt.Errorf("%w: pools %q and %q have the same path %s", volume.ErrInvalid, b.Name, a.Name, a.Path))
			case within(a.Path, b.Path) || within(b.Path, a.Path):
				problems = append(problems, fmt.Errorf("%w: pools %q (%s) and %q (%s) lie one in the other", volume.ErrInvalid, b.Name, b.Path, a.Name, a.Path))
			}
		}
	}
	return problems
}

// within reports whether a path lies below another.
func within(path, parent string) bool {
	return strings.HasPrefix(path, strings.TrimSuffix(parent, "/")+"/")
}

// Reserved is the directory of the pool in which its snapshots lie, or else the one that is excepted; empty if
// there is neither.
func (p Config) Reserved() string {
	below, ok := strings.CutPrefix(p.SnapshotPath, p.Path+"/")
	if !ok {
		return p.Except
	}
	name, _, _ := strings.Cut(below, "/")
	return name
}

// MultiNode reports whether volumes may be made for the access modes of several nodes.
func (p Config) MultiNode() bool { return p.Shared || p.AllowReadWriteMany }
