package devices

// Spans are what a way of cleaning overwrites, as pairs of offsets.
func (w Wipe) Spans(size int64) (pairs [][2]int64) {
	for _, s := range w.spans(size) {
		pairs = append(pairs, [2]int64{s.from, s.to})
	}
	return pairs
}

// UseSmallSteps has a device be cleaned in steps of one MiB that are durable each, with ranges of two MiB, until
// restored.
func UseSmallSteps() (restore func()) {
	step, size, note := stepBytes, rangeBytes, noteEvery
	stepBytes, rangeBytes, noteEvery = mib, 2*mib, 0
	return func() { stepBytes, rangeBytes, noteEvery = step, size, note }
}
