package pool_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
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
	t      *testing.T
	root   string
	mounts *bindtest.Fake
	// table is used instead of mounts, unless it is nil.
	table  pool.Mounts
	labels *labeltest.Fake
	loops  *looptest.Fake
	dev    *dir.Dir
	// devices are used instead of loops, unless they are nil.
	devices pool.Devices
	quota   *quotatest.Fake // nil: the sizes are not enforced
	real    func(*dir.Dir) (quota.Facility, error)
	each    bool          // each volume is surveyed for itself
	files   bool          // inspect looks at all files
	every   time.Duration // of checks; 0 for as usual
	errors  atomic.Int64  // that the filesystem has counted
	log     logr.Logger
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
	b := &bench{t: t, root: root, mounts: &bindtest.Fake{}, labels: &labeltest.Fake{}}
	must.Succeed(t, os.Mkdir(filepath.Join(root, "pods"), 0o755))
	must.Succeed(t, os.Mkdir(filepath.Join(root, "dev"), 0o755))
	must.Succeed(t, os.WriteFile(filepath.Join(root, "dev", "null"), nil, 0o600))
	var err error
	b.dev, err = dir.Open(filepath.Join(root, "dev"))
	must.Succeed(t, err)
	b.loops = looptest.NewFake(b.dev)
	t.Cleanup(func() { must.Succeed(t, errors.Join(b.mounts.Close(), b.loops.Close(), b.dev.Close())) })
	return b
}

func (b *bench) start(datadir string) { b.startNode("node-1", datadir) }

func (b *bench) detect(d *dir.Dir) (quota.Facility, error) {
	if b.real != nil {
		return b.real(d)
	}
	if b.quota == nil {
		return nil, fmt.Errorf("%w: ask for another filesystem", quota.ErrNone)
	}
	return b.quota, nil
}

func (b *bench) countErrors(*dir.Dir) (int64, error) { return b.errors.Load(), nil }

func (b *bench) sinceBoot() time.Duration { return time.Duration(b.up.Load()) }

func (b *bench) startNode(name, datadir string) {
	b.t.Helper()
	b.begin(name, datadir)
	must.Succeed(b.t, b.Wait(b.t.Context()))
	b.settled()
}

// begin is a start that does not wait for the pools to be opened.
func (b *bench) begin(name, datadir string) {
	b.t.Helper()
	node, err := volume.ParseNodeID(name)
	must.Succeed(b.t, err)
	configs, err := poolconfig.Parse(datadir, b.root)
	must.Succeed(b.t, err)
	var mounts pool.Mounts = b.mounts
	if b.table != nil {
		mounts = b.table
	}
	b.Set = pool.Start(configs, pool.Options{Node: node, Mounts: mounts, Labels: b.labels, Devices: b.allDevices(), Dev: b.dev, Log: b.log, SystemPath: b.root, DetectQuota: b.detect, CountErrors: b.countErrors, EachVolume: b.each, CheckEvery: b.every, SinceBoot: b.sinceBoot})
	set := b.Set
	b.t.Cleanup(func() { must.Succeed(b.t, set.Close(context.Background())) })
}

// allDevices are those of the node.
func (b *bench) allDevices() pool.Devices {
	if b.devices == nil {
		return b.loops
	}
	return b.devices
}

// inspect inspects pools while the driver of the bench runs.
func (b *bench) inspect(datadir string) []inspect.Pool {
	b.t.Helper()
	return b.inspectAs("node-1", datadir)
}

// inspectAs is inspect on a node.
func (b *bench) inspectAs(name, datadir string) []inspect.Pool {
	b.t.Helper()
	configs, err := poolconfig.Parse(datadir, b.root)
	must.Succeed(b.t, err)
	node, err := volume.ParseNodeID(name)
	must.Succeed(b.t, err)
	options := inspect.Options{Node: node, Mounts: b.mounts, Devices: b.allDevices(), Dev: b.dev, SystemPath: b.root, DetectQuota: b.detect, CountErrors: b.countErrors, SinceBoot: b.sinceBoot, Files: b.files}
	return inspect.Run(b.t.Context(), configs, options).Pools
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

func (b *bench) path(elements ...string) string {
	return filepath.Join(append([]string{b.root}, elements...)...)
}

func (b *bench) own(elements ...string) string {
	return b.path(append([]string{"pool", ".hostpath-provisioner"}, elements...)...)
}

func (b *bench) target(name string) bind.Target {
	b.t.Helper()
	target, err := bind.ParseTarget(b.path("pods", name))
	must.Succeed(b.t, err)
	return target
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
	return b.Publish(b.t.Context(), pool.Publication{ID: id(b.t, name), Target: b.target(target)})
}

func (b *bench) unpublish(name, target string) error {
	b.t.Helper()
	return b.Unpublish(b.t.Context(), id(b.t, name), b.target(target))
}

func (b *bench) capacity() int64 {
	b.t.Helper()
	bytes, err := b.Capacity(volume.PoolName{}, false)
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
	for _, d := range []string{b.own("creating", "node-1"), b.own("trash", "node-1")} {
		if left := names(b.t, d); len(left) > 0 {
			b.t.Errorf("%s has %q, want nothing", d, left)
		}
	}
	for _, file := range names(b.t, b.own("volumes")) {
		if strings.HasPrefix(file, ".") {
			b.t.Errorf("the temporary file %s is left", file)
		}
		volume := strings.TrimSuffix(file, ".json")
		if _, err := os.Stat(b.path("pool", volume)); err != nil {
			b.t.Errorf("the record of %s has no directory: %v", volume, err)
		}
	}
	status := b.Status()[0]
	if status.Trash != 0 {
		b.t.Errorf("%d pieces of trash are counted, want none", status.Trash)
	}
	if sum := b.recorded(); status.Promised != sum {
		b.t.Errorf("the ledger has %d bytes promised, the records %d", status.Promised, sum)
	}
}

// recorded is the sum of the promises on disk.
func (b *bench) recorded() (sum int64) {
	b.t.Helper()
	for _, file := range names(b.t, b.own("volumes")) {
		var record struct {
			Bytes int64 `json:"bytes"`
		}
		data, err := os.ReadFile(b.own("volumes", file))
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

func id(t *testing.T, name string) volume.ID {
	t.Helper()
	parsed, err := volume.ParseID(name)
	must.Succeed(t, err)
	return parsed
}

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
	got, err := b.labels.Get(d)
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
