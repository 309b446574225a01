package clone

import "sync/atomic"

// A budget is what all copies of this process may take together. Each takes at most half of what is left: so there is some for every one
// that begins, however many there are.
type budget struct{ left atomic.Int64 }

func newBudget(all int64) *budget {
	b := new(budget)
	b.left.Store(all)
	return b
}

func (b *budget) take(most int) (taken int, giveBack func()) {
	for {
		left := b.left.Load()
		taken := min(int64(most), left/2)
		if b.left.CompareAndSwap(left, left-taken) {
			return int(taken), func() { b.left.Add(taken) }
		}
	}
}

// Three copies at once have as much as one alone.
var (
	allNames = newBudget(4 * maxNames)
	allLater = newBudget(4 * laterBytes)
)
