package devices

import "strings"

// IdentityAnnotation of a PersistentVolume is what its device is known by, where the node does not know it any more.
const IdentityAnnotation = "local-pv-provisioner.cybozu.io/device-identity"

// shared says whether an identity is that of a disk which several nodes may see. The file of a loop device is each node's own.
func shared(identity string) bool { return !strings.HasPrefix(identity, "backing_file=") }

// sameDisk says whether two identities are of one disk, or of parts of it that share blocks.
func sameDisk(a, b string) bool {
	if a == "" || b == "" || shared(a) != shared(b) {
		return false
	}
	diskA, partA := diskAndPart(a)
	diskB, partB := diskAndPart(b)
	return diskA == diskB && (partA == partB || partA == "" || partB == "")
}

// diskAndPart takes an identity apart. That of a multipath device is that of its paths: the digit before the number of the disk
// is the kind of that (SPC-4, 7.8.6), which the kernel writes as a word. Spaces of vendors are written as one underscore there.
func diskAndPart(identity string) (disk, part string) {
	_, disk, _ = strings.Cut(identity, "=")
	disk, part, _ = strings.Cut(disk, "#")
	if partition, whole, ok := strings.Cut(disk, "-mpath-"); ok && strings.HasPrefix(partition, "part") {
		disk, part = "mpath-"+whole, strings.TrimPrefix(partition, "part")
	}
	id, multipath := strings.CutPrefix(disk, "mpath-")
	switch {
	case multipath && strings.HasPrefix(id, "3"):
		return "naa." + id[1:], part
	case multipath && strings.HasPrefix(id, "2"):
		return "eui." + id[1:], part
	case multipath && strings.HasPrefix(id, "1"):
		return "t10." + id[1:], part
	}
	if strings.HasPrefix(id, "t10.") {
		id = strings.Join(strings.Fields(id), "_")
	}
	return id, part
}
