package pool

import (
	"hash/maphash"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
)

// An entry is what the disk has of one volume.
type entry struct {
	record *record // nil for a directory that came without one
	// present tells whether the directory is there.
	present bool
	// damage is why the record cannot be read; nil if it can, or if there is none.
	damage error
}

// exists tells whether there is anything of the volume at all.
func (e entry) exists() bool { return e.present || e.record != nil || e.damage != nil }

// lost tells of a promise whose directory is gone.
func (e entry) lost() bool { return !e.present }

// promised is the size set aside, in bytes.
func (e entry) promised() int64 {
	if e.record == nil {
		return 0
	}
	return e.record.Bytes
}

// mode is how the volume is used. A directory without a record is one.
func (e entry) mode() Mode {
	if e.record == nil {
		return ModeMount
	}
	return e.record.Mode
}

// block tells whether the volume is a block device.
func (e entry) block() bool { return e.mode() == ModeBlock }

// inline tells whether the volume goes when it is unpublished.
func (e entry) inline() bool { return e.record != nil && e.record.Inline }

// card is what of the entry stays in memory.
func (e entry) card() card {
	var c card
	if e.record != nil {
		c = e.record.card()
	}
	if e.present {
		c.flags |= hasDirectory
	}
	if e.damage != nil {
		c.flags |= hasDamage
	}
	return c
}

// A card is what the index has of one volume: what is told, counted and compared of many
// of them, or of one whose pool does not serve. All else a call reads from the record.
// It has no pointers and a fixed size, which is what a volume costs besides its id.
type card struct {
	promised int64  // bytes
	uid      uint64 // hashUID of that of the record
	project  uint32 // the project id that the record has; 0 for none
	flags    flags
}

// flags are what a card tells by yes and no.
type flags uint16

const (
	hasDirectory flags = 1 << iota
	hasRecord          // one that can be read
	hasDamage          // one that cannot
	isBlock
	isInline
	byXFS // who keeps the size, by the record
	byExt4
	byBtrfs
	sawDirectory // marks of index.mark
	sawRecord
)

// card leaves it open whether the directory is there.
func (r *record) card() card {
	c := card{
		promised: r.Bytes,
		uid:      hashUID(r.UID),
		project:  uint32(r.ProjectID), // decodeRecord has no larger ones
		flags:    hasRecord | by(quota.Kind(r.Quota)),
	}
	if r.Mode == ModeBlock {
		c.flags |= isBlock
	}
	if r.Inline {
		c.flags |= isInline
	}
	return c
}

func by(keeper quota.Kind) flags {
	switch keeper {
	case quota.XFS:
		return byXFS
	case quota.Ext4:
		return byExt4
	case quota.Btrfs:
		return byBtrfs
	}
	return 0
}

var uidSeed = maphash.MakeSeed()

// hashUID stands for a uid where it is only compared.
func hashUID(uid string) uint64 { return maphash.String(uidSeed, uid) }

// is tells whether a card has one of the flags.
func (c card) is(f flags) bool { return c.flags&f != 0 }

func (c card) exists() bool { return c.is(hasDirectory | hasRecord | hasDamage) }

func (c card) lost() bool { return !c.is(hasDirectory) }

func (c card) mode() Mode {
	if c.is(isBlock) {
		return ModeBlock
	}
	return ModeMount
}

// mayBeBlock tells whether the volume is, or may have been made as, a block device:
// that of a damaged record, or of one that was removed, cannot be told.
func (c card) mayBeBlock() bool { return c.is(isBlock) || !c.is(hasRecord) }

// mayHaveDevices tells whether devices may be attached to what is there of the volume.
func (c card) mayHaveDevices() bool { return c.is(hasDirectory) && c.mayBeBlock() }

// unlikeSeen tells of a volume of which index.mark was told something else than the card
// says. A record that cannot be read may be another by now.
func (c card) unlikeSeen() bool {
	return c.is(hasDamage) || c.is(hasDirectory) != c.is(sawDirectory) || c.is(hasRecord) != c.is(sawRecord)
}

// seen is a card of what was just read from the disk, with the marks of that.
func (c card) seen() card {
	if c.is(hasDirectory) {
		c.flags |= sawDirectory
	}
	if c.is(hasRecord) {
		c.flags |= sawRecord
	}
	return c
}

// quotaID is what the volume is counted by; 0 where the kernel chose.
func (c card) quotaID() quota.ID { return quota.ID(c.project) }
