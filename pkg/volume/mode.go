package volume

// A Mode is how a volume is used, for its whole life.
type Mode string

// The modes of volumes.
const (
	ModeMount Mode = "mount" // a directory
	ModeBlock Mode = "block" // a block device
)
