package driver_test

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// logged is what was written to a log.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// logger writes as the driver does with --v.
func (l *logged) logger(verbosity int) klog.Logger {
	return textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(verbosity), textlogger.Output(l)))
}

// logger writes nothing.
func logger() klog.Logger { return klog.Logger{} }

// line is the first with that text.
func (l *logged) line(t *testing.T, text string) string {
	t.Helper()
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			return line
		}
	}
	t.Fatalf("no line of the log has %q:\n%s", text, l)
	return ""
}

// calls are the lines about calls, by their severity, method and code.
func (l *logged) calls() []string {
	var calls []string
	about := regexp.MustCompile(`^([IE]).*"Call(?: failed)?".* method="(\w+)".* code="(\w+)" duration="[0-9.]+[mµn]?s"`)
	for line := range strings.Lines(l.String()) {
		if match := about.FindStringSubmatch(line); match != nil {
			calls = append(calls, strings.Join(match[1:], " "))
		}
	}
	return calls
}

func TestLogVerbosity(t *testing.T) {
	const (
		created   = "I CreateVolume OK"
		published = "I NodePublishVolume OK"
		removed   = "I NodeUnpublishVolume OK"
		deleted   = "I DeleteVolume OK"
		missed    = "I ControllerGetVolume NotFound"
		staged    = "I NodeStageVolume Unimplemented"
		listed    = "I ListVolumes OK"
		broken    = "E CreateVolume Internal"
	)
	for name, c := range map[string]struct {
		verbosity int
		want      []string
	}{
		"a failure of the driver always":      {0, []string{broken}},
		"what was refused at 1":               {1, []string{missed, broken}},
		"what changed something at 2":         {2, []string{created, published, removed, deleted, missed, broken}},
		"no more at 3":                        {3, []string{created, published, removed, deleted, missed, broken}},
		"what is not implemented at 4":        {4, []string{created, published, removed, deleted, missed, staged, broken}},
		"the calls that come all day, at 5":   {5, []string{created, published, removed, deleted, missed, staged, listed, broken}},
		"no more calls, but their requests 6": {6, []string{created, published, removed, deleted, missed, staged, listed, broken}},
	} {
		t.Run(name, func(t *testing.T) {
			log := &logged{}
			h := newHarness(t, setup{log: log.logger(c.verbosity)})
			h.create(t, "vol", "")
			h.publish(t, "vol", h.target("vol"))
			h.unpublish(t, "vol", h.target("vol"))
			_, err := h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
			must.Succeed(t, err)
			_, err = h.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "vol"})
			wantCode(t, err, codes.NotFound)
			_, err = h.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: "vol"})
			wantCode(t, err, codes.Unimplemented)
			h.ids(t)
			must.Succeed(t, os.WriteFile(h.path("local", ".hostpath-provisioner/volumes/torn.json"), []byte("}"), 0o600))
			_, err = h.CreateVolume(t.Context(), createRequest("torn"))
			wantCode(t, err, codes.Internal)

			wantEqual(t, "the calls in the log", log.calls(), c.want)
			wantEqual(t, "requests in the log", strings.Contains(log.String(), `"Request"`), c.verbosity >= 6)
		})
	}
}

func TestLogHasNoSecrets(t *testing.T) {
	const secret = "hunter2"
	log := &logged{}
	h := newHarness(t, setup{log: log.logger(10)})
	secrets := map[string]string{"password": secret}
	ctx := t.Context()
	for _, name := range []string{"vol", ".."} {
		_, _ = h.CreateVolume(ctx, createRequest(name, func(req *csi.CreateVolumeRequest) { req.Secrets = secrets }))
		_, _ = h.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: name, Secrets: secrets})
		_, _ = h.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: name, Secrets: secrets})
		_, _ = h.NodePublishVolume(ctx, publishRequest(name, h.target("vol"), func(req *csi.NodePublishVolumeRequest) { req.Secrets = secrets }))
		_, _ = h.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: name, Secrets: secrets})
		_, _ = h.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: name, Secrets: secrets})
		_, _ = h.NodeUnpublishVolume(ctx, unpublishRequest(name, h.target("vol")))
		_, _ = h.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: name, Secrets: secrets})
	}
	wantContains(t, log.String(), `"Request"`, "CreateVolume", "NodePublishVolume", "stripped")
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, secret) {
			t.Errorf("the log has a secret: %s", line)
		}
	}
}

func TestHostileIDIsOneLogLine(t *testing.T) {
	log := &logged{}
	h := newHarness(t, setup{log: log.logger(10)})
	_, err := h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol\nE1120 forged"})
	wantCode(t, err, codes.InvalidArgument)
	for line := range strings.Lines(log.String()) {
		if strings.HasPrefix(line, "E1120 forged") {
			t.Errorf("a line of the log was forged: %s", line)
		}
	}
}

// Whatever a field has, a line of the log and an error stay short: they come again with each retry.
func TestLongFieldsAreBounded(t *testing.T) {
	long := strings.Repeat("x", 100<<10)
	log := &logged{}
	h := newHarness(t, setup{log: log.logger(6)})
	h.create(t, "vol", "")
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"name": func() error { _, err := h.CreateVolume(ctx, createRequest(long)); return err },
		"mount option": func() error {
			_, err := h.CreateVolume(ctx, createRequest("a", func(req *csi.CreateVolumeRequest) {
				req.VolumeCapabilities = []*csi.VolumeCapability{writer(long)}
			}))
			return err
		},
		"id": func() error { _, err := h.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: long}); return err },
		"size of an inline volume": func() error {
			_, err := h.NodePublishVolume(ctx, publishRequest("inline", h.target("inline"), func(req *csi.NodePublishVolumeRequest) {
				req.VolumeContext = map[string]string{"csi.storage.k8s.io/ephemeral": "true", "size": long}
			}))
			return err
		},
		"path": func() error {
			return must.Err(h.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: "/" + long}))
		},
		"token": func() error { _, err := h.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: long}); return err },
		"snapshot's parameter": func() error {
			return must.Err(h.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "vol", Parameters: map[string]string{"consistency": long}}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := call()
			if got := len(status.Convert(err).Message()); err == nil || got > 3<<10 {
				t.Errorf("the error has %d bytes: %.200v", got, err)
			}
		})
	}
	for line := range strings.Lines(log.String()) {
		if most := 20 << 10; len(line) > most || len(line) > 4<<10 && !strings.Contains(line, `"Request"`) {
			t.Errorf("a line of %d bytes: %.200s", len(line), line)
		}
	}
}
