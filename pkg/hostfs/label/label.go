// Package label gives directories the SELinux label that containers may use.
// Where SELinux is off nothing is tried. When to label is the caller's business.
package label

import (
	"errors"
	"fmt"

	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Container is the label of content that every container may use: the type of
// container-selinux, at the lowest level and without categories. The container
// runtime narrows it to one pod where it shall be.
const Container = "system_u:object_r:container_file_t:s0"

// containerType is what decides whether a container may use a directory at all.
const containerType = "container_file_t"

// A Scope says how much of a directory that came with another label is labelled.
type Scope int

// The zero Scope labels the root of the tree alone, which is enough where the
// container runtime labels the rest when a pod starts.
const (
	Root Scope = iota
	Recursive
	None
)

// Kernel labels through the security.selinux attribute.
type Kernel struct {
	// On tells whether to label at all.
	On bool
}

// NewKernel asks the kernel whether SELinux is on.
func NewKernel() Kernel { return Kernel{On: selinux.GetEnabled()} }

// Ensure gives root the label Container unless it has its type already, and with
// Recursive all below it first: the root comes last, so that work that was cut
// short is seen to be unfinished. It tells whether it changed anything. A filesystem
// that takes no labels, being mounted with context= for one, is left as it is.
func (k Kernel) Ensure(root *dir.Dir, scope Scope) (changed bool, err error) {
	if !k.On || scope == None {
		return false, nil
	}
	has, err := hasType(root)
	if err != nil || has {
		return false, err
	}
	if scope == Recursive {
		if err := labelBelow(root); err != nil {
			return false, err
		}
	}
	if err := selinux.SetFileLabel(root.HandlePath(), Container); err != nil {
		return false, ignoreUnsupported(root.String(), err)
	}
	return true, nil
}

func hasType(d *dir.Dir) (bool, error) {
	current, err := selinux.FileLabel(d.HandlePath())
	switch {
	case errors.Is(err, unix.ENODATA):
		return false, nil
	case errors.Is(err, unix.ENOTSUP):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("read the label of %s: %w", d, err)
	}
	context, err := selinux.NewContext(current)
	if err != nil {
		return false, nil //nolint:nilerr // not a label at all: replace it
	}
	return context["type"] == containerType, nil
}

// labelBelow labels what lies below root, links themselves and not what they point at.
func labelBelow(root *dir.Dir) error {
	return root.Walk(labelFile, func(d *dir.Dir) error {
		return ignoreUnsupported(d.String(), selinux.SetFileLabel(d.HandlePath(), Container))
	})
}

func labelFile(in *dir.Dir, name string) error {
	err := selinux.LsetFileLabel(in.HandlePath()+"/"+name, Container)
	// A file may go away meanwhile.
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return ignoreUnsupported(in.String()+"/"+name, err)
}

func ignoreUnsupported(path string, err error) error {
	if err == nil || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EROFS) {
		return nil
	}
	return fmt.Errorf("label %s: %w", path, err)
}
