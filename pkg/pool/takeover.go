package pool

import (
	"errors"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// unseenAfter is when what another node of a shared pool left unfinished is taken
// over. The clocks of nodes differ by less.
const unseenAfter = 24 * time.Hour

// takeOver says that this node is alive, and finishes what nodes left that are not.
// A node's trash directory is its sign of life. What cannot be taken over now is
// tried again: it keeps nobody from being served.
func (s *session) takeOver() {
	err := s.trash.Touch()
	if err == nil {
		err = s.takeOverAll(true)
	}
	if err != nil {
		s.pool.log.Error(err, "what nodes left that are gone could not be taken over")
	}
}

// takeOverAll takes over from all other nodes, or from those that were not seen
// lately.
func (s *session) takeOverAll(goneOnly bool) error {
	trash, err := s.own.Open(trashName)
	if err != nil {
		return err
	}
	defer func() { _ = trash.Close() }()
	var problems []error
	for entry, err := range trash.Entries() {
		if err != nil {
			return err
		}
		if entry.IsDir && entry.Name != s.pool.options.Node.name {
			problems = append(problems, s.takeOverFrom(trash, entry.Name, goneOnly))
		}
	}
	return errors.Join(problems...)
}

func (s *session) takeOverFrom(trash *dir.Dir, node string, goneOnly bool) error {
	left, err := trash.Open(node)
	if err != nil {
		return err
	}
	defer func() { _ = left.Close() }()
	if alive, err := seenLately(left); err != nil || alive && goneOnly {
		return err
	}
	staging, err := openNested(s.own, stagingName, node, (*dir.Dir).Ensure)
	if err != nil {
		return err
	}
	defer func() { _ = staging.Close() }()
	return errors.Join(s.recoverStaging(staging), s.takeTrash(left, node))
}

// seenLately tells whether a node is alive by its trash directory.
func seenLately(trash *dir.Dir) (bool, error) {
	seen, err := trash.Modified()
	return time.Since(seen) < unseenAfter, err
}

func (s *session) takeTrash(left *dir.Dir, node string) error {
	thrown, err := names(left)
	if err != nil {
		return err
	}
	for _, name := range thrown {
		take := func() error {
			s.pool.log.Info("taking over the trash of a node that is gone", "trash", name, "node", node)
			return s.takePiece(left, name)
		}
		if id, ok := trashedID(name); ok {
			err = s.unlessBusy(id, take)
		} else {
			err = take()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// takePiece takes one piece of trash over, and claims the id that it carries.
func (s *session) takePiece(left *dir.Dir, name string) error {
	if err := s.finishRemoval(name); err != nil {
		return err
	}
	carried, err := s.idIn(left, name)
	if err != nil {
		return err
	}
	// The index may have had the volume, and its record the id.
	uid := s.claims.owner(carried)
	if uid == "" || !strings.HasSuffix(name, "."+uid) {
		uid = randomSuffix()
	}
	s.claims.try(carried, uid)
	return s.throwAway(left, name, randomSuffix()+"."+uid, unknownBytes)
}
