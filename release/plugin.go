package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

const (
	plugin   = "kubectl-hostpath"
	krewName = "hostpath.yaml"
)

// A platform is one on which people run kubectl, and not only nodes.
type platform struct{ os, arch string }

var platforms = []platform{{"darwin", "amd64"}, {"darwin", "arm64"}, {"linux", "amd64"}, {"linux", "arm64"}, {"windows", "amd64"}, {"windows", "arm64"}}

func (p platform) program() string {
	if p.os == "windows" {
		return plugin + ".exe"
	}
	return plugin
}

// writePlugin packs the plugin for each platform, and writes the manifest by which krew installs it
// (https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest).
func (r release) writePlugin() error {
	licence, err := os.ReadFile(filepath.Join(r.root, "LICENSE"))
	if err != nil {
		return err
	}
	var manifest strings.Builder
	fmt.Fprintf(&manifest, `apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: hostpath
spec:
  version: %s
  homepage: %s
  shortDescription: Shows the pools and volumes of the hostpath CSI driver
  description: |
    Shows the storage of all nodes that the hostpath CSI driver serves: pools with their sizes and promises, volumes with
    their claims, and what is wrong. It asks the API server, and the drivers by kubectl exec.
  platforms:
`, r.version, r.repository)
	for _, p := range platforms {
		built, err := os.ReadFile(filepath.Join(r.root, "bin", "plugin", p.os+"_"+p.arch, p.program()))
		if err != nil {
			return err
		}
		name := fmt.Sprintf("%s-%s-%s-%s.tar.gz", plugin, r.version, p.os, p.arch)
		var packed bytes.Buffer
		if err := r.packed(&packed, []file{{name: "LICENSE", mode: 0o644, data: licence}, {name: p.program(), mode: 0o755, data: built}}); err != nil {
			return err
		}
		fmt.Fprintf(&manifest, `  - selector:
      matchLabels:
        os: %s
        arch: %s
    uri: %s/releases/download/%s/%s
    sha256: %x
    bin: %s
`, p.os, p.arch, r.repository, r.version, name, sha256.Sum256(packed.Bytes()), p.program())
		if err := r.writeTo(name, func(w io.Writer) error { _, err := packed.WriteTo(w); return err }); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(r.out, krewName), []byte(manifest.String()), 0o644)
}
