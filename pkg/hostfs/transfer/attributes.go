package transfer

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/xattr"
)

// An attributer reads the extended attributes of entries.
type attributer struct{ list, value []byte }

func newAttributer() *attributer {
	return &attributer{make([]byte, xattr.Max), make([]byte, xattr.Max)}
}

// isKept says whether an attribute is one of the entry, and not of its filesystem: XFS shows each ACL under a name of its own as
// well (trusted.SGI_ACL_FILE, SGI_ACL_DEFAULT), and only btrfs takes its own.
func isKept(name string, btrfs bool) bool {
	return !strings.HasPrefix(name, "trusted.SGI_ACL_") && (btrfs || !strings.HasPrefix(name, "btrfs."))
}

// each calls found for each attribute, in the order of their names. The value is valid during the call.
func (a *attributer) each(h xattr.Holder, btrfs bool, found func(name string, value []byte) error) error {
	list, err := xattr.Listed(h, a.list)
	if err != nil || len(list) == 0 {
		return err
	}
	names := slices.Sorted(xattr.Each(list))
	for _, name := range names {
		if !isKept(name, btrfs) {
			continue
		}
		n, err := h.Get(name, a.value)
		if errors.Is(err, unix.ENODATA) { // removed meanwhile
			continue
		}
		if err == nil {
			err = found(name, a.value[:n])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Sums identify the extended attributes of an entry. That of none is zero.
type sums struct {
	all, portable digest // without the label; and those that any filesystem keeps
	label         digest // where the source has none, the target may have one: the kernel takes it off no file
}

const sumsBytes = 3 * sha256.Size

func (a *attributer) sums(h xattr.Holder) (sums, error) {
	var hashes [3]hash.Hash
	err := a.each(h, true, func(name string, value []byte) error {
		for i, wanted := range []bool{name != xattr.SELinuxLabel, name != xattr.SELinuxLabel && isKept(name, false), name == xattr.SELinuxLabel} {
			if !wanted {
				continue
			}
			if hashes[i] == nil {
				hashes[i] = sha256.New()
			}
			hashes[i].Write(binary.BigEndian.AppendUint32([]byte(name+"\x00"), uint32(len(value)))) // never fails
			hashes[i].Write(value)
		}
		return nil
	})
	var s sums
	for i, sum := range []*digest{&s.all, &s.portable, &s.label} {
		if hashes[i] != nil {
			hashes[i].Sum(sum[:0])
		}
	}
	return s, err
}

// same says whether the attributes of an entry are those of the source, as far as its filesystem keeps them.
func (s *sums) same(source *sums, btrfs bool) bool {
	attributes := s.portable == source.portable
	if btrfs {
		attributes = s.all == source.all
	}
	return attributes && (source.label == digest{} || s.label == source.label)
}

// set sets an attribute that is another.
func (a *attributer) set(h xattr.Holder, name string, value []byte) error {
	n, err := h.Get(name, a.value)
	if err == nil && string(a.value[:n]) == string(value) {
		return nil
	}
	return h.Set(name, value)
}

// takeOthers takes off an entry what attributes were not set.
func (a *attributer) takeOthers(t *target, btrfs bool) error {
	has, err := xattr.Listed(t.holder, a.list)
	if err != nil {
		return wrap("list the attributes of", t.path, err)
	}
	if len(has) == 0 {
		return nil
	}
	wanted := map[string]bool{xattr.SELinuxLabel: true}
	for name := range strings.SplitSeq(t.names.String(), "\x00") {
		wanted[name] = true
	}
	for name := range xattr.Each(has) {
		if wanted[name] || !isKept(name, btrfs) {
			continue
		}
		if err := xattr.TakeOff(t.holder, name); err != nil {
			return wrap("take the attribute "+name+" off", t.path, err)
		}
	}
	return nil
}
