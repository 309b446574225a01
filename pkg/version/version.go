// Package version has the version of the program that it is built into.
package version

import "runtime/debug"

// built is set when a program is linked: make passes VERSION, which is also the tag of the images.
var built string

// Of is the version that the program was built as, or else the one that Go takes from the repository.
func Of() string {
	if built != "" {
		return built
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

// Tag is the tag of the images that were built with the program; empty if it was built without any.
func Tag() string { return built }
