package devices

import (
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// IdentityAnnotation of a PersistentVolume is what its device is known by, where the node does not know it any more.
const IdentityAnnotation = "local-pv-provisioner.cybozu.io/device-identity"

// shared says whether an identity is that of a disk which several nodes may see. The file of a loop device is each node's own.
func shared(identity string) bool { return !strings.HasPrefix(identity, "backing_file=") }

// asOf is Record.asOf of a volume.
func (v Volume) asOf(f blockdev.Facts) Volume {
	if v.Identity != "" && f.Identity == "" && v.Identity == f.Alike {
		v.Identity, v.Unidentified = "", true
	}
	return v
}

// sameDisk says whether two identities are of one disk, or of parts of it that share blocks.
func sameDisk(a, b string) bool {
	if a == "" || b == "" || shared(a) != shared(b) {
		return false
	}
	diskA, partA := blockdev.DiskAndPart(a)
	diskB, partB := blockdev.DiskAndPart(b)
	return diskA == diskB && (partA == partB || partA == "" || partB == "")
}
