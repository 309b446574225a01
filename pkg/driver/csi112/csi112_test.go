package csi112_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"kubevirt.io/hostpath-provisioner/pkg/driver/csi112"
)

// The bytes are those that protoc's encoder makes of the messages of CSI v1.12.
func TestAddCondition(t *testing.T) {
	for name, c := range map[string]struct {
		abnormal bool
		message  string
		want     string
	}{
		"in order, without a message": {want: "\x12\x00"},
		"in order":                    {message: "in order", want: "\x12\x0a\x12\x08in order"},
		"abnormal":                    {abnormal: true, message: "full", want: "\x12\x08\x08\x01\x12\x04full"},
		"a message that is no UTF-8":  {message: "a\xffb", want: "\x12\x07\x12\x05a\uFFFDb"},
	} {
		t.Run(name, func(t *testing.T) {
			for of, m := range map[string]proto.Message{
				"ListVolumes":         &csi.ListVolumesResponse_VolumeStatus{},
				"ControllerGetVolume": &csi.ControllerGetVolumeResponse_VolumeStatus{},
				"NodeGetVolumeStats":  &csi.NodeGetVolumeStatsResponse{},
			} {
				csi112.AddCondition(m, c.abnormal, c.message)
				got, err := proto.Marshal(m)
				if err != nil || string(got) != c.want {
					t.Errorf("%s has %q, %v, want %q", of, got, err, c.want)
				}
			}
		})
	}
}

func TestConditionIsBesideFieldsOfNewTypes(t *testing.T) {
	m := &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: []string{"n"}}
	csi112.AddCondition(m, true, "")
	got, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if want := "\x0a\x01n\x12\x02\x08\x01"; err != nil || string(got) != want {
		t.Errorf("the message is %q, %v, want %q", got, err, want)
	}
}
