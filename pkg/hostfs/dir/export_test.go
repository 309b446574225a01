package dir

// AskDiskBy is AskDisk with a smaller alignment of direct IO.
func AskDiskBy(d *Dir, name string, unit int) error { return askDisk(d, name, unit) }
