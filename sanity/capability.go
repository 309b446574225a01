package sanity

import (
	"context"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

// A capability is the service that advertises it and its name in the CSI spec.
type capability string

// advertised is all that the driver can do. A capability that is lost would turn
// its specs into skips, so it is missed here; a new one is added here.
var advertised = []capability{
	"plugin CONTROLLER_SERVICE",
	"plugin VOLUME_ACCESSIBILITY_CONSTRAINTS",
	"plugin expansion ONLINE",
	"controller CLONE_VOLUME",
	"controller CREATE_DELETE_SNAPSHOT",
	"controller CREATE_DELETE_VOLUME",
	"controller GET_CAPACITY",
	"controller GET_SNAPSHOT",
	"controller GET_VOLUME",
	"controller LIST_SNAPSHOTS",
	"controller LIST_VOLUMES",
	"controller SINGLE_NODE_MULTI_WRITER",
	"controller VOLUME_CONDITION",
	"node EXPAND_VOLUME",
	"node GET_VOLUME_STATS",
	"node SINGLE_NODE_MULTI_WRITER",
	"node VOLUME_CONDITION",
}

// skipReasons are csi-sanity's words for a capability that it did not find. It
// has others for a configuration that lacks something, and those are mistakes of
// this package.
var skipReasons = map[string]capability{
	"Controller Publish, UnpublishVolume not supported":           "controller PUBLISH_UNPUBLISH_VOLUME",
	"Controller Service not provided: CreateVolume not supported": "plugin CONTROLLER_SERVICE",
	"ControllerExpandVolume not supported":                        "controller EXPAND_VOLUME",
	"ControllerModifyVolume not supported":                        "controller MODIFY_VOLUME",
	"ControllerPublishVolume not supported":                       "controller PUBLISH_UNPUBLISH_VOLUME",
	"ControllerPublishVolume.readonly field not supported":        "controller PUBLISH_READONLY",
	"ControllerUnpublishVolume not supported":                     "controller PUBLISH_UNPUBLISH_VOLUME",
	"CreateSnapshot not supported":                                "controller CREATE_DELETE_SNAPSHOT",
	"CreateVolume not supported":                                  "controller CREATE_DELETE_VOLUME",
	"DeleteSnapshot not supported":                                "controller CREATE_DELETE_SNAPSHOT",
	"DeleteVolume not supported":                                  "controller CREATE_DELETE_VOLUME",
	"GetCapacity not supported":                                   "controller GET_CAPACITY",
	"GetSnapshot not supported":                                   "controller GET_SNAPSHOT",
	"GroupControllerService not supported":                        "plugin GROUP_CONTROLLER_SERVICE",
	"ListSnapshots not supported":                                 "controller LIST_SNAPSHOTS",
	"ListVolumes not supported":                                   "controller LIST_VOLUMES",
	"Modify Volume not supported":                                 "controller MODIFY_VOLUME",
	"Modify volume not supported":                                 "controller MODIFY_VOLUME",
	"NodeExpandVolume not supported":                              "node EXPAND_VOLUME",
	"NodeGetVolume not supported":                                 "node GET_VOLUME_STATS",
	"NodeStageVolume not supported":                               "node STAGE_UNSTAGE_VOLUME",
	"NodeUnstageVolume not supported":                             "node STAGE_UNSTAGE_VOLUME",
	"Service does not have single node multi writer capability":   "node SINGLE_NODE_MULTI_WRITER",
	"Snapshot not supported":                                      "controller CREATE_DELETE_SNAPSHOT",
	"Volume Cloning not supported":                                "controller CLONE_VOLUME",
}

// missingFor returns the capability for whose absence a spec was skipped.
func missingFor(s spec) (capability, error) {
	needed, known := skipReasons[s.message]
	switch {
	case !known:
		return "", fmt.Errorf("skipped for a reason that is no capability: %q", s.message)
	case slices.Contains(advertised, needed):
		return "", fmt.Errorf("skipped for want of %s, which is advertised", needed)
	}
	return needed, nil
}

// capabilities asks the driver what it advertises.
func capabilities(ctx context.Context, conn grpc.ClientConnInterface) ([]capability, error) {
	plugin, err := csi.NewIdentityClient(conn).GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask for the plugin's capabilities: %w", err)
	}
	controller, err := csi.NewControllerClient(conn).ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask for the controller's capabilities: %w", err)
	}
	node, err := csi.NewNodeClient(conn).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return nil, fmt.Errorf("ask for the node's capabilities: %w", err)
	}
	var all []capability
	for _, c := range plugin.GetCapabilities() {
		if c.GetService() != nil {
			all = append(all, capability("plugin "+c.GetService().GetType().String()))
		} else {
			all = append(all, capability("plugin expansion "+c.GetVolumeExpansion().GetType().String()))
		}
	}
	for _, c := range controller.GetCapabilities() {
		all = append(all, capability("controller "+c.GetRpc().GetType().String()))
	}
	for _, c := range node.GetCapabilities() {
		all = append(all, capability("node "+c.GetRpc().GetType().String()))
	}
	slices.Sort(all)
	return all, nil
}
