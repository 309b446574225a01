package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// A document is one file that users apply.
type document struct {
	name string
	// says what it installs, and with is what else is applied with it.
	says, with string
	resources  []string
	components []string
	// kind leaves out objects of all others, if it is not empty.
	kind string
}

// namespace is in a file of its own. Claims of the operator's pools are in it, and `kubectl delete -f` of another file must not remove
// them.
const namespace = "namespace.yaml"

// documents are in the order in which a reader looks for them.
var documents = []document{
	{name: namespace, says: "the namespace of the driver and of the operator", resources: []string{"csi/namespace"}},
	{name: "hostpath-csi-driver.yaml", says: "the CSI driver and its StorageClass", with: namespace, resources: []string{"csi"}},
	{
		name: "hostpath-csi-driver-snapshots.yaml", says: "the CSI driver, with snapshots", with: namespace,
		resources: []string{"csi"}, components: []string{"csi/snapshots"},
	},
	{name: "hostpath-csi-driver-openshift.yaml", says: "the CSI driver on OpenShift", with: namespace, resources: []string{"csi/openshift"}},
	{
		name: "hostpath-csi-driver-openshift-snapshots.yaml", says: "the CSI driver on OpenShift, with snapshots", with: namespace,
		resources: []string{"csi/openshift"}, components: []string{"csi/snapshots"},
	},
	{name: "hostpath-provisioner-operator.yaml", says: "the operator", with: namespace, resources: []string{"operator"}},
	{
		name: "definitions.yaml", says: "the definitions of the operator's kinds alone", resources: []string{"operator"},
		kind: "CustomResourceDefinition",
	},
	{name: "hostpathprovisioner.yaml", says: "a pool for the operator, and a StorageClass", resources: []string{"operator/example"}},
	{
		name: "hostpathprovisioner-snapshots.yaml", says: "a pool for the operator, with snapshots, and its classes",
		resources: []string{"operator/example"}, components: []string{"operator/example/snapshots"},
	},
	{name: "example.yaml", says: "a claim of the CSI driver, and a pod that writes to it", resources: []string{"csi/example"}},
	{name: "hostpath-provisioner.yaml", says: "the provisioner from before CSI", resources: []string{"provisioner"}},
	{name: "hostpath-provisioner-openshift.yaml", says: "the provisioner from before CSI on OpenShift", resources: []string{"provisioner/openshift"}},
	{name: "single-node.yaml", says: "the provisioner for one node, and the default StorageClass", resources: []string{"single-node"}},
	{
		name: "single-node-openshift.yaml", says: "the provisioner for one node on OpenShift, and the default StorageClass",
		resources: []string{"single-node/openshift"},
	},
	{name: "local-pv-provisioner.yaml", says: "PersistentVolumes from whole devices", resources: []string{"devices"}},
	{name: "local-pv-provisioner-openshift.yaml", says: "PersistentVolumes from whole devices on OpenShift", resources: []string{"devices/openshift"}},
	{name: "monitoring.yaml", says: "alerts and a dashboard for the CSI driver", resources: []string{"monitoring"}},
	{name: "monitoring-devices.yaml", says: "alerts for PersistentVolumes from whole devices", resources: []string{"devices/monitoring"}},
}

// programs have an image each.
var programs = []string{
	"hostpath-csi-driver", "hostpath-provisioner", "hostpath-provisioner-operator", "local-pv-provisioner", "pool-mounter",
}

// builtPrefix begins the names of the project's images in deploy/.
const builtPrefix = "ghcr.io/kubevirt/hostpath-provisioner/"

// home is the repository that deploy/ names.
const home = "https://github.com/kubevirt/hostpath-provisioner"

func (r release) writeManifests() error {
	files, err := manifests(filepath.Join(r.root, "deploy"), r.repository)
	if err != nil {
		return err
	}
	for _, d := range documents {
		text, err := r.render(files, d)
		if err != nil {
			return fmt.Errorf("%s: %w", d.name, err)
		}
		if err := os.WriteFile(filepath.Join(r.out, d.name), append([]byte(r.header(d)), text...), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// manifests has deploy/ in memory, with the repository of the release. Kustomizations of the release's own can be laid beside it there.
func manifests(dir, repository string) (filesys.FileSystem, error) {
	files := filesys.MakeFsInMemory()
	deploy := os.DirFS(dir)
	return files, fs.WalkDir(deploy, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(deploy, name)
		if err != nil {
			return err
		}
		return files.WriteFile(path.Join("/deploy", name), bytes.ReplaceAll(text, []byte(home), []byte(repository)))
	})
}

// render makes the objects of a document.
func (r release) render(files filesys.FileSystem, d document) ([]byte, error) {
	dir := path.Join("/release", d.name)
	if err := files.WriteFile(path.Join(dir, "kustomization.yaml"), []byte(r.kustomization(d))); err != nil {
		return nil, err
	}
	objects, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(files, dir)
	if err != nil {
		return nil, err
	}
	for _, o := range objects.Resources() {
		if d.kind != "" && o.GetKind() != d.kind {
			if err := objects.Remove(o.CurId()); err != nil {
				return nil, err
			}
		}
	}
	text, err := objects.AsYaml()
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(text) {
		_, after, ok := bytes.Cut(line, []byte("image: "))
		image := string(bytes.TrimSpace(after))
		released := strings.HasPrefix(image, r.images) && strings.HasSuffix(image, ":"+r.version)
		if ok && strings.HasPrefix(image, builtPrefix) && !released {
			return nil, fmt.Errorf("it has the image %s, which is not of this release", image)
		}
	}
	return text, nil
}

func (r release) kustomization(d document) string {
	var text strings.Builder
	list := func(key string, dirs []string) {
		if len(dirs) == 0 {
			return
		}
		fmt.Fprintf(&text, "%s:\n", key)
		for _, dir := range dirs {
			fmt.Fprintf(&text, "- ../../deploy/%s\n", dir)
		}
	}
	list("resources", d.resources)
	list("components", d.components)
	text.WriteString("images:\n")
	for _, program := range programs {
		fmt.Fprintf(&text, "- name: %s%s\n  newName: %s%s\n  newTag: %s\n", builtPrefix, program, r.images, program, r.version)
	}
	return text.String()
}

func (r release) header(d document) string {
	apply := "-f " + d.name
	if d.with != "" {
		apply = "-f " + d.with + " " + apply
	}
	return fmt.Sprintf("# hostpath-provisioner %s: %s\n#\n#   kubectl apply %s\n", r.version, d.says, apply)
}
