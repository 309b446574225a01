package driver_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// kept is a volume that is always there, and published.
const kept = "kept"

// FuzzCall sends requests of any content to a driver whose pools are real.
func FuzzCall(f *testing.F) {
	methods := allMethods(f)
	target := "/" + kept
	for _, request := range []proto.Message{
		createRequest("new", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"storagePool": "other"} }),
		createRequest("new", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities = []*csi.VolumeCapability{block()}
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 1, LimitBytes: 8 * mib}
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{onNode(nodeName)}}
		}),
		createRequest("new", func(r *csi.CreateVolumeRequest) {
			r.CapacityRange.RequiredBytes = -1
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
				Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: kept},
			}}
		}),
		&csi.DeleteVolumeRequest{VolumeId: kept},
		&csi.ListVolumesRequest{MaxEntries: 1, StartingToken: "after:" + kept},
		&csi.GetCapacityRequest{Parameters: map[string]string{"storagePool": "local"}, AccessibleTopology: onNode(nodeName)},
		&csi.ControllerGetVolumeRequest{VolumeId: kept},
		&csi.ValidateVolumeCapabilitiesRequest{VolumeId: kept, VolumeCapabilities: []*csi.VolumeCapability{writer("ro")}},
		publishRequest(kept, target),
		publishRequest(kept, "/two", func(r *csi.NodePublishVolumeRequest) {
			r.Readonly = true
			r.VolumeContext = map[string]string{"csi.storage.k8s.io/pod.uid": "1"}
		}),
		publishRequest("csi-new", "/inline", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": "1Mi", "storagePool": "local"}
		}),
		unpublishRequest(kept, target),
		&csi.NodeGetVolumeStatsRequest{VolumeId: kept, VolumePath: target},
		&csi.NodeExpandVolumeRequest{VolumeId: kept, VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 5 * mib}},
	} {
		content := must.Value(proto.Marshal(request))(f)
		for i, m := range methods {
			if m.in == request.ProtoReflect().Descriptor() {
				f.Add(byte(i), content)
			}
		}
	}
	for i := range methods {
		f.Add(byte(i), []byte(nil))
	}

	h := newHarness(f, setup{pools: severalPool})
	canary := filepath.Join(h.dir, "canary")
	must.Succeed(f, os.WriteFile(canary, []byte("canary"), 0o640))
	restore(f, h)
	f.Fuzz(func(t *testing.T, which byte, content []byte) {
		m := methods[int(which)%len(methods)]
		request := m.newRequest(t, content)
		if request == nil || !confine(request.ProtoReflect(), h.pods) {
			return // no request
		}
		response := m.newResponse(t)
		err := h.connection.Invoke(t.Context(), m.path, request, response)
		wantAnswer(t, m.path, err)
		if err == nil {
			wantTrue(t, h, request, response)
			restore(t, h)
		}
		if _, panicked := h.calls.seen(); len(panicked) > 0 {
			t.Errorf("%s panicked with %v", m.path, request)
		}
		if got, err := os.ReadFile(canary); err != nil || string(got) != "canary" {
			t.Errorf("%s of %v changed what is outside the pools: %q, %v", m.path, request, got, err)
		}
		if names, err := filepath.Glob(filepath.Join(h.dir, "*")); err != nil || len(names) != len([]string{"away", "canary", "dev", "everywhere", "local", "other", "pods"}) {
			t.Errorf("after %s of %v there are %q", m.path, request, names)
		}
	})
}

// wantAnswer expects an error to be one that a caller can act on.
func wantAnswer(t *testing.T, path string, err error) {
	t.Helper()
	answer := status.Convert(err)
	switch answer.Code() {
	case codes.OK:
		return
	case codes.Internal, codes.Unknown, codes.Unavailable, codes.DeadlineExceeded:
		t.Errorf("%s: %v", path, err)
	}
	if m := answer.Message(); m == "" || !utf8.ValidString(m) || strings.ContainsAny(m, "\x00\n\r") {
		t.Errorf("%s answers %s with the words %q", path, answer.Code(), m)
	}
}

// wantTrue expects what was acknowledged to be so, and takes it back.
func wantTrue(t *testing.T, h *harness, request, response proto.Message) {
	t.Helper()
	switch req := request.(type) {
	case *csi.CreateVolumeRequest:
		made := response.(*csi.CreateVolumeResponse).GetVolume()
		asked := req.GetCapacityRange()
		if limit := asked.GetLimitBytes(); made.GetVolumeId() != req.GetName() || made.GetCapacityBytes() < asked.GetRequiredBytes() ||
			limit > 0 && made.GetCapacityBytes() > limit || made.GetCapacityBytes() <= 0 {
			t.Errorf("%v was answered by %v", req, made)
		}
		again := must.Value(h.CreateVolume(t.Context(), req))(t)
		wantEqual(t, "the answer to the repeated call", again, response)
		if seen := h.volume(t, made.GetVolumeId()); seen.GetVolume().GetCapacityBytes() != made.GetCapacityBytes() {
			t.Errorf("%v was made, but there is %v", made, seen)
		}
		if req.GetName() != kept {
			remove(t, h, made.GetVolumeId())
		}
	case *csi.DeleteVolumeRequest:
		if seen := h.volume(t, req.GetVolumeId()); seen != nil && req.GetVolumeId() != "" {
			t.Errorf("%s was deleted, but there is %v", req.GetVolumeId(), seen)
		}
	case *csi.ListVolumesRequest:
		page := response.(*csi.ListVolumesResponse)
		if most := int(req.GetMaxEntries()); most > 0 && len(page.GetEntries()) > most {
			t.Errorf("%v was answered by %d entries", req, len(page.GetEntries()))
		}
	case *csi.NodePublishVolumeRequest:
		must.Succeed(t, must.Err(h.NodePublishVolume(t.Context(), req)))
		if req.GetTargetPath() != h.target(kept) {
			h.unpublish(t, req.GetVolumeId(), req.GetTargetPath())
		}
	}
}

func remove(t *testing.T, h *harness, id string) {
	t.Helper()
	must.Succeed(t, must.Err(h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})))
}

// restore brings back the volume that is always there.
func restore(t testing.TB, h *harness) {
	t.Helper()
	if err := os.MkdirAll(h.pods, 0o750); err != nil {
		t.Fatal(err)
	}
	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error { return must.Err(h.CreateVolume(ctx, createRequest(kept, inLocal))) },
		func(ctx context.Context) error {
			return must.Err(h.NodePublishVolume(ctx, publishRequest(kept, h.target(kept))))
		},
	} {
		must.Succeed(t, call(t.Context()))
	}
}

func inLocal(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"storagePool": "local"} }

// confine puts the paths of a request below a directory, and reports if they stay there:
// that no path leads out of it is not for a test to find out on the machine that it
// runs on, see FuzzParseTarget.
func confine(request protoreflect.Message, below string) bool {
	confined := true
	fields := request.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		if field.Kind() != protoreflect.StringKind || !strings.HasSuffix(string(field.Name()), "_path") {
			continue
		}
		if path := request.Get(field).String(); strings.HasPrefix(path, "/") {
			path = below + path
			confined = confined && strings.HasPrefix(filepath.Clean(path)+"/", below+"/")
			request.Set(field, protoreflect.ValueOfString(path))
		}
	}
	return confined
}

// A method is one of CSI.
type method struct {
	path    string
	in, out protoreflect.MessageDescriptor
}

// allMethods are those of the services that the driver has, in the order of the specification.
func allMethods(t testing.TB) []method {
	t.Helper()
	var all []method
	for _, service := range []protoreflect.FullName{"csi.v1.Identity", "csi.v1.Controller", "csi.v1.Node"} {
		found := must.Value(protoregistry.GlobalFiles.FindDescriptorByName(service))(t)
		methods := found.(protoreflect.ServiceDescriptor).Methods()
		for i := range methods.Len() {
			m := methods.Get(i)
			all = append(all, method{"/" + string(service) + "/" + string(m.Name()), m.Input(), m.Output()})
		}
	}
	return all
}

// newRequest is nil if the content is no message.
func (m method) newRequest(t *testing.T, content []byte) proto.Message {
	t.Helper()
	request := newMessage(t, m.in)
	if err := proto.Unmarshal(content, request); err != nil {
		return nil
	}
	return request
}

func (m method) newResponse(t *testing.T) proto.Message {
	t.Helper()
	return newMessage(t, m.out)
}

func newMessage(t *testing.T, descriptor protoreflect.MessageDescriptor) proto.Message {
	t.Helper()
	kind := must.Value(protoregistry.GlobalTypes.FindMessageByName(descriptor.FullName()))(t)
	return kind.New().Interface()
}
