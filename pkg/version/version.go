// Package version has the version of the program that it is built into, and where its release is.
package version

import (
	"cmp"
	"runtime/debug"
)

// These are set when a program is linked: make passes VERSION, which is also the tag of the images, IMAGE_PREFIX, with which their names
// begin, and REPOSITORY.
var built, images, repository string

// What manifests name, and what a program is of that was linked in another way.
const (
	DefaultImages     = "ghcr.io/kubevirt/hostpath-provisioner/"
	DefaultRepository = "https://github.com/kubevirt/hostpath-provisioner"
)

// Images begins the names of the images of the release, with a slash at its end.
func Images() string { return cmp.Or(images, DefaultImages) }

// Repository is where source and documents of the release are, without a slash at its end.
func Repository() string { return cmp.Or(repository, DefaultRepository) }

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
