// Package pool keeps volumes in storage pools: directories in which each volume is
// a directory, beside a record of what was promised. It decides what exists, what
// fits and what may be removed, and keeps that true through crashes; the layout is
// in docs/layout.md. It knows nothing of gRPC or Kubernetes, and reaches Linux
// through the packages below pkg/hostfs.
//
// The disk is the truth. What is held in memory, the index and the ledger, serves
// the answers that may not cost a scan, and is compared with the disk as time goes by.
package pool

import "errors"

// Errors that callers may test for. Every error of this package that is not one of
// them is a failure of the system below.
var (
	// ErrInvalid reports a request that can never succeed as it is.
	ErrInvalid = errors.New("invalid")
	// ErrNotFound reports a volume, or a publication of it, that does not exist.
	ErrNotFound = errors.New("not found")
	// ErrExists reports that the name is taken by something that differs.
	ErrExists = errors.New("already exists")
	// ErrInUse reports a volume that is published.
	ErrInUse = errors.New("in use")
	// ErrNoSpace reports that a promise does not fit into the pool now.
	ErrNoSpace = errors.New("not enough space")
	// ErrOutOfRange reports a size that no volume can have.
	ErrOutOfRange = errors.New("size out of range")
	// ErrBusy reports that another call works on the same volume or target.
	ErrBusy = errors.New("another call is in progress")
	// ErrUnavailable reports a pool that does not serve at the moment.
	ErrUnavailable = errors.New("pool unavailable")
	// ErrDamaged reports a record that cannot be read, or contradicts itself.
	ErrDamaged = errors.New("damaged record")
)
