// Package oldcsi is a client of CSI v1.12, for drivers of v1.13. Both versions have one import path, and
// register the same names: so this one has, instead of generated types, the descriptor of which v1.12.0
// generates them, and lets package dynamicpb do what they do.
package oldcsi

import (
	"bytes"
	"compress/gzip"
	"context"
	_ "embed"
	"fmt"
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	// The types that its messages have fields of.
	_ "google.golang.org/protobuf/types/known/timestamppb"
	_ "google.golang.org/protobuf/types/known/wrapperspb"
)

// descriptor is File_csi_proto of github.com/container-storage-interface/spec v1.12.0, lib/go/csi, as a
// FileDescriptorProto.
//
//go:embed csi-v1.12.0.pb.gz
var descriptor []byte

// file is what the descriptor describes.
var file = sync.OnceValue(func() *protoregistry.Files {
	unpacked, err := gzip.NewReader(bytes.NewReader(descriptor))
	check(err)
	encoded, err := io.ReadAll(unpacked)
	check(err)
	described := &descriptorpb.FileDescriptorProto{}
	check(proto.Unmarshal(encoded, described))
	csi, err := protodesc.NewFile(described, protoregistry.GlobalFiles)
	check(err)
	files := &protoregistry.Files{}
	check(files.RegisterFile(csi))
	return files
})

func find[T protoreflect.Descriptor](name protoreflect.FullName) T {
	found, err := file().FindDescriptorByName(name)
	check(err)
	return found.(T)
}

// check is for what depends on the descriptor alone.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

// Call makes a call such as "Node", "NodeGetVolumeStats". The request is in the text format of protobuf.
func Call(ctx context.Context, driver grpc.ClientConnInterface, service, method, request string) (proto.Message, error) {
	of := find[protoreflect.ServiceDescriptor](protoreflect.FullName("csi.v1." + service)).Methods().ByName(protoreflect.Name(method))
	in, out := dynamicpb.NewMessage(of.Input()), dynamicpb.NewMessage(of.Output())
	if err := prototext.Unmarshal([]byte(request), in); err != nil {
		return nil, fmt.Errorf("%s: %w", method, err)
	}
	return out, driver.Invoke(ctx, "/csi.v1."+service+"/"+method, in, out)
}

// Capabilities are the names of those that a call has returned, as far as v1.12 knows them.
func Capabilities(response proto.Message) (names []string) {
	m := response.ProtoReflect()
	all := m.Get(m.Descriptor().Fields().ByName("capabilities")).List()
	for i := range all.Len() {
		rpc := get(all.Get(i).Message(), "rpc").Message()
		kind := rpc.Descriptor().Fields().ByName("type")
		if value := kind.Enum().Values().ByNumber(rpc.Get(kind).Enum()); value != nil {
			names = append(names, string(value.Name()))
		}
	}
	return names
}

func get(m protoreflect.Message, field protoreflect.Name) protoreflect.Value {
	return m.Get(m.Descriptor().Fields().ByName(field))
}

// A VolumeCondition has the methods of the generated type: that of nil is in order.
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
// NodeGetVolumeStats, whichever version has decoded them; nil without one.
func Condition(m proto.Message) *VolumeCondition {
	if !m.ProtoReflect().IsValid() {
		return nil
	}
	encoded, err := proto.Marshal(m)
	check(err)
	old := dynamicpb.NewMessage(find[protoreflect.MessageDescriptor](m.ProtoReflect().Descriptor().FullName()))
	check(proto.Unmarshal(encoded, old))
	field := old.Descriptor().Fields().ByName("volume_condition")
	if !old.Has(field) {
		return nil
	}
	c := old.Get(field).Message()
	return &VolumeCondition{Abnormal: get(c, "abnormal").Bool(), Message: get(c, "message").String()}
}

// List adds a page of ListVolumes, with the conditions by the volumes' ids, and returns the token of the next page.
func List(ctx context.Context, driver grpc.ClientConnInterface, token string, found map[string]*VolumeCondition) (next string, err error) {
	page, err := Call(ctx, driver, "Controller", "ListVolumes", fmt.Sprintf("starting_token: %q", token))
	if err != nil {
		return "", err
	}
	entries := get(page.ProtoReflect(), "entries").List()
	for i := range entries.Len() {
		entry := entries.Get(i).Message()
		found[get(get(entry, "volume").Message(), "volume_id").String()] = Condition(get(entry, "status").Message().Interface())
	}
	return get(page.ProtoReflect(), "next_token").String(), nil
}

// Status is the field status of an answer to ControllerGetVolume.
func Status(response proto.Message) proto.Message {
	return get(response.ProtoReflect(), "status").Message().Interface()
}
