package driver_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib      = 1 << 20
	nodeName = "node-a"
	// tooMuch is more than any pool of a test has: 4 PiB.
	tooMuch = 4 << 50
)

// The pools that tests run on.
const (
	onePool     = `[{"name":"local","path":"local"}]`
	severalPool = `[{"name":"local","path":"local"},{"name":"other","path":"other"},` +
		`{"name":"everywhere","path":"everywhere","shared":true}]`
	// missingPool has a pool that does not serve, since nothing is mounted there.
	missingPool = `[{"name":"local","path":"local"},{"name":"away","path":"away","requireMount":true}]`
)

// A setup is what a test wants of its driver; the zero value is one pool.
type setup struct {
	pools    string
	node     string // nodeName if empty
	config   driver.Config
	log      klog.Logger
	hooks    hooks
	options  func(*pool.Options)
	observer driver.Observer
	// unlooked starts the driver before its pools were checked.
	unlooked bool
}

// A harness is a driver that serves on a socket, and clients that speak CSI to it.
// The pools are real; mounts and labels are kept in memory.
type harness struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
	connection *grpc.ClientConn

	dir    string // of the pools
	pods   string // where targets are
	socket string
	node   volume.NodeID
	set    *pool.Set
	mounts *mounts
	loops  *looptest.Fake
	calls  *calls
	// stop ends the server, and served then has the error of Serve.
	stop   context.CancelFunc
	served <-chan error
}

func newHarness(t testing.TB, s setup) *harness {
	t.Helper()
	n := pooltest.New(t, t.TempDir())
	r := &harness{dir: n.Root, pods: n.Path("pods"), loops: n.Loops, mounts: &mounts{Fake: n.Mounts, hooks: s.hooks}, calls: &calls{}}
	if s.pools == "" {
		s.pools = onePool
	}
	if s.node == "" {
		s.node = nodeName
	}
	options := n.Options(s.node)
	r.node, options.Mounts, options.Log = options.Node, r.mounts, s.log
	options.HangAfter = time.Minute // the disk of a busy machine is slower than one that counts as hanging
	if s.options != nil {
		s.options(&options)
	}
	must.Succeed(t, os.Mkdir(n.Path("away"), 0o750))
	r.set = n.Start(n.Configs(s.pools), options)
	if !s.unlooked {
		must.Succeed(t, r.set.Wait(t.Context()))
	}
	r.serve(t, s, time.Minute)
	return r
}

// serve starts a server on the harness's pools, and connects the harness to it.
func (h *harness) serve(t testing.TB, s setup, grace time.Duration) {
	t.Helper()
	h.socket = filepath.Join(testenv.SocketDir(t), "s")
	listener, err := driver.Listen(t.Context(), h.socket)
	must.Succeed(t, err)
	if s.config == (driver.Config{}) {
		s.config = driver.Config{Name: "test.example.com", Version: "v1.2.3"}
	}
	s.config.Node = h.node
	if s.observer == nil {
		s.observer = h.calls
	}
	server := driver.NewServer(s.config, h.set, s.observer, s.log)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served, ended := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(ended)
		served <- server.Serve(ctx, listener, grace)
	}()
	connection, err := grpc.NewClient("unix://"+h.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Succeed(t, err)
	t.Cleanup(func() {
		must.Succeed(t, connection.Close())
		stop()
		<-ended
	})
	h.stop, h.served, h.connection = stop, served, connection
	h.IdentityClient = csi.NewIdentityClient(connection)
	h.ControllerClient = csi.NewControllerClient(connection)
	h.NodeClient = csi.NewNodeClient(connection)
}

func node(t testing.TB, name string) volume.NodeID {
	t.Helper()
	id := must.Value(volume.ParseNodeID(name))(t)
	return id
}

// create makes a volume of 4 MiB in a pool; none is named by "".
func (h *harness) create(t *testing.T, name, in string) *csi.Volume {
	t.Helper()
	response, err := h.CreateVolume(t.Context(), createRequest(name, func(req *csi.CreateVolumeRequest) {
		if in != "" {
			req.Parameters = map[string]string{"storagePool": in}
		}
	}))
	must.Succeed(t, err)
	return response.GetVolume()
}

func (h *harness) publish(t *testing.T, volume, target string) {
	t.Helper()
	must.Succeed(t, must.Err(h.NodePublishVolume(t.Context(), publishRequest(volume, target))))
}

func (h *harness) unpublish(t *testing.T, volume, target string) {
	t.Helper()
	must.Succeed(t, must.Err(h.NodeUnpublishVolume(t.Context(), unpublishRequest(volume, target))))
}

// volume is what the driver says of a volume; nil if there is none.
func (h *harness) volume(t *testing.T, id string) *csi.ControllerGetVolumeResponse {
	t.Helper()
	response, err := h.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	if status.Code(err) == codes.NotFound {
		return nil
	}
	must.Succeed(t, err)
	return response
}

// ids are those of all volumes, in the order of the list.
func (h *harness) ids(t *testing.T) []string {
	t.Helper()
	response := must.Value(h.ListVolumes(t.Context(), &csi.ListVolumesRequest{}))(t)
	return idsOf(response)
}

func idsOf(response *csi.ListVolumesResponse) []string {
	var ids []string
	for _, entry := range response.GetEntries() {
		ids = append(ids, entry.GetVolume().GetVolumeId())
	}
	return ids
}

// path is that of a volume's directory.
func (h *harness) path(in, id string) string { return filepath.Join(h.dir, in, id) }

// target is a path where a volume can be published.
func (h *harness) target(name string) string { return filepath.Join(h.pods, name) }

func createRequest(name string, change ...func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: 4 * mib},
		VolumeCapabilities: []*csi.VolumeCapability{writer()},
	}
	for _, c := range change {
		c(req)
	}
	return req
}

func publishRequest(volume, target string, change ...func(*csi.NodePublishVolumeRequest)) *csi.NodePublishVolumeRequest {
	req := &csi.NodePublishVolumeRequest{VolumeId: volume, TargetPath: target, VolumeCapability: writer()}
	for _, c := range change {
		c(req)
	}
	return req
}

func unpublishRequest(volume, target string) *csi.NodeUnpublishVolumeRequest {
	return &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: target}
}

// capability is a directory in an access mode.
func capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

func writer(flags ...string) *csi.VolumeCapability {
	return capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, flags...)
}

func block() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
	}
}

// onNode is the topology segment of a node.
func onNode(name string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{"topology.hostpath.csi/node": name}}
}

// badIDs are ids that no volume has: TestParseID of pkg/volume has all. Each is named in the error, by the words that follow.
var badIDs = map[string]struct{ id, says string }{
	"the id is empty":                       {"", "empty"},
	"the id leads out of the pool":          {"../../etc", `"../../etc"`},
	"the id has a NUL byte":                 {"a\x00b", `"a\x00b"`},
	"the id leaves no room for what we add": {strings.Repeat("a", 201), "201 bytes"},
}

// badPaths are those that no volume is published at: TestParseTarget of pkg/hostfs/bind has all. The words are those of their error.
var badPaths = map[string]struct{ path, says string }{
	"the path is empty":                {"", "path is empty"},
	"the path is relative":             {"pods/x", `"pods/x"`},
	"the path has a NUL byte":          {"/pods/\x00", `"/pods/\x00"`},
	"a name in the path is too long":   {"/pods/" + strings.Repeat("a", 256), "NAME_MAX"},
	"the path is longer than PATH_MAX": {"/" + strings.Repeat("a", 4096), "4097 bytes"},
}

// wantCode fails the test unless err has the code, and its message all the words.
func wantCode(t *testing.T, err error, code codes.Code, words ...string) {
	t.Helper()
	answer := status.Convert(err)
	if answer.Code() != code {
		t.Fatalf("the answer is %s %q, want %s", answer.Code(), answer.Message(), code)
	}
	wantContains(t, answer.Message(), words...)
	must.SayOnce(t, answer.Message())
}

// wantEqual compares what the driver said, or what it kept.
func wantEqual(t *testing.T, what string, got, want any, options ...cmp.Option) {
	t.Helper()
	if diff := cmp.Diff(want, got, append(options, protocmp.Transform())...); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// wantContains fails the test unless a text has the words.
func wantContains(t *testing.T, text string, words ...string) {
	t.Helper()
	for _, word := range words {
		if !strings.Contains(text, word) {
			t.Errorf("%q does not say %q", text, word)
		}
	}
}

// wantThere and wantGone search for a path on the disk.
func wantThere(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("it should be there: %v", err)
	}
}

func wantGone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s should be gone: %v", path, err)
	}
}

// hooks come before what they are named after. Those that are nil do nothing.
type hooks struct {
	publish        func(bind.Target)
	unpublished    func(bind.Target) // comes after it
	sameFilesystem func()
}

// mounts are bindtest.Fake with hooks, and remember with which flags a target was
// last published.
type mounts struct {
	*bindtest.Fake
	hooks hooks

	mu    sync.Mutex
	flags map[string]bind.Flags
}

func (m *mounts) Publish(source *dir.Dir, target bind.Target, flags bind.Flags) error {
	if m.hooks.publish != nil {
		m.hooks.publish(target)
	}
	if err := m.Fake.Publish(source, target, flags); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.flags == nil {
		m.flags = make(map[string]bind.Flags)
	}
	m.flags[target.String()] = flags
	return nil
}

func (m *mounts) PublishDevice(dev *dir.Dir, name string, target bind.Target) error {
	if m.hooks.publish != nil {
		m.hooks.publish(target)
	}
	return m.Fake.PublishDevice(dev, name, target)
}

func (m *mounts) Unpublish(target bind.Target, own *dir.ID) error {
	err := m.Fake.Unpublish(target, own)
	if m.hooks.unpublished != nil {
		m.hooks.unpublished(target)
	}
	return err
}

func (m *mounts) SameFilesystem(a, b *dir.Dir) (bool, error) {
	if m.hooks.sameFilesystem != nil {
		m.hooks.sameFilesystem()
	}
	return m.Fake.SameFilesystem(a, b)
}

// wantFlags fails the test unless the target was published with these mount flags.
func (m *mounts) wantFlags(t *testing.T, target string, names ...string) {
	t.Helper()
	want := must.Value(bind.ParseFlags(names))(t)
	m.mu.Lock()
	defer m.mu.Unlock()
	if got, ok := m.flags[target]; !ok || got != want {
		t.Errorf("%s is published: %v, with the flags %+v; want %+v, which are %q", target, ok, got, want, names)
	}
}

// published are the targets of a directory.
func (m *mounts) published(t *testing.T, parent, name string) []string {
	t.Helper()
	d, err := dir.Open(parent)
	must.Succeed(t, err)
	all, err := m.Published(d)
	must.Succeed(t, errors.Join(err, d.Close()))
	var targets []string
	for _, p := range all[name] {
		targets = append(targets, p.Path)
	}
	return targets
}

// hold makes unmounting a target fail until the returned function is called.
func (h *harness) hold(t *testing.T, target string) (release func()) {
	t.Helper()
	parsed := must.Value(bind.ParseTarget(target))(t)
	return h.mounts.Hold(parsed)
}

// A gate holds the publications at one target until it is opened.
type gate struct {
	name    string
	entered chan struct{} // has one token for each that came
	open    chan struct{}
}

func newGate(name string) *gate {
	return &gate{name: name, entered: make(chan struct{}, 16), open: make(chan struct{})}
}

func (g *gate) publish(target bind.Target) {
	if filepath.Base(target.String()) == g.name {
		g.entered <- struct{}{}
		<-g.open
	}
}

// calls records what an Observer gets.
type calls struct {
	mu       sync.Mutex
	answered []string
	panicked []string
}

func (c *calls) Call(method, code string, duration time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if duration <= 0 {
		code = fmt.Sprintf("%s in %v", code, duration)
	}
	c.answered = append(c.answered, method+" "+code)
}

func (c *calls) Panic(method string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.panicked = append(c.panicked, method)
}

// seen are the calls answered so far, and the methods that panicked.
func (c *calls) seen() (answered, panicked []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.answered...), append([]string(nil), c.panicked...)
}

// refused waits until no process serves a socket.
func refused(t *testing.T, socket string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for {
		connection, err := net.Dial("unix", socket)
		if err != nil {
			return
		}
		connection.Close()
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("%s is still served", socket)
		}
	}
}
