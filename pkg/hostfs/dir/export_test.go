package dir

// AskDisk is Dir.AskDisk with direct IO that is aligned to fewer bytes.
func AskDisk(d *Dir, name string, unit int) error { return d.askDisk(name, unit) }
