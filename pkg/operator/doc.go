// Package operator deploys the CSI driver for a HostPathProvisioner object, and keeps it deployed.
//
// Rendering is a pure function: of the object and of what is known of the cluster it makes the objects that there should
// be. They are the manifests of deploy/, with pools, images, placement and names changed by typed code. Applying is one
// generic step for all kinds: server-side apply with one field manager for what differs, and removal of what carries
// the operator's labels and is not wanted any more. What the status says is computed from what is observed then.
package operator
