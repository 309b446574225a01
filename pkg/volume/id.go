// Package volume has the vocabulary of volumes and pools: their names, sizes, modes and
// errors. It imports nothing but the standard library, so that every other package can
// use the same words.
package volume

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxID is the longest id, in bytes. It leaves room in a file name (NAME_MAX, 255 bytes) for what the layout adds
// to an id. CSI names are at most 128 bytes; the directories of the pre-CSI
// provisioner can be longer.
const MaxID = 200

// An ID names a volume and the directory that holds it. Only ParseID
// makes one, so holding an ID is proof that it cannot leave its pool.
type ID struct{ name string }

// ParseID takes a single file name: letters, digits, dots, underscores and
// hyphens, the first a letter or digit, at most 200 bytes. Names of the layout
// itself and of filesystems (lost+found) are none.
func ParseID(s string) (ID, error) {
	if err := checkElement("volume id", s); err != nil {
		return ID{}, err
	}
	return ID{name: s}, nil
}

// String is the id.
func (id ID) String() string { return id.name }

// Compare orders ids by their bytes.
func (id ID) Compare(other ID) int { return strings.Compare(id.name, other.name) }

// A NodeID names a node, and its part of what the nodes of a shared pool keep apart.
type NodeID struct{ name string }

// ParseNodeID takes what ParseID takes; every name of a Kubernetes node that
// is not longer than 200 bytes is one.
func ParseNodeID(s string) (NodeID, error) {
	if err := checkElement("node id", s); err != nil {
		return NodeID{}, err
	}
	return NodeID{name: s}, nil
}

// String is the id.
func (n NodeID) String() string { return n.name }

func checkElement(what, s string) error {
	switch {
	case s == "":
		return fmt.Errorf("%w: the %s is empty", ErrInvalid, what)
	case len(s) > MaxID:
		return fmt.Errorf("%w: the %s has %d bytes, at most %d are allowed", ErrInvalid, what, len(s), MaxID)
	case !isAlphanumeric(s[0]):
		return fmt.Errorf("%w: the %s %q does not start with a letter or digit", ErrInvalid, what, s)
	}
	for i := range len(s) {
		if c := s[i]; !isAlphanumeric(c) && c != '.' && c != '-' && c != '_' {
			return fmt.Errorf("%w: the %s %q contains %q; letters, digits, dots, underscores and hyphens are allowed",
				ErrInvalid, what, s, s[i:i+1])
		}
	}
	return nil
}

func isAlphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// A PoolName names a pool. It is never part of a path. The zero PoolName stands for the
// pool that is meant where none is named.
type PoolName struct{ name string }

// ParsePoolName takes printable text without slashes, at most 253 bytes.
func ParsePoolName(s string) (PoolName, error) {
	switch {
	case s == "":
		return PoolName{}, fmt.Errorf("%w: the pool name is empty", ErrInvalid)
	case len(s) > 253:
		return PoolName{}, fmt.Errorf("%w: the pool name has %d bytes, at most 253 are allowed", ErrInvalid, len(s))
	case !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return r == '/' || !unicode.IsPrint(r) }):
		return PoolName{}, fmt.Errorf("%w: the pool name %q contains a slash or an unprintable character", ErrInvalid, s)
	}
	return PoolName{name: s}, nil
}

// String is the name.
func (n PoolName) String() string { return n.name }

// A MoveID names a move of a volume between nodes: the uid of the object that asks for it.
type MoveID struct{ name string }

// ParseMoveID takes what ParseID takes, at most 64 bytes; every uid of Kubernetes is one.
func ParseMoveID(s string) (MoveID, error) {
	if err := checkElement("move id", s); err != nil {
		return MoveID{}, err
	}
	if len(s) > 64 {
		return MoveID{}, fmt.Errorf("%w: the move id has %d bytes, at most 64 are allowed", ErrInvalid, len(s))
	}
	return MoveID{name: s}, nil
}

// String is the id.
func (m MoveID) String() string { return m.name }
