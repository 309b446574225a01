// Package oldcsi reads from messages of CSI v1.13 what only clients of v1.12 know of.
package oldcsi

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// A VolumeCondition has the methods of the generated type of v1.12: that of nil is in order.
type VolumeCondition struct {
	Abnormal bool
	Message  string
}

// GetAbnormal reports whether something is wrong.
func (c *VolumeCondition) GetAbnormal() bool { return c != nil && c.Abnormal }

// GetMessage is what is wrong.
func (c *VolumeCondition) GetMessage() string {
	if c == nil {
		return ""
	}
	return c.Message
}

// Condition is the one in a VolumeStatus of ListVolumes or ControllerGetVolume, or in the answer to
// NodeGetVolumeStats; nil without one.
func Condition(m proto.Message) *VolumeCondition {
	if !m.ProtoReflect().IsValid() {
		return nil
	}
	encoded, ok := field(m.ProtoReflect().GetUnknown(), 2, protowire.BytesType)
	if !ok {
		return nil
	}
	c := &VolumeCondition{}
	if abnormal, ok := field(encoded, 1, protowire.VarintType); ok {
		value, _ := protowire.ConsumeVarint(abnormal)
		c.Abnormal = protowire.DecodeBool(value)
	}
	message, _ := field(encoded, 2, protowire.BytesType)
	c.Message = string(message)
	return c
}

// field is the last value of a field: the content of bytes, and what is encoded of a number.
func field(encoded []byte, wanted protowire.Number, kind protowire.Type) (value []byte, found bool) {
	for len(encoded) > 0 {
		number, is, tag := protowire.ConsumeTag(encoded)
		if tag < 0 {
			return nil, false
		}
		size := protowire.ConsumeFieldValue(number, is, encoded[tag:])
		if size < 0 {
			return nil, false
		}
		if number == wanted && is == kind {
			value, found = encoded[tag:tag+size], true
			if is == protowire.BytesType {
				value, _ = protowire.ConsumeBytes(value)
			}
		}
		encoded = encoded[tag+size:]
	}
	return value, found
}
