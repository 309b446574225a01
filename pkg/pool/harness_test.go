package pool_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/pooltest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/serve"
	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const (
	mib = 1 << 20
	gib = 1 << 30
)

// A harness is one node with pools in a temporary directory, in a bubble of its own
// time: settled waits until nothing is going on any more.
type harness struct {
	*pool.Set
	*pooltest.Node
	t *testing.T
	// table is used instead of Mounts, unless it is nil.
	table pool.Mounts
	// devices are used instead of Loops, unless they are nil.
	devices pool.Devices
	freezer serve.Freezer
	real    func(*dir.Dir) (quota.Facility, error) // nil: as Node has it
	each    bool                                   // each volume is surveyed for itself
	files   bool                                   // inspect looks at all files
	every   time.Duration                          // of checks; 0 for as usual
	log     logr.Logger
	memory  string       // of the pools that were served; empty for none
	up      atomic.Int64 // nanoseconds since the node was booted
}

// inBubble runs a test on a node with one pool, named "local", at root/pool.
func inBubble(t *testing.T, test func(t *testing.T, b *harness)) {
	t.Helper()
	onPools(t, `[{"name":"local","path":"pool"}]`, test)
}

// onPools runs a test on a node with these pools.
func onPools(t *testing.T, datadir string, test func(t *testing.T, b *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, t.TempDir())
		h.start(datadir)
		test(t, h)
	})
}

func newHarness(t *testing.T, root string) *harness {
	return &harness{t: t, Node: pooltest.New(t, root)}
}

// withQuotas runs a test on a pool on a real filesystem, where the kernel keeps the sizes.
func withQuotas(t *testing.T, root, datadir string, test func(t *testing.T, b *harness)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, root)
		h.real = quota.Detect
		h.start(datadir)
		test(t, h)
	})
}

func (h *harness) start(datadir string) { h.startNode("node-1", datadir) }

func (h *harness) startNode(name, datadir string) {
	h.t.Helper()
	h.begin(name, datadir)
	must.Succeed(h.t, h.Wait(h.t.Context()))
	h.settled()
}

// begin is a start that does not wait for the pools to be opened.
func (h *harness) begin(name, datadir string) {
	h.t.Helper()
	h.Set = h.Start(h.Configs(datadir), h.options(name))
}

func (h *harness) options(name string) pool.Options {
	h.t.Helper()
	options := h.Options(name)
	if h.table != nil {
		options.Mounts = h.table
	}
	if h.devices != nil {
		options.Devices = h.devices
	}
	options.Freezer = h.freezer
	if h.real != nil {
		options.DetectQuota = h.real
	}
	options.EachVolume, options.CheckEvery, options.Log = h.each, h.every, h.log
	if h.memory != "" {
		options.Served = served.In(h.memory)
	}
	options.SinceBoot = func() time.Duration { return time.Duration(h.up.Load()) }
	return options
}

// inspect inspects pools while the driver of the harness runs.
func (h *harness) inspect(datadir string) []inspect.Pool {
	h.t.Helper()
	return h.inspectAs("node-1", datadir)
}

// inspectAs is inspect on a node.
func (h *harness) inspectAs(name, datadir string) []inspect.Pool {
	h.t.Helper()
	o := h.options(name)
	return inspect.Run(h.t.Context(), h.Configs(datadir), inspect.Options{
		Node: o.Node, Mounts: h.Mounts, Devices: o.Devices, Dev: o.Dev, SystemPath: o.SystemPath,
		DetectQuota: o.DetectQuota, CountErrors: o.CountErrors, SinceBoot: o.SinceBoot, Files: h.files,
	}).Pools
}

// seen is the condition that inspect reports of the only volume of the first pool.
func (h *harness) seen(datadir string) health.Condition {
	h.t.Helper()
	volumes := h.inspect(datadir)[0].Volumes
	if len(volumes) != 1 {
		h.t.Fatalf("%+v are seen, want one volume", volumes)
	}
	return health.Condition{Abnormal: volumes[0].Abnormal, Message: volumes[0].Condition, Reason: health.Reason(volumes[0].Reason)}
}

// restart is a new process on the same disk.
func (h *harness) restart(datadir string) {
	h.t.Helper()
	must.Succeed(h.t, h.Close(h.t.Context()))
	h.start(datadir)
}

// settled waits until the background work has nothing to do.
func (h *harness) settled() { synctest.Wait() }

// later lets time pass, so that pools are checked again.
func (h *harness) later(d time.Duration) {
	time.Sleep(d) // the bubble's time
	synctest.Wait()
}

func (h *harness) create(name string, bytes int64) pool.Volume {
	h.t.Helper()
	v := must.Value(h.Create(h.t.Context(), pool.Request{ID: id(h.t, name), Range: volume.Range{Required: bytes}}))(h.t)
	return v
}

// promiseRest promises to directory volumes what the pool has left, up to a MiB: more than is reported, which a block volume could have too.
func (h *harness) promiseRest() {
	h.t.Helper()
	var err error
	for n := 0; err == nil; n++ {
		_, err = h.Create(h.t.Context(), pool.Request{ID: id(h.t, fmt.Sprintf("pvc-rest-%d", n)), Range: volume.Range{Required: mib}})
	}
	wantError(h.t, err, volume.ErrNoSpace)
}

func (h *harness) delete(name string) {
	h.t.Helper()
	must.Succeed(h.t, h.Delete(h.t.Context(), id(h.t, name)))
}

func (h *harness) publish(name, target string) error {
	h.t.Helper()
	return h.Publications().Publish(h.t.Context(), pool.Publication{ID: id(h.t, name), Target: h.Target(target)})
}

func (h *harness) unpublish(name, target string) error {
	h.t.Helper()
	unlock := must.Value(h.ShareTarget(id(h.t, name), h.Target(target)))(h.t)
	defer unlock()
	return h.Publications().Unpublish(h.t.Context(), id(h.t, name), h.Target(target))
}

func (h *harness) capacity() int64 {
	h.t.Helper()
	bytes := must.Value(h.Capacity(h.t.Context(), volume.PoolName{}, false))(h.t)
	return bytes
}

func (h *harness) volumes() []string {
	h.t.Helper()
	page, next := h.List(h.t.Context(), volume.ID{}, 1000)
	if next != (volume.ID{}) {
		h.t.Error("a list of 1000 is not whole")
	}
	return ids(page)
}

func (h *harness) wantVolumes(want ...string) {
	h.t.Helper()
	if got := h.volumes(); !slices.Equal(got, want) {
		h.t.Errorf("volumes %q, want %q", got, want)
	}
}

// wantClean says that nothing of a creation or removal is left over.
func (h *harness) wantClean() {
	h.t.Helper()
	h.settled()
	for _, d := range []string{h.Own("creating", "node-1"), h.Own("trash", "node-1")} {
		if left := names(h.t, d); len(left) > 0 {
			h.t.Errorf("%s has %q, want nothing", d, left)
		}
	}
	for _, file := range names(h.t, h.Own("volumes")) {
		if strings.HasPrefix(file, ".") {
			h.t.Errorf("the temporary file %s is left", file)
		}
		volume := strings.TrimSuffix(file, ".json")
		if _, err := os.Stat(h.Path("pool", volume)); err != nil {
			h.t.Errorf("the record of %s has no directory: %v", volume, err)
		}
	}
	status := h.Status()[0]
	if status.Trash.Pieces != 0 {
		h.t.Errorf("%d pieces of trash are counted, want none", status.Trash.Pieces)
	}
	if sum := h.recorded(); status.Promised != sum {
		h.t.Errorf("the ledger has %d bytes promised, the records %d", status.Promised, sum)
	}
}

// recorded is the sum of the promises on disk.
func (h *harness) recorded() (sum int64) {
	h.t.Helper()
	for _, file := range names(h.t, h.Own("volumes")) {
		var record struct {
			Bytes int64 `json:"bytes"`
		}
		data := must.Value(os.ReadFile(h.Own("volumes", file)))(h.t)
		must.Succeed(h.t, json.Unmarshal(data, &record))
		sum += record.Bytes
	}
	return sum
}

func ids(volumes []pool.Volume) []string {
	var all []string
	for _, v := range volumes {
		all = append(all, v.ID.String())
	}
	return all
}

var id = pooltest.ID

func names(t *testing.T, path string) []string {
	t.Helper()
	entries := must.Value(os.ReadDir(path))(t)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func labelOf(t *testing.T, h *harness, path string) string {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	got, err := h.Labels.Get(d)
	must.Succeed(t, err)
	return got
}

func wantGone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there (%v), want it gone", path, err)
	}
}

func wantError(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("error %v, want %v", got, want)
	}
}
