package devices

import (
	"fmt"
	"regexp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// Partitions says what to do with a partition that was never ours.
type Partitions string

// What to do with partitions.
const (
	// RefusePartitions does not touch any.
	RefusePartitions Partitions = "refuse"
	// OfferPartitions takes those of plain data on a disk that is not used.
	OfferPartitions Partitions = "offer"
)

// dataTypes are the types of partitions that have no other meaning: Linux filesystem data, in a GPT and in a table of DOS. All
// others are reserved for something, known or not: boot loaders (BIOS boot, ESP, PReP), MSR, kernels of ChromeOS, roots that
// systemd finds by their type.
var dataTypes = map[string]bool{"0FC63DAF-8483-4772-8E79-3D69D8477DE4": true, "83": true}

// systemNames are names of partitions that systems give to their own, which they make as plain data: Talos' META and STATE, the
// parts of Bottlerocket, and slots that updates are written to in turns, as USR-A, boot_b or rootfs.1.
var systemNames = regexp.MustCompile(`(?i)^(META|STATE|EPHEMERAL|EFI|ESP|BIOS|BOOT|GRUB|MSR|PREP|OEM|ROOT(FS)?|USR|KERN(EL)?|SYSTEM|RECOVERY|BOTTLEROCKET.*|COS_.*|(ROOT|BOOT|USR|KERN|SYSTEM|SLOT).*[AB01])$|[-_. ][AB]$`)

// partitionsOf counts them in words.
func partitionsOf(facts blockdev.Facts) string {
	if len(facts.Partitions) == 1 {
		return "a partition"
	}
	return fmt.Sprintf("%d partitions", len(facts.Partitions))
}

// partition refuses a partition without a record, unless it is plain data on a disk that nothing else of is used.
func (l Look) partition(facts blockdev.Facts) error {
	if l.Partitions != OfferPartitions {
		return l.refuse(IsPartition, "it is a partition, which %s does not offer", KeyPartitions)
	}
	kind, err := facts.Kind()
	if err != nil {
		return l.refuse(Reserved, "what it is for cannot be known: %v", err)
	}
	if !dataTypes[kind.Type] || kind.Attributes != 0 || systemNames.MatchString(kind.Name) {
		return l.refuse(Reserved, "it has the type %s, the name %q and the attributes %#x; only plain Linux data is offered (type 0FC63DAF-8483-4772-8E79-3D69D8477DE4, or 83)",
			kind.Type, kind.Name, kind.Attributes)
	}
	return nil
}

// alone refuses a partition of a disk of which another part is held exclusively. While this one is held, that cannot be known.
func (l Look) alone(facts blockdev.Facts) error {
	if l.holding {
		return nil
	}
	held, err := facts.PartitionsHeld()
	if err != nil {
		return l.refuse(reasonOf(err), "whether another part of its disk is in use cannot be known: %v", err)
	}
	if held {
		return l.refuse(InUse, "another part of its disk is in use")
	}
	return nil
}
