package driver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

func TestNodeGetInfo(t *testing.T) {
	h := newHarness(t, setup{})
	response := must.Value(h.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}))(t)
	wantEqual(t, "the node", response, &csi.NodeGetInfoResponse{NodeId: nodeName, AccessibleTopology: onNode(nodeName)})
}

// No call takes an id that no volume has, or a path that none is published at.
func TestBadIDsAndPathsAreRefused(t *testing.T) {
	h := newHarness(t, setup{})
	for call, f := range map[string]func(id, path string) error{
		"CreateVolume": func(id, _ string) error { return must.Err(h.CreateVolume(t.Context(), createRequest(id))) },
		"DeleteVolume": func(id, _ string) error {
			return must.Err(h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}))
		},
		"ControllerGetVolume": func(id, _ string) error {
			return must.Err(h.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id}))
		},
		"ControllerGetVolumeHealth": func(id, _ string) error {
			return must.Err(h.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: id}))
		},
		"NodeGetVolumeHealth": func(id, _ string) error {
			return must.Err(h.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: id}))
		},
		"NodePublishVolume": func(id, path string) error {
			return must.Err(h.NodePublishVolume(t.Context(), publishRequest(id, path)))
		},
		"NodeUnpublishVolume": func(id, path string) error {
			return must.Err(h.NodeUnpublishVolume(t.Context(), unpublishRequest(id, path)))
		},
		"NodeGetVolumeStats": func(id, path string) error {
			return must.Err(h.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path}))
		},
	} {
		for name, c := range badIDs {
			t.Run(call+": "+name, func(t *testing.T) { wantCode(t, f(c.id, h.target("vol")), codes.InvalidArgument, c.says) })
		}
		for name, c := range badPaths {
			want := codes.InvalidArgument
			if call == "NodeGetVolumeStats" && c.path != "" && !strings.ContainsRune(c.path, 0) {
				want = codes.NotFound // nothing can be published there, and so not this volume
			} else if !strings.HasSuffix(call, "publishVolume") && !strings.HasSuffix(call, "PublishVolume") && call != "NodeGetVolumeStats" {
				continue
			}
			t.Run(call+": "+name, func(t *testing.T) { wantCode(t, f("vol", c.path), want, c.says) })
		}
	}
}

func TestNodePublishVolumeInvalidRequests(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	h.create(t, "vol", "local")
	h.create(t, "second", "local")
	h.publish(t, "second", h.target("taken"))
	must.Succeed(t, os.WriteFile(h.target("file"), []byte("data"), 0o600))
	must.Succeed(t, os.Symlink("/etc", h.target("link")))
	must.Succeed(t, os.Symlink(h.target("nothing"), h.target("dangling")))
	withCapability := func(c *csi.VolumeCapability) func(*csi.NodePublishVolumeRequest) {
		return func(req *csi.NodePublishVolumeRequest) { req.VolumeCapability = c }
	}
	withMode := func(mode csi.VolumeCapability_AccessMode_Mode) func(*csi.NodePublishVolumeRequest) {
		return withCapability(capability(mode))
	}
	withContext := func(key, value string) func(*csi.NodePublishVolumeRequest) {
		return func(req *csi.NodePublishVolumeRequest) { req.VolumeContext = map[string]string{key: value} }
	}
	at := func(target string) func(*csi.NodePublishVolumeRequest) {
		return func(req *csi.NodePublishVolumeRequest) { req.TargetPath = h.target(target) }
	}
	of := func(id string) func(*csi.NodePublishVolumeRequest) {
		return func(req *csi.NodePublishVolumeRequest) { req.VolumeId = id }
	}
	inPool := func(pool string) func(*csi.NodePublishVolumeRequest) {
		return func(req *csi.NodePublishVolumeRequest) {
			req.VolumeId, req.VolumeContext = "absent", map[string]string{"storagePool": pool}
		}
	}
	for name, c := range map[string]struct {
		change func(*csi.NodePublishVolumeRequest)
		code   codes.Code
		says   []string
	}{
		"a volume that is not there":           {of("absent"), codes.NotFound, []string{"absent"}},
		"no capability":                        {withCapability(nil), codes.InvalidArgument, []string{"capability is missing"}},
		"a capability of no type":              {withCapability(&csi.VolumeCapability{AccessMode: writer().GetAccessMode()}), codes.InvalidArgument, []string{"access type"}},
		"a block device":                       {withCapability(block()), codes.InvalidArgument, []string{"block"}},
		"an unknown mount flag":                {withCapability(writer("ro", "nobarrier")), codes.InvalidArgument, []string{`"nobarrier"`}},
		"two unknown mount flags":              {withCapability(writer("nobarrier", "x=y")), codes.InvalidArgument, []string{`"nobarrier"`, `"x=y"`}},
		"no access mode":                       {withMode(csi.VolumeCapability_AccessMode_UNKNOWN), codes.InvalidArgument, []string{"access mode", "UNKNOWN"}},
		"in a pool that is not there":          {inPool("nowhere"), codes.InvalidArgument, []string{`"nowhere"`, `"local"`}},
		"a context with a pool that is a path": {withContext("storagePool", "../etc"), codes.InvalidArgument, []string{`"../etc"`}},
		"a context with the key misspelled":    {withContext("storagepool", "local"), codes.InvalidArgument, []string{`"storagepool"`, `"storagePool"`}},
		"in no pool":                           {inPool("other"), codes.NotFound, []string{"absent"}},
		"a target that carries another volume": {at("taken"), codes.AlreadyExists, []string{h.target("taken")}},
		"a target that is a file":              {at("file"), codes.AlreadyExists, []string{h.target("file")}},
		"a target that is a link":              {at("link"), codes.InvalidArgument, []string{h.target("link")}},
		"a target that is a dangling link":     {at("dangling"), codes.InvalidArgument, []string{h.target("dangling")}},
		"a target whose parent is not there":   {at("no/such"), codes.InvalidArgument, []string{"target"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("vol"), c.change))
			wantCode(t, err, c.code, c.says...)
		})
	}
	wantGone(t, h.target("vol"))
	wantEqual(t, "where it is published", h.mounts.published(t, h.path("local", ""), "vol"), []string(nil))
}

// The attributes of a PersistentVolume never change: they name the pool in which the volume was made, by the name that it had then.
func TestNodePublishVolumeFindsVolumeOfContextsOldPool(t *testing.T) {
	one, other := t.TempDir(), t.TempDir()
	pools := func(names ...string) setup {
		return setup{pools: fmt.Sprintf(`[{"name":%q,"path":%q},{"name":%q,"path":%q}]`, names[0], one, names[1], other)}
	}
	before := newHarness(t, pools("Fast_1", "other"))
	made := before.create(t, "vol", "Fast_1")
	wantPublished := func(h *harness) {
		t.Helper()
		_, err := h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("vol"), func(req *csi.NodePublishVolumeRequest) {
			req.VolumeContext = made.GetVolumeContext()
		}))
		must.Succeed(t, err)
		h.unpublish(t, "vol", h.target("vol"))
		must.Succeed(t, h.set.Close(t.Context()))
	}
	wantPublished(before)
	wantPublished(newHarness(t, pools("fast-1", "other"))) // renamed
	must.Succeed(t, os.Rename(filepath.Join(one, "vol"), filepath.Join(other, "vol")))
	records := filepath.Join(".hostpath-provisioner", "volumes", "vol.json")
	must.Succeed(t, os.Rename(filepath.Join(one, records), filepath.Join(other, records)))
	wantPublished(newHarness(t, pools("Fast_1", "other"))) // moved by hand
	wantPublished(newHarness(t, pools("new", "other")))    // and its first pool taken out of use
}

func TestNodePublishVolumeSetsMountFlags(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	h.create(t, "vol", "local")
	h.create(t, "shared-vol", "everywhere")
	reader := csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	for name, c := range map[string]struct {
		volume   string
		wanted   *csi.VolumeCapability
		readonly bool
		want     []string
	}{
		"none":                          {"vol", writer(), false, nil},
		"read-only by request":          {"vol", writer(), true, []string{"ro"}},
		"read-only by access mode":      {"vol", capability(reader), false, []string{"ro"}},
		"read-only by mount flag":       {"vol", writer("ro"), false, []string{"ro"}},
		"read-only by all":              {"vol", capability(reader, "ro"), true, []string{"ro"}},
		"read-only in spite of a flag":  {"vol", writer("rw"), true, []string{"ro"}},
		"a reader in spite of a flag":   {"vol", capability(reader, "rw"), false, []string{"ro"}},
		"a reader on several nodes":     {"shared-vol", capability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY), false, []string{"ro"}},
		"a writer on several nodes":     {"shared-vol", capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), false, nil},
		"those of the capability":       {"vol", writer("nosuid", "nodev", "noexec", "noatime"), false, []string{"nosuid", "nodev", "noexec", "noatime"}},
		"their opposites":               {"vol", writer("suid", "dev", "exec", "atime"), false, []string{"suid", "dev", "exec", "atime"}},
		"those of the capability, read": {"vol", writer("nosuid"), true, []string{"nosuid", "ro"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.NodePublishVolume(t.Context(), publishRequest(c.volume, h.target("at"), func(req *csi.NodePublishVolumeRequest) {
				req.VolumeCapability, req.Readonly = c.wanted, c.readonly
			}))
			must.Succeed(t, err)
			h.mounts.wantFlags(t, h.target("at"), c.want...)
			h.unpublish(t, c.volume, h.target("at"))
		})
	}
}

// PersistentVolumes of the upstream KubeVirt driver are ReadWriteMany and pinned to one node:
// all their pods are there.
func TestMultiNodeModesOnOneNode(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	h.create(t, "vol", "local")
	must.Succeed(t, os.Mkdir(h.path("local", "old"), 0o777)) // without a record
	for _, c := range []struct {
		mode  csi.VolumeCapability_AccessMode_Mode
		flags []string
	}{
		{csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, nil},
		{csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER, nil},
		{csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, []string{"ro"}},
	} {
		for _, id := range []string{"vol", "old"} {
			t.Run(id+" "+c.mode.String(), func(t *testing.T) {
				for _, pod := range []string{"one", "two"} {
					_, err := h.NodePublishVolume(t.Context(), publishRequest(id, h.target(pod), func(req *csi.NodePublishVolumeRequest) {
						req.VolumeCapability = capability(c.mode)
					}))
					must.Succeed(t, err)
					h.mounts.wantFlags(t, h.target(pod), c.flags...)
				}
				for _, pod := range []string{"one", "two"} {
					h.unpublish(t, id, h.target(pod))
				}
			})
		}
	}
}

func TestTargetInsidePool(t *testing.T) {
	h := newHarness(t, setup{pools: severalPool})
	h.create(t, "vol", "local")
	h.create(t, "second", "local")
	must.Succeed(t, os.Mkdir(h.path("local", "second")+"/sub", 0o755))
	must.Succeed(t, os.Symlink(h.path("local", ""), h.target("link")))
	for name, target := range map[string]string{
		"the pool":                       h.path("local", ""),
		"the driver's directory":         h.path("local", ".hostpath-provisioner"),
		"the volume itself":              h.path("local", "vol"),
		"in the volume itself":           h.path("local", "vol/target"),
		"deep in another volume":         h.path("local", "second/sub/target"),
		"in another pool":                h.path("other", "target"),
		"in the pool, reached by a link": h.target("link") + "/target",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.NodePublishVolume(t.Context(), publishRequest("vol", target))
			wantCode(t, err, codes.InvalidArgument, target, "inside pool")
			inline := publishRequest("inline", target)
			inline.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": "true", "storagePool": "local"}
			_, err = h.NodePublishVolume(t.Context(), inline)
			wantCode(t, err, codes.InvalidArgument, target, "inside pool")
			wantGone(t, h.path("local", "inline"))
		})
	}
	t.Run("unpublishing removes nothing", func(t *testing.T) {
		_, err := h.NodeUnpublishVolume(t.Context(), unpublishRequest("vol", h.path("local", "vol")))
		wantCode(t, err, codes.InvalidArgument, "inside pool")
		wantThere(t, h.path("local", "vol"))
	})
	t.Run("the pool's own parent is no pool", func(t *testing.T) {
		target := filepath.Dir(h.path("local", "")) + "/target"
		h.publish(t, "vol", target)
		h.unpublish(t, "vol", target)
	})
}

func TestNodeGetVolumeStats(t *testing.T) {
	h := newHarness(t, setup{})
	stats := func(id, path string) (*csi.NodeGetVolumeStatsResponse, error) {
		return h.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	}
	h.create(t, "vol", "")
	h.create(t, "second", "")
	h.publish(t, "vol", h.target("vol"))
	h.publish(t, "second", h.target("second"))
	must.Succeed(t, os.Mkdir(h.target("directory"), 0o755))
	must.Succeed(t, os.WriteFile(h.target("file"), nil, 0o600))
	must.Succeed(t, os.Symlink(h.target("vol"), h.target("link")))
	for name, c := range map[string]struct{ id, at string }{
		"a volume that is not there":             {"absent", "vol"},
		"a path that is not there":               {"vol", "nothing"},
		"a path whose parent is not there":       {"vol", "no/such"},
		"a path that carries another volume":     {"vol", "second"},
		"a path that carries nothing":            {"vol", "directory"},
		"a path that is a file":                  {"vol", "file"},
		"a path that is a link to where it is":   {"vol", "link"},
		"a path below that of the volume itself": {"vol", "vol/sub"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := stats(c.id, h.target(c.at))
			wantCode(t, err, codes.NotFound)
		})
	}
	t.Run("a published volume is measured", func(t *testing.T) {
		response := must.Value(stats("vol", h.target("vol")))(t)
		units := make(map[csi.VolumeUsage_Unit]bool)
		for _, usage := range response.GetUsage() {
			units[usage.GetUnit()] = true
			if usage.GetTotal() <= 0 || usage.GetUsed() < 0 || usage.GetAvailable() <= 0 || usage.GetUsed()+usage.GetAvailable() > usage.GetTotal() {
				t.Errorf("the usage does not add up: %v", usage)
			}
		}
		if !units[csi.VolumeUsage_BYTES] {
			t.Errorf("no bytes are reported: %v", response)
		}
		if oldcsi.Condition(response) == nil || oldcsi.Condition(response).GetAbnormal() {
			t.Errorf("the condition is %v", oldcsi.Condition(response))
		}
	})
	t.Run("a read-only publication is not abnormal", func(t *testing.T) {
		_, err := h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("ro"), func(req *csi.NodePublishVolumeRequest) { req.Readonly = true }))
		must.Succeed(t, err)
		response, err := stats("vol", h.target("ro"))
		must.Succeed(t, err)
		wantEqual(t, "abnormal", oldcsi.Condition(response).GetAbnormal(), false)
	})
}
