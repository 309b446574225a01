// Command release writes what users download for one version: manifests of one file each, charts, archives of the programs, images, notes and
// checksums. The same commit and version give the same bytes.
//
// It is a module of its own, so that kustomize is not in the product's go.mod. `make release` builds what it packs, and runs it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"
)

// A release is what one run writes.
type release struct {
	// version is that of the programs, such as v0.1.0.
	version string
	// images begins the name of each image of the project: a registry and an organisation, with a slash at the end.
	images string
	// repository is where its files, documents and source are: an address without a slash at the end.
	repository string
	// arches are the architectures that programs were built for.
	arches []string
	// made is the time of the commit, which all files in archives have.
	made time.Time
	// root is the checkout, and out the directory that is written.
	root, out string
	// check stops before anything is written.
	check bool
}

// versions are those of Semantic Versioning 2.0.0, with the v of a Go module. A tag of an image has no plus sign.
var versions = regexp.MustCompile(`^v(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z.-]+)?$`)

// prefixes are a registry, and a path in it (OCI distribution specification, "Pulling manifests").
var prefixes = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-][a-z0-9]+)*)+/$`)

// repositories are addresses on a host of Git.
var repositories = regexp.MustCompile(`^https://[a-z0-9.-]+(:[0-9]+)?(/[A-Za-z0-9._-]+)+$`)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	var r release
	var arches string
	var made int64
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	flags.StringVar(&r.version, "version", "", "the version, such as v0.1.0")
	flags.StringVar(&r.images, "image-prefix", "", "what the names of images begin with, such as registry.example.com/storage/")
	flags.StringVar(&r.repository, "repository", home, "where its files are offered, such as https://git.example.com/storage/hostpath")
	flags.StringVar(&arches, "arches", "amd64,arm64", "the architectures that the programs in bin/ were built for")
	flags.Int64Var(&made, "time", 0, "the time of the commit, in seconds since 1970")
	flags.StringVar(&r.root, "root", "..", "the checkout")
	flags.StringVar(&r.out, "out", "", "a directory to write; it must not exist")
	flags.BoolVar(&r.check, "check", false, "check the arguments only, before the programs are built")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case !versions.MatchString(r.version):
		return fmt.Errorf("VERSION is %q: give one such as v0.1.0 or v0.2.0-rc.1", r.version)
	case !prefixes.MatchString(r.images):
		return fmt.Errorf("IMAGE_PREFIX is %q: give a registry and an organisation with a slash at the end, such as registry.example.com/storage/", r.images)
	case !repositories.MatchString(r.repository):
		return fmt.Errorf("REPOSITORY is %q: give an address without a slash at the end, such as https://git.example.com/storage/hostpath", r.repository)
	case r.out == "":
		return errors.New("--out is missing")
	}
	r.arches, r.made = strings.Split(arches, ","), time.Unix(made, 0).UTC()
	return r.write()
}

// write makes the release beside its place, and puts it there when it is whole.
func (r release) write() (err error) {
	if _, err := os.Lstat(r.out); err == nil {
		return fmt.Errorf("%s is there already: remove it, or make another version", r.out)
	}
	if r.check {
		return nil
	}
	place := r.out
	r.out += ".partial"
	if err := os.RemoveAll(r.out); err != nil {
		return err
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(r.out))
		}
	}()
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"manifests", r.writeManifests},
		{"charts", r.writeCharts},
		{"programs", r.writePrograms},
		{"plugin of kubectl", r.writePlugin},
		{"images", r.writeImages},
		{"lists of what is in the images", r.writeSBOMs},
		{"bundle", r.writeBundle},
		{"notes", r.writeNotes},
		{"checksums", r.writeSums},
	} {
		fmt.Printf("writing the %s\n", step.what)
		if err := step.do(); err != nil {
			return fmt.Errorf("write the %s: %w", step.what, err)
		}
	}
	if err := os.Rename(r.out, place); err != nil {
		return err
	}
	fmt.Printf("%s is written\n", place)
	return nil
}
