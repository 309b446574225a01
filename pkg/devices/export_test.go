package devices

// Settle waits until no device is being checked or cleaned.
func (a *Agent) Settle() { a.wait.Wait() }

// Spans are what a way of cleaning overwrites, as pairs of offsets.
func (w Wipe) Spans(size int64) (pairs [][2]int64) {
	for _, s := range w.spans(size) {
		pairs = append(pairs, [2]int64{s.from, s.to})
	}
	return pairs
}

// NoteEachStep has the progress of cleaning be durable after each step.
func NoteEachStep() { noteEvery = 0 }
