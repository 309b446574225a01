package driver

import (
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", volume.ErrInvalid, fmt.Sprintf(format, args...))
}

// An access is a volume capability, parsed.
type access struct {
	mode         volume.Mode
	readOnly     bool
	singleTarget bool // SINGLE_NODE_SINGLE_WRITER
	multiNode    bool
	flags        bind.Flags
}

// checkComplete reports capabilities that lack what the specification requires of them.
func checkComplete(capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return invalid("the volume capabilities are missing")
	}
	for _, capability := range capabilities {
		switch {
		case capability == nil:
			return invalid("the volume capability is missing")
		case capability.GetBlock() == nil && capability.GetMount() == nil:
			return invalid("the volume capability has no access type")
		case capability.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN:
			return invalid("the volume capability has no access mode, or UNKNOWN")
		}
	}
	return nil
}

func parseAccess(capability *csi.VolumeCapability) (access, error) {
	if err := checkComplete([]*csi.VolumeCapability{capability}); err != nil {
		return access{}, err
	}
	a, err := parseMode(capability.GetAccessMode().GetMode())
	if err != nil {
		return access{}, err
	}
	a.mode = parseType(capability)
	flags, err := bind.ParseFlags(capability.GetMount().GetMountFlags())
	if err != nil {
		return access{}, invalid("%v", err)
	}
	a.flags = flags
	return a, nil
}

// parseType is how a capability uses a volume; empty for no capability.
func parseType(capability *csi.VolumeCapability) volume.Mode {
	switch {
	case capability.GetBlock() != nil:
		return volume.ModeBlock
	case capability.GetMount() != nil:
		return volume.ModeMount
	}
	return ""
}

func parseMode(mode csi.VolumeCapability_AccessMode_Mode) (access, error) {
	switch mode {
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:
		return access{}, nil
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER:
		return access{singleTarget: true}, nil
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
		return access{readOnly: true}, nil
	case csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		return access{readOnly: true, multiNode: true}, nil
	case csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:
		return access{multiNode: true}, nil
	}
	return access{}, invalid("the access mode %s is not supported", mode)
}

// parseAccesses is what all capabilities of a new volume ask for together.
func parseAccesses(capabilities []*csi.VolumeCapability) (access, error) {
	if err := checkComplete(capabilities); err != nil {
		return access{}, err
	}
	var all access
	for _, capability := range capabilities {
		a, err := parseAccess(capability)
		if err != nil {
			return access{}, err
		}
		if all.mode != "" && all.mode != a.mode {
			return access{}, invalid("the capabilities ask for a block device and for a mount; a volume is one of them")
		}
		all.mode = a.mode
		all.multiNode = all.multiNode || a.multiNode
	}
	return all, nil
}

// parsePool reads the pool from StorageClass parameters or a volume context.
// Unknown keys are ignored, since existing classes may have any; one that is
// ours but for upper and lower case would choose the wrong pool unseen.
func parsePool(parameters map[string]string) (volume.PoolName, error) {
	for key := range parameters {
		if key != poolKey && strings.EqualFold(key, poolKey) {
			return volume.PoolName{}, invalid("the parameter %q is unknown, it is spelled %q", key, poolKey)
		}
	}
	name, ok := parameters[poolKey]
	if !ok || name == "" {
		return volume.PoolName{}, nil
	}
	return volume.ParsePoolName(name)
}

func parseRange(r *csi.CapacityRange) volume.Range {
	return volume.Range{Required: r.GetRequiredBytes(), Limit: r.GetLimitBytes()}
}

// parseTarget takes the path of a request, whose field is named in errors.
func parseTarget(field, path string) (bind.Target, error) {
	if path == "" {
		return bind.Target{}, invalid("the %s is empty", field)
	}
	target, err := bind.ParseTarget(path)
	if err != nil {
		return bind.Target{}, invalid("the %s: %v", field, err)
	}
	return target, nil
}

// includes reports whether topologies allow this node: there are none, or one of
// them is its segment.
func (c Config) includes(topologies []*csi.Topology) bool {
	for _, topology := range topologies {
		if topology.GetSegments()[topologyKey] == c.Node.String() {
			return true
		}
	}
	return len(topologies) == 0
}

// meets reports whether what is made on this node can be reached as required. What is preferred counts only
// where nothing is requisite.
func (c Config) meets(required *csi.TopologyRequirement) bool {
	if requisite := required.GetRequisite(); len(requisite) > 0 {
		return c.includes(requisite)
	}
	return c.includes(required.GetPreferred())
}

// topology is where a volume can be reached: from this node, or, for a shared
// pool, from anywhere.
func (c Config) topology(shared bool) []*csi.Topology {
	if shared {
		return nil
	}
	return []*csi.Topology{{Segments: map[string]string{topologyKey: c.Node.String()}}}
}
