// Package driver speaks CSI v1.13: it takes requests apart, has pkg/pool decide,
// and puts answers together. It is the only package that knows gRPC. Every handler
// has one shape: parse, lock the volume, one call, answer. What all of them need
// (recovering from a panic, a deadline, measuring, logging, error codes) is around
// them once, in server.go and status.go.
package driver

import (
	"fmt"
	"regexp"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/trace"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// DefaultName is the name that the users of the upstream KubeVirt driver have in their
// StorageClasses and PersistentVolumes.
const DefaultName = "kubevirt.io.hostpath-provisioner"

// driverName is the form that the CSI specification gives to the name of a plugin
// (GetPluginInfoResponse.name).
var driverName = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]{0,61}[a-zA-Z0-9])?$`)

// CheckName returns what is wrong with a driver's name.
func CheckName(name string) error {
	if !driverName.MatchString(name) {
		return fmt.Errorf("%q is not a name of 1 to 63 letters, digits, dots and hyphens, such as %s", name, DefaultName)
	}
	return nil
}

// The names that requests and answers carry. All but the last are those
// of the upstream KubeVirt driver.
const (
	topologyKey  = "topology.hostpath.csi/node"
	poolKey      = "storagePool"
	sizeKey      = "size"
	ephemeralKey = "csi.storage.k8s.io/ephemeral"
	// enforcedKey is ours: it reports whether the kernel enforces the volume's size.
	enforcedKey = "sizeEnforced"
)

// Config is what the driver says of itself.
type Config struct {
	Name    string
	Version string
	Node    volume.NodeID
	// CallLimit bounds calls that bring no deadline of their own; 2 minutes if 0.
	CallLimit time.Duration
	// Tracer records the calls; nil for none.
	Tracer *trace.Tracer
}
