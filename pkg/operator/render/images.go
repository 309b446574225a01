package render

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
)

// operatorImage is the last part of the name of the operator's own image.
const operatorImage = "hostpath-provisioner-operator"

// releaseImages are those of the same release as the operator, by their names in the manifests.
var releaseImages = []string{mounterImage, "ghcr.io/kubevirt/hostpath-provisioner/hostpath-csi-driver", "ghcr.io/kubevirt/hostpath-provisioner/hostpath-provisioner"}

// A Release is where the images of the operator's release are. The zero value is where the manifests have them.
type Release struct {
	// registry is what the names of images begin with, with a slash at its end.
	registry string
	tag      string
}

// ReleaseOf is where the images of a release are, by that of the operator in a pod. The tag is empty if the image is named by its digest.
func ReleaseOf(image string) (Release, error) {
	name, _, _ := strings.Cut(image, "@")
	registry, base := path.Split(name)
	base, tag, _ := strings.Cut(base, ":")
	if base != operatorImage {
		return Release{}, fmt.Errorf("the image %s is not named %s", image, operatorImage)
	}
	return Release{registry: registry, tag: tag}, nil
}

// An Image is one of what the operator deploys.
type Image struct {
	// Name is the last part of its name in the manifests, and Variable what names another one in the operator's environment.
	Name, Variable string
	// Image is the one that containers get.
	Image string
}

// Images are all images of what the operator deploys, by their names.
func (m *Manifests) Images(config Config) ([]Image, error) {
	var all []Image
	for _, name := range sortedKeys(imageVariables) {
		image, err := m.image(config, name)
		if err != nil {
			return nil, err
		}
		all = append(all, Image{path.Base(name), imageVariables[name], image})
	}
	return all, nil
}

// image is the one for a container whose image in the manifests is this: the one that a variable names, or else the one of
// IMAGE_REGISTRY, or else the one where the operator's own is, or else that of the release, or of the manifests.
func (m *Manifests) image(config Config, name string) (string, error) {
	if image := config.Images[name]; image != "" {
		return image, nil
	}
	tag := m.images[name]
	if tag == "" {
		return "", fmt.Errorf("the manifests have no tag for the image %s", name)
	}
	registry, base := path.Split(name)
	if slices.Contains(releaseImages, name) {
		registry = cmp.Or(config.BuiltFor, registry)
		if config.Release != (Release{}) {
			registry = config.Release.registry
		}
		tag = cmp.Or(config.Release.tag, config.Tag, tag)
	}
	if config.Registry != "" {
		registry = strings.TrimSuffix(config.Registry, "/") + "/"
	}
	return registry + base + ":" + tag, nil
}
