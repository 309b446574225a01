package dir

// AskDisk is Dir.AskDisk with a smaller alignment of direct IO.
func AskDisk(d *Dir, name string, unit int) error { return d.askDisk(name, unit) }
