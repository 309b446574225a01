// Package label gives directories the SELinux label that containers may use.
// It does nothing if SELinux is off. The caller decides when to label.
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
// runtime restricts it to one pod if the pod asks for that.
const Container = "system_u:object_r:container_file_t:s0"

// containerType is the SELinux type that lets containers use a directory.
const containerType = "container_file_t"

// A Scope says how much of a directory that has another label is relabelled.
type Scope int

// The zero Scope labels only the root of the tree, which is enough if the
// container runtime labels the rest when a pod starts.
const (
	Root Scope = iota
	Recursive
	None
)

// Kernel labels through the security.selinux attribute.
type Kernel struct {
	// On enables labelling.
	On bool
}

// NewKernel enables labelling if SELinux is on.
func NewKernel() Kernel { return Kernel{On: selinux.GetEnabled()} }

// Ensure gives root the label Container unless it already has its type, and with Recursive
// first everything below: the root comes last, so that an interrupted call is repeated. It
// reports whether it changed anything. A filesystem that does not store labels, such as one
// mounted with context=, is left as it is.
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
		return false, nil //nolint:nilerr // not a valid label: replace it
	}
	return context["type"] == containerType, nil
}

// labelBelow labels everything below root; of links, the link itself and not its target.
func labelBelow(root *dir.Dir) error {
	return dir.Walk(root, labelFile, func(d *dir.Dir) error {
		return ignoreUnsupported(d.String(), selinux.SetFileLabel(d.HandlePath(), Container))
	})
}

func labelFile(in *dir.Dir, name string) error {
	err := selinux.LsetFileLabel(in.HandlePath()+"/"+name, Container)
	// The file may have been removed meanwhile.
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
