package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"kubevirt.io/hostpath-provisioner/test/cluster/image"
)

// Shell is the name of the image with a shell and what a shell calls.
const Shell = "localhost/busybox:test"

const pauseImage = "localhost/pause:test"

// products are our own programs, whose images are made from the Dockerfile.
var products = []string{"hostpath-csi-driver", "hostpath-provisioner"}

// sidecars are the programs that the overlays have an image of.
var sidecars = []string{"csi-provisioner", "csi-resizer", "csi-snapshotter", "node-driver-registrar", "livenessprobe", "health-monitor", "snapshot-controller"}

// MakeImages writes the images of a node into a directory and returns their
// files, with that of the driver, which is among the programs already.
func MakeImages(ctx context.Context, programs, dir string) ([]string, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("%s --list: %w", busybox, err)
	}
	links := map[string]string{}
	for applet := range strings.FieldsSeq(string(applets)) {
		if applet != "busybox" {
			links["/bin/"+applet] = "busybox"
		}
	}
	images := []image.Image{
		{
			Name:  Shell,
			Files: map[string]string{"/bin/busybox": busybox},
			Links: links,
			Texts: map[string]string{"/etc/passwd": "root:x:0:0:root:/:/bin/sh\n", "/etc/group": "root:x:0:\n"},
			Dirs:  []string{"/tmp"},
		},
		{
			Name:       pauseImage,
			Files:      map[string]string{"/busybox": busybox},
			Entrypoint: []string{"/busybox", "sleep", "infinity"},
		},
	}
	suite, err := suiteImages(ctx, programs, images[0])
	if err != nil {
		return nil, err
	}
	images = append(images, suite...)
	for _, sidecar := range sidecars {
		images = append(images, image.Image{
			Name:       "localhost/" + sidecar + ":test",
			Files:      map[string]string{"/" + sidecar: filepath.Join(programs, sidecar)},
			Entrypoint: []string{"/" + sidecar},
		})
	}
	var archives []string
	for _, program := range products {
		archive := filepath.Join(programs, program+".tar")
		if _, err := os.Stat(archive); err != nil {
			return nil, err
		}
		archives = append(archives, archive)
	}
	for _, i := range images {
		archive := filepath.Join(dir, strings.ReplaceAll(i.Name, "/", "_")+".tar")
		if err := i.Write(archive); err != nil {
			return nil, err
		}
		archives = append(archives, archive)
	}
	return archives, nil
}

// suiteImages are those that the tests of Kubernetes want, under the names that
// they have there, if the program in them was built.
func suiteImages(ctx context.Context, programs string, shell image.Image) ([]image.Image, error) {
	agnhost := filepath.Join(programs, "agnhost")
	if _, err := os.Stat(agnhost); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	// The shell of busybox knows only its own dd.
	gnu, err := withOwn(ctx, shell, "dd", "sh")
	if err != nil {
		return nil, err
	}
	all := shell
	all.Files = maps.Clone(shell.Files)
	all.Files["/agnhost"] = agnhost
	all.Entrypoint = []string{"/agnhost"}
	all.Command = []string{"pause"}
	named := func(i image.Image, name string) image.Image {
		i.Name = "registry.k8s.io/e2e-test-images/" + name
		return i
	}
	return []image.Image{
		named(shell, "busybox:1.37.0-2"),
		named(shell, "nginx:1.27.0-2"),
		named(gnu, "glibc-dns-testing:2.1.1"),
		named(all, "agnhost:2.66.1"),
	}, nil
}

// withOwn is an image with this machine's programs in the place of busybox's, whose
// options are fewer, and with the libraries that they need.
func withOwn(ctx context.Context, i image.Image, programs ...string) (image.Image, error) {
	i.Files, i.Links = maps.Clone(i.Files), maps.Clone(i.Links)
	for _, program := range programs {
		path, err := exec.LookPath(program)
		if err != nil {
			return i, err
		}
		libraries, err := exec.CommandContext(ctx, "ldd", path).Output()
		if err != nil {
			return i, fmt.Errorf("ldd %s: %w", path, err)
		}
		i.Files["/bin/"+program] = path
		delete(i.Links, "/bin/"+program)
		for word := range strings.FieldsSeq(string(libraries)) {
			if filepath.IsAbs(word) {
				i.Files[word] = word
			}
		}
	}
	return i, nil
}
