package store

import (
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A MoveRole is the side of a move that a volume is on.
type MoveRole string

// The roles.
const (
	// MoveSource is the volume that pods used so far. It is fenced: it is not published any more.
	MoveSource MoveRole = "source"
	// MoveTarget is the copy on the other node. It is no volume yet.
	MoveTarget MoveRole = "target"
)

// A Move is what the record of a volume says while that moves between nodes. The zero Move is none.
type Move struct {
	// ID is the uid of the move. What another move has made is never touched.
	ID   string   `json:"id"`
	Role MoveRole `json:"role"`
	// Peer is the other node.
	Peer string `json:"peer"`
	// Fence is what a source has drawn when it was fenced, and what a target has a whole copy as of; empty for a target that has
	// none. A source that was published in between has another, so that no copy from before is taken for one that is whole.
	Fence string `json:"fence,omitempty"`
	// Base is the reference of the source that a target equals, or what no reference has, by which a session that fills the target
	// knows that it is still the one which does; empty where neither is known.
	Base string `json:"base,omitempty"`
	// Verify is the way in which the target was compared with Base; empty where that is not known.
	Verify string `json:"verify,omitempty"`
	// HandedOver says that the target may have been confirmed, so that the source stays fenced.
	HandedOver bool `json:"handedOver,omitempty"`
	// Recorded says that the source had no record before it was fenced.
	Recorded bool `json:"recorded,omitempty"`
}

// Is reports whether it is one side of a move.
func (m Move) Is(role MoveRole, id volume.MoveID) bool { return m.Role == role && m.ID == id.String() }

// movedVersion is the version of a record with a move. A driver that knows only recordVersion takes it for unreadable: it lets the
// volume be unpublished and deleted, and refuses all else.
const movedVersion = 2

// basedVersion is that of a record with a base. A mover that knows no bases could change what it fills, and leave the base as it was: its
// driver takes this for unreadable, too.
const basedVersion = 3

// version is what a record of these contents has.
func (r *Record) version() int {
	switch {
	case r.Move.Base != "":
		return basedVersion
	case r.Move != (Move{}):
		return movedVersion
	}
	return recordVersion
}

// forgetBase forgets a base in a record of the version before: a mover that knew none may have filled the copy since.
func (r *Record) forgetBase() {
	if r.Version == movedVersion {
		r.Move.Base, r.Move.Verify = "", ""
	}
}

// validMove reports whether what the record says of moves fits together.
func validMove(r Record) bool {
	for _, ended := range []string{r.Moved, r.Undone} {
		if _, err := volume.ParseMoveID(ended); ended != "" && err != nil {
			return false
		}
	}
	if r.Move == (Move{}) {
		return true
	}
	m := r.Move
	_, idErr := volume.ParseMoveID(m.ID)
	_, peerErr := volume.ParseNodeID(m.Peer)
	if idErr != nil || peerErr != nil || r.Inline || r.IsSnapshot() {
		return false
	}
	for _, name := range []string{m.Fence, m.Base, m.Verify} {
		if name != "" && !validName(name) {
			return false
		}
	}
	switch m.Role {
	case MoveSource:
		return m.Fence != "" && m.Base == "" && m.Verify == ""
	case MoveTarget:
		return !m.HandedOver && !m.Recorded && (m.Base != "" || m.Verify == "")
	}
	return false
}
