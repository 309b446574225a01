package transfer

import (
	"context"
	"hash/maphash"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer/internal/spool"
)

// SourceNames are the names that the source has in the directories from the root to the current one, by their fingerprints.
type sourceNames struct {
	seed maphash.Seed
	all  *spool.Spool
}

func newSourceNames(in *dir.Dir) sourceNames { return sourceNames{maphash.MakeSeed(), spool.New(in)} }

// mark is where the names of a directory begin that is entered now.
func (s *sourceNames) mark() int64 { return s.all.Size() }

// add adds a name of the current directory.
func (s *sourceNames) add(name string) error { return s.all.Push(maphash.String(s.seed, name)) }

// forget forgets the names from a mark on.
func (s *sourceNames) forget(mark int64) { s.all.Cut(mark) }

// namesAtOnce are compared at once with those that the source has.
const namesAtOnce = 256 << 10

// others calls found for each entry of the current directory, whose names begin at the mark, that the source does not have.
func (s *sourceNames) others(ctx context.Context, in *dir.Dir, mark int64, found func(name string) error) error {
	parts := uint64((s.all.Size()-mark)/namesAtOnce + 1)
	for part := range parts {
		has := make(map[uint64]struct{})
		err := s.all.Each(mark, func(name uint64) {
			if name%parts == part {
				has[name] = struct{}{}
			}
		})
		if err != nil {
			return err
		}
		isOther := func(name string) bool {
			hash := maphash.String(s.seed, name)
			_, known := has[hash]
			return hash%parts == part && !known
		}
		if err := eachEntry(ctx, in, isOther, found); err != nil {
			return err
		}
	}
	return nil
}

// eachEntry calls found for each entry whose name is wanted.
func eachEntry(ctx context.Context, in *dir.Dir, wanted func(name string) bool, found func(name string) error) error {
	for entry, err := range in.Entries() {
		if err == nil {
			err = ctx.Err()
		}
		if err == nil && wanted(entry.Name) {
			err = found(entry.Name)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
