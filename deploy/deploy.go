// Package deploy has the manifests that users apply, for the programs that apply them too: there is no second copy.
package deploy

import "embed"

// Files are the manifests of the driver, of the pre-CSI provisioner, of their monitoring and of the operator, by their paths in this directory.
//
//go:embed csi/base/*.yaml csi/openshift/*.yaml csi/snapshots/*.yaml csi/freeze/*.yaml provisioner/base/*.yaml provisioner/openshift/*.yaml monitoring/*.yaml operator/*.yaml operator/example/plain.yaml operator/example/volumemove.yaml operator/monitoring/*.yaml operator/mounter/*.yaml operator/restores/*.yaml operator/webhook/*.yaml
var Files embed.FS
