// Command bundle writes the bundle by which the Operator Lifecycle Manager installs the operator: manifests, metadata and the Dockerfile of
// its image.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"kubevirt.io/hostpath-provisioner/pkg/operator/olm"
)

func main() {
	version := flag.String("version", "", "the version, such as v0.1.0")
	prefix := flag.String("image-prefix", "", "what the names of images begin with, such as registry.example.com/storage/")
	repository := flag.String("repository", "", "where the source is, such as https://git.example.com/storage/hostpath")
	replaces := flag.String("replaces", "", "the name of the ClusterServiceVersion before, if there is one in the catalogue")
	flag.Parse()
	options := olm.Options{Version: *version, Replaces: *replaces, Image: *prefix + olm.Name + ":" + *version, Repository: *repository}
	if err := write(flag.Arg(0), options); err != nil {
		fmt.Fprintf(os.Stderr, "bundle: %v\n", err)
		os.Exit(1)
	}
}

// write makes a directory of a bundle anew.
func write(dir string, options olm.Options) error {
	files, err := options.Bundle()
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}
