package olm

import (
	"fmt"
	"maps"
	"slices"

	"sigs.k8s.io/yaml"

	"kubevirt.io/hostpath-provisioner/deploy"
)

// definitions are those of the operator's own kinds.
var definitions = []string{"hostpathprovisioner.kubevirt.io_hostpathprovisioners.yaml", "hostpathprovisioner.kubevirt.io_volumemoves.yaml"}

// annotations are those of a bundle. https://github.com/operator-framework/operator-registry/blob/master/docs/design/operator-bundle.md
var annotations = map[string]string{
	"operators.operatorframework.io.bundle.mediatype.v1":       "registry+v1",
	"operators.operatorframework.io.bundle.manifests.v1":       "manifests/",
	"operators.operatorframework.io.bundle.metadata.v1":        "metadata/",
	"operators.operatorframework.io.bundle.package.v1":         Name,
	"operators.operatorframework.io.bundle.channels.v1":        "stable",
	"operators.operatorframework.io.bundle.channel.default.v1": "stable",
}

// Bundle are the files of a bundle, by their paths.
func (o Options) Bundle() (map[string][]byte, error) {
	csv, err := o.clusterServiceVersion()
	if err != nil {
		return nil, err
	}
	r, err := readRights()
	if err != nil {
		return nil, err
	}
	dockerfile := []byte("FROM scratch\n")
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		dockerfile = fmt.Appendf(dockerfile, "LABEL %s=%s\n", key, annotations[key])
	}
	files := map[string][]byte{
		"bundle.Dockerfile": append(dockerfile, "COPY manifests /manifests/\nCOPY metadata /metadata/\n"...),
	}
	for _, definition := range definitions {
		if files["manifests/"+definition], err = deploy.Files.ReadFile("operator/" + definition); err != nil {
			return nil, err
		}
	}
	for name, object := range map[string]any{
		"manifests/" + Name + ".clusterserviceversion.yaml": csv,
		"manifests/" + r.reader.Name + ".clusterrole.yaml":  r.reader,
		"metadata/annotations.yaml":                         map[string]any{"annotations": annotations},
	} {
		if files[name], err = yaml.Marshal(object); err != nil {
			return nil, err
		}
	}
	return files, nil
}
