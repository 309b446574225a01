// Package v1beta1 has the API of the operator: HostPathProvisioner, of which a cluster has one. It says which storage
// pools the nodes have, and reports in its status whether they serve.
//
// Names, JSON keys and meanings are those of the operator that KubeVirt's users run today, so that its stored objects are
// read as they are. Everything added here is optional.
//
// +kubebuilder:object:generate=true
// +groupName=hostpathprovisioner.kubevirt.io
package v1beta1
