package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// writeSBOMs takes over what syft found in the image of each program and architecture, as CycloneDX, with the
// time of the commit instead of that of the search, and without the number that each search has.
func (r release) writeSBOMs() error {
	for _, program := range programs {
		for _, arch := range r.arches {
			sbom, err := r.sbom(filepath.Join(r.root, "bin", "sbom", program+"-linux-"+arch+".json"))
			if err != nil {
				return err
			}
			name := fmt.Sprintf("%s-%s-linux-%s.cdx.json", program, r.version, arch)
			if err := r.writeTo(name, func(w io.Writer) error {
				encoder := json.NewEncoder(w)
				encoder.SetIndent("", " ")
				return encoder.Encode(sbom)
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// A component is what of one is checked. Each package has a package URL (https://github.com/package-url/purl-spec), and those of Debian
// only in an image that says to be of Debian.
type component struct {
	Type string `json:"type"`
	Name string `json:"name"`
	PURL string `json:"purl"`
}

// sbom reads one that lists something.
func (r release) sbom(path string) (map[string]any, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var sbom struct {
		Format     string      `json:"bomFormat"`
		Components []component `json:"components"`
	}
	var all map[string]any
	if err := json.Unmarshal(text, &sbom); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if sbom.Format != "CycloneDX" || len(sbom.Components) == 0 {
		return nil, fmt.Errorf("%s is a %q with %d components, want a CycloneDX with some", path, sbom.Format, len(sbom.Components))
	}
	for _, c := range sbom.Components {
		if c.Type == "library" && c.PURL == "" {
			return nil, fmt.Errorf("%s: %s has no package URL, by which scanners know it", path, c.Name)
		}
	}
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	delete(all, "serialNumber")
	if metadata, ok := all["metadata"].(map[string]any); ok {
		metadata["timestamp"] = r.made.Format(time.RFC3339)
	}
	return all, nil
}

// writeBundle packs the bundle for the Operator Lifecycle Manager.
func (r release) writeBundle() error {
	root := filepath.Join(r.root, "bin", "bundle")
	name := "hostpath-provisioner-operator-bundle-" + r.version
	var files []file
	err := filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		files = append(files, file{name: name + strings.TrimPrefix(path, root), mode: 0o644, data: data})
		return err
	})
	if err != nil {
		return err
	}
	return r.writeTo(name+".tar.gz", func(w io.Writer) error { return r.packed(w, files) })
}
