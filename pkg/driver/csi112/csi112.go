// Package csi112 has what CSI v1.12 had and v1.13 removed: VolumeCondition. The generated types
// of v1.13 know neither the message nor the capabilities, so this package encodes them. Clients of
// v1.12 get the bytes that they always got, and those of v1.13 skip a field that they do not know.
//
// It can go, with its callers and test/oldcsi, once no external-health-monitor up to v0.18 is
// supported: that one exits without the capability of the controller.
package csi112

import (
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// The capabilities VOLUME_CONDITION. The numbers are reserved in v1.13.
const (
	ControllerVolumeCondition csi.ControllerServiceCapability_RPC_Type = 11
	NodeVolumeCondition       csi.NodeServiceCapability_RPC_Type       = 4
)

// The numbers of the fields: volume_condition of the VolumeStatus of ListVolumes and
// ControllerGetVolume and of NodeGetVolumeStatsResponse, and those of VolumeCondition.
const (
	conditionField protowire.Number = 2
	abnormalField  protowire.Number = 1
	messageField   protowire.Number = 2
)

// AddCondition adds a VolumeCondition to a message that had one in v1.12.
func AddCondition(m proto.Message, abnormal bool, message string) {
	var condition []byte
	if abnormal {
		condition = protowire.AppendTag(condition, abnormalField, protowire.VarintType)
		condition = protowire.AppendVarint(condition, protowire.EncodeBool(true))
	}
	if message != "" {
		condition = protowire.AppendTag(condition, messageField, protowire.BytesType)
		// Clients refuse a string that is no UTF-8, as a path in a message may not be.
		condition = protowire.AppendString(condition, strings.ToValidUTF8(message, "\uFFFD"))
	}
	to := m.ProtoReflect()
	fields := protowire.AppendTag(to.GetUnknown(), conditionField, protowire.BytesType)
	to.SetUnknown(protowire.AppendBytes(fields, condition))
}
