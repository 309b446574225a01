package devices

import "kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"

// Spans are what a way of cleaning overwrites, as pairs of offsets.
func (w Wipe) Spans(size int64) (pairs [][2]int64) {
	for _, s := range w.spans(size) {
		pairs = append(pairs, [2]int64{s.from, s.to})
	}
	return pairs
}

// UseSmallSteps has a device be cleaned in steps of one MiB, with ranges of two MiB, and be asked for before each, until restored.
func UseSmallSteps() (restore func()) {
	step, size, note, ask := stepBytes, rangeBytes, noteEvery, askEvery
	stepBytes, rangeBytes, noteEvery, askEvery = mib, 2*mib, 0, 0
	return func() { stepBytes, rangeBytes, noteEvery, askEvery = step, size, note, ask }
}

// CheckEachStep has a device be checked before each step of its cleaning, until restored.
func CheckEachStep() (restore func()) {
	every := checkEvery
	checkEvery = 0
	return func() { checkEvery = every }
}

// Identify has devices be known by other identities than the kernel's, until restored.
func Identify(as func(identity string) string) (restore func()) {
	before := inspect
	inspect = func(n blockdev.Number) (blockdev.Facts, error) {
		facts, err := before(n)
		facts.Identity = as(facts.Identity)
		facts.Alike = facts.Identity
		return facts, err
	}
	return func() { inspect = before }
}

// IdentifyByFile has loop devices be known by the path of their file, as disks by their number, until restored.
func IdentifyByFile() (restore func()) {
	before := inspect
	inspect = func(n blockdev.Number) (blockdev.Facts, error) {
		facts, err := before(n)
		facts.Identity = facts.Alike
		return facts, err
	}
	return func() { inspect = before }
}

// Liken has devices have no identity, and be known only by what others are known by too, until restored.
func Liken(as string) (restore func()) {
	before := inspect
	inspect = func(n blockdev.Number) (blockdev.Facts, error) {
		facts, err := before(n)
		facts.Identity, facts.Alike = "", as
		return facts, err
	}
	return func() { inspect = before }
}

// SameDisk is for the forms that identities have.
var SameDisk = sameDisk

// UseTurns takes all turns of cleaning, until released.
func (a *Agent) UseTurns() (release func()) {
	for range cap(a.turns) {
		a.turns <- struct{}{}
	}
	return func() {
		for range cap(a.turns) {
			<-a.turns
		}
	}
}

// Ending is closed when Close has been called.
func (a *Agent) Ending() <-chan struct{} { return a.ctx.Done() }
