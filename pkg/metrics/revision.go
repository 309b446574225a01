package metrics

import (
	"runtime/debug"
)

// Revision is what the program was built from; empty if that was not in a repository.
func Revision() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" {
			return setting.Value
		}
	}
	return ""
}
