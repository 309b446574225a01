package migrate

import (
	"errors"
	"fmt"
	"strings"
)

// A form is what an object or a directory is: that of the old provisioner, or that of the driver.
type form int

const (
	absent form = iota
	plain       // hostPath or local
	csi
)

func (f form) other() form {
	if f == plain {
		return csi
	}
	return plain
}

func (f form) String() string {
	switch f {
	case plain:
		return "old"
	case csi:
		return "new"
	}
	return "absent"
}

// seen is what the file, the cluster and the disk have of a volume.
type seen struct {
	saved    bool // the file is there
	finished bool // and says that the migration was completed

	claim      form
	claimGoing bool // it is being deleted
	bound      bool

	volume      form
	volumeGoing bool
	// safe: to delete the PersistentVolume leaves the directory: the policy is Retain, and no provisioner is waited for.
	safe bool
	// stale: it names a claim that is gone, and would never be bound again.
	stale bool
	// retains: the old PersistentVolume had the reclaim policy Retain; policy: this one has the same as that.
	retains, policy bool

	directory form
	// recorded: the records are those of the wanted form.
	recorded bool
	// reported: the driver reports the volume.
	reported bool

	// users are the pods that use the claim.
	users []string
}

// String is what is waited for, in messages.
func (s seen) String() string {
	words := []string{"claim " + s.claim.String(), "PersistentVolume " + s.volume.String()}
	if len(s.users) > 0 {
		words = append(words, "used by "+strings.Join(s.users, ", "))
	}
	return strings.Join(words, ", ")
}

type step int

const (
	nothing step = iota
	save
	reopen
	retain
	deleteClaim
	awaitClaimGone
	deleteVolume
	awaitVolumeGone
	move
	record
	awaitReport
	createVolume
	freeVolume
	createClaim
	awaitBound
	restorePolicy
	finish
)

func (s step) waits() bool {
	return s == awaitClaimGone || s == awaitVolumeGone || s == awaitReport || s == awaitBound
}

var (
	errInUse = errors.New("the claim is in use")
	errMoved = errors.New("the directory is not where the PersistentVolume says")
)

// next is what is to be done first to get to a form. The order is what keeps the data: nothing of Kubernetes refers to
// the directory while it moves, and no object is deleted whose deletion would remove it.
func next(want form, s seen) (step, error) {
	other := want.other()
	switch {
	case !s.saved && want == plain:
		return nothing, nil
	case s.finished && want == csi && s.volume == csi:
		return nothing, nil
	case len(s.users) > 0 && (s.volume == other && !s.safe || s.claim == other && !s.claimGoing):
		return nothing, fmt.Errorf("%w by pod %s: end it first", errInUse, strings.Join(s.users, ", "))
	case s.directory == absent && (s.volume == other || s.claim == other):
		return nothing, fmt.Errorf("%w: it is neither there nor in the pool, and no object of it is deleted; if it was moved to another node, move it back first", errMoved)
	case !s.saved:
		return save, nil
	case s.finished && want == plain:
		return reopen, nil
	case s.volume == other && !s.safe:
		return retain, nil
	case s.claimGoing:
		return awaitClaimGone, nil
	case s.claim == other:
		return deleteClaim, nil
	case s.volumeGoing:
		return awaitVolumeGone, nil
	case s.volume == other:
		return deleteVolume, nil
	case s.volume == absent:
		return nextOnDisk(want, s)
	case s.directory != want:
		return nothing, fmt.Errorf("%w: move it back", errMoved)
	}
	return nextBinding(want, s), nil
}

// nextOnDisk is for a directory that no PersistentVolume has.
func nextOnDisk(want form, s seen) (step, error) {
	switch {
	case s.directory == absent:
		return nothing, fmt.Errorf("%w: it is neither there nor in the pool; find it, or restore it from a backup, and repeat the command", errMoved)
	case s.directory != want:
		return move, nil
	case !s.recorded:
		return record, nil
	case want == csi && !s.reported:
		return awaitReport, nil
	}
	return createVolume, nil
}

// nextBinding is for a directory whose PersistentVolume is the wanted one.
func nextBinding(want form, s seen) step {
	switch {
	case s.stale && s.policy && !s.retains:
		return finish // the claim was deleted after all was done, and the volume is about to be
	case s.stale:
		return freeVolume
	case s.claim == absent:
		return createClaim
	case !s.bound:
		return awaitBound
	case !s.policy:
		return restorePolicy
	case want == plain || !s.finished:
		return finish
	}
	return nothing
}

// after is what will be seen when a step is done.
func (s seen) after(want form, done step) seen {
	switch done {
	case save:
		s.saved = true
	case reopen:
		s.finished = false
	case retain:
		s.safe, s.policy = true, s.retains
	case deleteClaim:
		s.claimGoing = true
	case awaitClaimGone:
		s.claim, s.claimGoing, s.bound = absent, false, false
		s.stale = s.volume != absent
	case deleteVolume:
		s.volumeGoing = true
	case awaitVolumeGone:
		s.volume, s.volumeGoing, s.safe, s.stale = absent, false, false, false
	case move:
		s.directory = want
	case record:
		s.recorded = true
	case awaitReport:
		s.reported = true
	case createVolume:
		s.volume, s.safe, s.policy = want, true, s.retains
	case freeVolume:
		s.stale = false
	case createClaim:
		s.claim = want
	case awaitBound:
		s.bound = true
	case restorePolicy:
		s.policy, s.safe = true, s.retains
	case finish:
		s.finished, s.saved = want == csi, want == csi
	case nothing:
	}
	return s
}

// plan lists the steps that lead from what is seen to a form, as far as nothing stops them.
func plan(want form, s seen) (steps []step, err error) {
	for {
		step, err := next(want, s)
		if err != nil || step == nothing {
			return steps, err
		}
		steps = append(steps, step)
		s = s.after(want, step)
	}
}
