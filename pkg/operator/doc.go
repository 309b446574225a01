// Package operator deploys the CSI driver for a HostPathProvisioner object, and keeps it deployed.
//
// Rendering (package render) is a pure function: of the object and of what is known of the cluster it makes the objects
// that there should be. Package apply writes what differs, and removes what is not wanted any more. Package status
// computes what the status says from what is observed then. This package reads the cluster, calls the three, and
// unmounts the pools of mounters that are not wanted any more.
package operator
