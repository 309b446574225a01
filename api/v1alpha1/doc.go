// Package v1alpha1 has VolumeMove, which moves the volume of a claim to another node.
//
// +kubebuilder:object:generate=true
// +groupName=hostpathprovisioner.kubevirt.io
package v1alpha1
