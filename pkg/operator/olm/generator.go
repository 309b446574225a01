package olm

import (
	"flag"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/pkg/version"
)

// Generator is the name by which KubeVirt's HyperConverged Cluster Operator (HCO) runs the program of the operator's image to build its own
// ClusterServiceVersion.
const Generator = "csv-generator"

// imageFlags are the variables of the operator's environment that flags set. The last three are not upstream's.
var imageFlags = map[string]string{
	"provisioner-image-name":              "PROVISIONER_IMAGE",
	"csi-driver-image-name":               "CSI_PROVISIONER_IMAGE",
	"csi-node-driver-image-name":          "NODE_DRIVER_REG_IMAGE",
	"csi-liveness-probe-image-name":       "LIVENESS_PROBE_IMAGE",
	"csi-external-provisioner-image-name": "CSI_SIG_STORAGE_PROVISIONER_IMAGE",
	"csi-snapshotter-image-name":          "CSI_SNAPSHOT_IMAGE",
	"csi-resizer-image-name":              "CSI_RESIZER_IMAGE",
	"csi-health-monitor-image-name":       "CSI_HEALTH_MONITOR_IMAGE",
	"mounter-image-name":                  "MOUNTER_IMAGE",
}

// Generate writes a ClusterServiceVersion for the flags of upstream's csv-generator, and what else they ask for, as YAML documents.
// https://github.com/kubevirt/hostpath-provisioner-operator/blob/v0.25.2/tools/csv-generator.go
func Generate(arguments []string, to io.Writer) error {
	o, files, err := parse(arguments)
	if err != nil {
		return err
	}
	csv, err := o.clusterServiceVersion()
	if err != nil {
		return err
	}
	objects := []any{csv}
	for _, file := range files {
		found, err := render.Documents[unstructured.Unstructured](file)
		if err != nil {
			return err
		}
		for i := range found {
			if found[i].GetKind() == "NetworkPolicy" {
				found[i].SetNamespace(o.Namespace)
			}
			objects = append(objects, &found[i])
		}
	}
	return render.Write(to, objects)
}

// parse answers the files of deploy/ that are asked for too.
func parse(arguments []string) (o Options, files []string, err error) {
	o.Images = map[string]string{}
	flags := flag.NewFlagSet(Generator, flag.ContinueOnError)
	flags.StringVar(&o.Version, "csv-version", "", "version of the ClusterServiceVersion, such as 1.2.3")
	flags.StringVar(&o.Replaces, "replaces-csv-version", "", "name of the ClusterServiceVersion that it replaces")
	flags.StringVar(&o.Namespace, "namespace", "", "namespace of the objects")
	flags.StringVar(&o.PullPolicy, "pull-policy", "", "imagePullPolicy of the operator")
	flags.StringVar(&o.Icon, "logo-base64", "", "icon, a PNG in Base64")
	flags.StringVar(&o.Verbosity, "verbosity", "", "--v of what the operator deploys")
	flags.StringVar(&o.Image, "operator-image-name", version.Images()+Name+":"+version.Of(), "image of the operator")
	for name, variable := range imageFlags {
		flags.Func(name, variable+" of the operator", func(image string) error {
			o.Images[variable] = image
			return nil
		})
	}
	crds := flags.Bool("dump-crds", false, "write the CustomResourceDefinitions too")
	policies := flags.Bool("dump-network-policies", false, "write the NetworkPolicies too")
	if err := flags.Parse(arguments); err != nil {
		return o, nil, err
	}
	if flags.NArg() > 0 {
		return o, nil, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *crds {
		for _, definition := range definitions {
			files = append(files, "operator/"+definition)
		}
	}
	if *policies {
		files = append(files, "operator/networkpolicy.yaml", "operator/webhook/networkpolicy.yaml")
	}
	return o, files, nil
}
