package pool_test

import (
	"encoding/json"
	"errors"
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

// A bench is one node with pools in a temporary directory, in a bubble of its own
// time: settled waits until nothing is going on any more.
type bench struct {
	*pool.Set
	*pooltest.Node
	t *testing.T
	// table is used instead of Mounts, unless it is nil.
	table pool.Mounts
	// devices are used instead of Loops, unless they are nil.
	devices pool.Devices
	real    func(*dir.Dir) (quota.Facility, error) // nil: as Node has it
	each    bool                                   // each volume is surveyed for itself
	files   bool                                   // inspect looks at all files
	every   time.Duration                          // of checks; 0 for as usual
	log     logr.Logger
	memory  string       // of the pools that were served; empty for none
	up      atomic.Int64 // nanoseconds since the node was booted
}

// inBubble runs a test on a node with one pool, named "local", at root/pool.
func inBubble(t *testing.T, test func(t *testing.T, b *bench)) {
	t.Helper()
	onPools(t, `[{"name":"local","path":"pool"}]`, test)
}

// onPools runs a test on a node with these pools.
func onPools(t *testing.T, datadir string, test func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir())
		b.start(datadir)
		test(t, b)
	})
}

func newBench(t *testing.T, root string) *bench {
	return &bench{t: t, Node: pooltest.New(t, root)}
}

// withQuotas runs a test on a pool on a real filesystem, where the kernel keeps the sizes.
func withQuotas(t *testing.T, root, datadir string, test func(t *testing.T, b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, root)
		b.real = quota.Detect
		b.start(datadir)
		test(t, b)
	})
}

func (b *bench) start(datadir string) { b.startNode("node-1", datadir) }

func (b *bench) startNode(name, datadir string) {
	b.t.Helper()
	b.begin(name, datadir)
	must.Succeed(b.t, b.Wait(b.t.Context()))
	b.settled()
}

// begin is a start that does not wait for the pools to be opened.
func (b *bench) begin(name, datadir string) {
	b.t.Helper()
	b.Set = b.Start(b.Configs(datadir), b.options(name))
}

func (b *bench) options(name string) pool.Options {
	b.t.Helper()
	options := b.Options(name)
	if b.table != nil {
		options.Mounts = b.table
	}
	if b.devices != nil {
		options.Devices = b.devices
	}
	if b.real != nil {
		options.DetectQuota = b.real
	}
	options.EachVolume, options.CheckEvery, options.Log = b.each, b.every, b.log
	if b.memory != "" {
		options.Served = served.In(b.memory)
	}
	options.SinceBoot = func() time.Duration { return time.Duration(b.up.Load()) }
	return options
}

// inspect inspects pools while the driver of the bench runs.
func (b *bench) inspect(datadir string) []inspect.Pool {
	b.t.Helper()
	return b.inspectAs("node-1", datadir)
}

// inspectAs is inspect on a node.
func (b *bench) inspectAs(name, datadir string) []inspect.Pool {
	b.t.Helper()
	o := b.options(name)
	return inspect.Run(b.t.Context(), b.Configs(datadir), inspect.Options{
		Node: o.Node, Mounts: b.Mounts, Devices: o.Devices, Dev: o.Dev, SystemPath: o.SystemPath,
		DetectQuota: o.DetectQuota, CountErrors: o.CountErrors, SinceBoot: o.SinceBoot, Files: b.files,
	}).Pools
}

// seen is the condition that inspect reports of the only volume of the first pool.
func (b *bench) seen(datadir string) health.Condition {
	b.t.Helper()
	volumes := b.inspect(datadir)[0].Volumes
	if len(volumes) != 1 {
		b.t.Fatalf("%+v are seen, want one volume", volumes)
	}
	return health.Condition{Abnormal: volumes[0].Abnormal, Message: volumes[0].Condition, Reason: health.Reason(volumes[0].Reason)}
}

// restart is a new process on the same disk.
func (b *bench) restart(datadir string) {
	b.t.Helper()
	must.Succeed(b.t, b.Close(b.t.Context()))
	b.start(datadir)
}

// settled waits until the background work has nothing to do.
func (b *bench) settled() { synctest.Wait() }

// later lets time pass, so that pools are checked again.
func (b *bench) later(d time.Duration) {
	time.Sleep(d) // the bubble's time
	synctest.Wait()
}

func (b *bench) create(name string, bytes int64) pool.Volume {
	b.t.Helper()
	v, err := b.Create(b.t.Context(), pool.Request{ID: id(b.t, name), Range: volume.Range{Required: bytes}})
	must.Succeed(b.t, err)
	return v
}

func (b *bench) delete(name string) {
	b.t.Helper()
	must.Succeed(b.t, b.Delete(b.t.Context(), id(b.t, name)))
}

func (b *bench) publish(name, target string) error {
	b.t.Helper()
	return b.Publications().Publish(b.t.Context(), pool.Publication{ID: id(b.t, name), Target: b.Target(target)})
}

func (b *bench) unpublish(name, target string) error {
	b.t.Helper()
	unlock, err := b.ShareTarget(id(b.t, name), b.Target(target))
	must.Succeed(b.t, err)
	defer unlock()
	return b.Publications().Unpublish(b.t.Context(), id(b.t, name), b.Target(target))
}

func (b *bench) capacity() int64 {
	b.t.Helper()
	bytes, err := b.Capacity(b.t.Context(), volume.PoolName{}, false)
	must.Succeed(b.t, err)
	return bytes
}

func (b *bench) volumes() []string {
	b.t.Helper()
	page, next := b.List(b.t.Context(), volume.ID{}, 1000)
	if next != (volume.ID{}) {
		b.t.Error("a list of 1000 is not whole")
	}
	return ids(page)
}

func (b *bench) wantVolumes(want ...string) {
	b.t.Helper()
	if got := b.volumes(); !slices.Equal(got, want) {
		b.t.Errorf("volumes %q, want %q", got, want)
	}
}

// wantClean says that nothing of a creation or removal is left over.
func (b *bench) wantClean() {
	b.t.Helper()
	b.settled()
	for _, d := range []string{b.Own("creating", "node-1"), b.Own("trash", "node-1")} {
		if left := names(b.t, d); len(left) > 0 {
			b.t.Errorf("%s has %q, want nothing", d, left)
		}
	}
	for _, file := range names(b.t, b.Own("volumes")) {
		if strings.HasPrefix(file, ".") {
			b.t.Errorf("the temporary file %s is left", file)
		}
		volume := strings.TrimSuffix(file, ".json")
		if _, err := os.Stat(b.Path("pool", volume)); err != nil {
			b.t.Errorf("the record of %s has no directory: %v", volume, err)
		}
	}
	status := b.Status()[0]
	if status.Trash.Pieces != 0 {
		b.t.Errorf("%d pieces of trash are counted, want none", status.Trash.Pieces)
	}
	if sum := b.recorded(); status.Promised != sum {
		b.t.Errorf("the ledger has %d bytes promised, the records %d", status.Promised, sum)
	}
}

// recorded is the sum of the promises on disk.
func (b *bench) recorded() (sum int64) {
	b.t.Helper()
	for _, file := range names(b.t, b.Own("volumes")) {
		var record struct {
			Bytes int64 `json:"bytes"`
		}
		data, err := os.ReadFile(b.Own("volumes", file))
		must.Succeed(b.t, err)
		must.Succeed(b.t, json.Unmarshal(data, &record))
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
	entries, err := os.ReadDir(path)
	must.Succeed(t, err)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func labelOf(t *testing.T, b *bench, path string) string {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	got, err := b.Labels.Get(d)
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
