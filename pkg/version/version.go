// Package version has the version of the program that it is built into.
package version

import (
	"cmp"
	"runtime/debug"
)

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

// DefaultRepository is the one that deploy/ names.
const DefaultRepository = "https://github.com/kubevirt/hostpath-provisioner"

// repository is set when a program is linked: make passes REPOSITORY.
var repository string

// Repository is where the source and the documents of the program are: an address without a slash at the end.
func Repository() string { return cmp.Or(repository, DefaultRepository) }

// Tag is the tag of the images that were built with the program; empty if it was built without any.
func Tag() string { return built }
