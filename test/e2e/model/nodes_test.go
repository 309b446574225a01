package model

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Nodes of a shared pool know each other only by the disk. Each has callers that make,
// publish and delete the same few volumes at once, in real time: which answers they get is a
// matter of luck, so what is checked is what has to hold whatever they are.
func TestConcurrentNodesLoseNoVolume(t *testing.T) {
	testenv.NeedRoot(t)
	long := 30 * time.Second
	if testing.Short() {
		long = 3 * time.Second
	}
	disk := testenv.Tmpfs(t, diskBytes)
	var nodes []*member
	for _, name := range []string{"node-1", "node-2", "node-3"} {
		nodes = append(nodes, join(t, disk, name))
	}
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	end := time.Now().Add(long)
	var callers sync.WaitGroup
	for _, n := range nodes {
		for caller := range 3 {
			callers.Go(func() { n.work(ctx, caller, end) })
		}
	}
	callers.Wait()
	for _, n := range nodes {
		if !n.lucky() {
			t.Errorf("%s never had luck with one of its calls: %v", n.name, n.done)
		}
	}
	wantWholeVolumes(t, disk)
	// A node that starts anew finds nothing to repair, and the same volumes as the others.
	again := join(t, disk, "node-1-again")
	for _, n := range append(nodes, again) {
		n.wantSame(disk)
	}
}

// A member is a node of the shared pool, with a mount table of its own.
type member struct {
	*testing.T
	name, disk string
	set        *pool.Set
	mounts     *bindtest.Fake
	done       map[string]int // how often what succeeded
	mu         sync.Mutex
}

func join(t *testing.T, disk, name string) *member {
	t.Helper()
	m := &member{T: t, name: name, disk: disk, mounts: &bindtest.Fake{}, done: make(map[string]int)}
	root := t.TempDir()
	dev, err := dir.Open(root)
	must.Succeed(m, err)
	loops := looptest.NewFake(dev)
	node, err := volume.ParseNodeID(name)
	must.Succeed(m, err)
	configs, err := poolconfig.Parse(fmt.Sprintf(`[{"name":%q,"path":%q,"shared":true}]`, shared, filepath.Join(disk, "pool")), "/")
	must.Succeed(m, err)
	m.set = pool.Start(configs, pool.Options{
		Node: node, Mounts: m.mounts, Labels: &labeltest.Fake{}, Devices: loops, Dev: dev, DetectQuota: withoutQuotas, Log: logr.Discard(),
	})
	must.Succeed(m, m.set.Wait(t.Context()))
	t.Cleanup(func() {
		must.Succeed(m, errors.Join(m.set.Close(background), m.mounts.Close(), loops.Close(), dev.Close()))
	})
	must.Succeed(m, os.MkdirAll(filepath.Join(disk, "pods", name), 0o755))
	return m
}

func withoutQuotas(*dir.Dir) (quota.Facility, error) { return nil, quota.ErrNone }

// work calls until it is time to end and each call had luck on this node, or ctx ends. Each
// caller has a target of its own, which is empty in the end.
func (m *member) work(ctx context.Context, caller int, end time.Time) {
	target, err := bind.ParseTarget(filepath.Join(m.disk, "pods", m.name, fmt.Sprint(caller)))
	if err != nil {
		m.Error(err)
		return
	}
	for (time.Now().Before(end) || !m.lucky()) && ctx.Err() == nil && !m.Failed() {
		vol := id(ids[rand.IntN(len(ids))])
		switch rand.IntN(3) {
		case 0:
			m.try("create", vol, func() error {
				return must.Err(m.set.Create(ctx, pool.Request{ID: vol, Range: volume.Range{Required: 30 * mib}}))
			})
		case 1:
			m.try("delete", vol, func() error { return m.set.Delete(ctx, vol) })
		case 2:
			m.use(ctx, vol, target)
		}
	}
}

// try does something under the volume's lock on this node, and expects no error but those
// that luck explains.
func (m *member) try(what string, vol volume.ID, do func() error) bool {
	unlock, err := m.set.Lock(vol)
	if err != nil {
		return false // another caller of this node
	}
	defer unlock()
	err = do()
	for _, luck := range []error{volume.ErrNotFound, volume.ErrNoSpace, volume.ErrInUse, volume.ErrBusy} {
		if errors.Is(err, luck) {
			return false
		}
	}
	if err != nil {
		m.Errorf("%s of %s on %s: %v", what, vol, m.name, err)
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done[what]++
	return true
}

// use publishes a vol for one node, and takes it off again. Meanwhile no node may remove it, or
// publish it too.
func (m *member) use(ctx context.Context, vol volume.ID, target bind.Target) {
	publish := func() error { return m.set.Publications().Publish(ctx, pool.Publication{ID: vol, Target: target}) }
	if !m.try("publish", vol, publish) {
		return
	}
	m.wantAlone(vol, 1)
	for range 3 {
		m.wantMounted(vol, target)
	}
	m.wantAlone(vol, -1)
	unpublish := func() error { return m.set.Publications().Unpublish(background, vol, target) }
	for !m.try("unpublish", vol, unpublish) {
		if m.Failed() {
			return
		}
	}
}

// published is how many targets of a volume each node has.
var published struct {
	sync.Mutex
	on map[volume.ID]map[string]int
}

// wantAlone notes that this node has more targets of a volume, or fewer, and expects no other
// node to have any.
func (m *member) wantAlone(vol volume.ID, more int) {
	published.Lock()
	defer published.Unlock()
	if published.on == nil {
		published.on = make(map[volume.ID]map[string]int)
	}
	if published.on[vol] == nil {
		published.on[vol] = make(map[string]int)
	}
	published.on[vol][m.name] += more
	for node, targets := range published.on[vol] {
		if node != m.name && targets > 0 {
			m.Errorf("%s is published on %s and on %s at once", vol, m.name, node)
		}
	}
}

// wantMounted expects the target to have the directory that is in the pool.
func (m *member) wantMounted(vol volume.ID, target bind.Target) {
	mounted, err := m.mounts.Open(target)
	if err != nil {
		m.Errorf("%s on %s is not mounted: %v", vol, m.name, err)
		return
	}
	defer func() { _ = mounted.Close() }()
	there, err := dir.Open(filepath.Join(m.disk, "pool", vol.String()))
	if err != nil {
		m.Errorf("%s was removed while %s has it published: %v", vol, m.name, err)
		return
	}
	defer func() { _ = there.Close() }()
	one, oneErr := mounted.ID()
	other, otherErr := there.ID()
	if err := errors.Join(oneErr, otherErr); err != nil || one != other {
		m.Errorf("%s has something else published than %s, which is in the pool: %v", m.name, vol, err)
	}
}

// lucky reports whether each call has succeeded on this node.
func (m *member) lucky() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.done) == 4
}

// wantSame expects a node to list what is on the disk, in order.
func (m *member) wantSame(disk string) {
	m.Helper()
	page, _ := m.set.List(m.Context(), volume.ID{}, 100)
	var listed []string
	for _, v := range page {
		listed = append(listed, v.ID.String())
		if v.Condition.Abnormal || len(v.Nodes) > 0 {
			m.Errorf("%s reports %s: %+v", m.name, v.ID, v)
		}
	}
	there := volumesOf(m.T, disk)
	if fmt.Sprint(listed) != fmt.Sprint(there) {
		m.Errorf("%s lists %v, and there are %v", m.name, listed, there)
	}
	if _, err := m.set.Capacity(m.Context(), poolName(shared), true); err != nil { // it reads what the others have promised
		m.Error(err)
	}
	if got, want := m.set.Status()[0].Promised, int64(len(there))*30*mib; got != want {
		m.Errorf("%s takes %d bytes for promised, and there are %d", m.name, got, want)
	}
}

// wantWholeVolumes expects each volume to have its record, and nothing to be half done.
func wantWholeVolumes(t *testing.T, disk string) {
	t.Helper()
	own := filepath.Join(disk, "pool", ".hostpath-provisioner")
	var recorded []string
	for _, name := range entries(t, filepath.Join(own, "volumes")) {
		recorded = append(recorded, name[:len(name)-len(".json")])
	}
	if there := volumesOf(t, disk); fmt.Sprint(there) != fmt.Sprint(recorded) {
		t.Errorf("there are the volumes %v, and records of %v", there, recorded)
	}
	for _, part := range []string{"creating", "published"} {
		for _, node := range entries(t, filepath.Join(own, part)) {
			if left := entries(t, filepath.Join(own, part, node)); len(left) > 0 {
				t.Errorf("%s of %s has %v", part, node, left)
			}
		}
	}
}

func volumesOf(t *testing.T, disk string) (names []string) {
	t.Helper()
	for _, name := range entries(t, filepath.Join(disk, "pool")) {
		if name != ".hostpath-provisioner" {
			names = append(names, name)
		}
	}
	return names
}

// entries are sorted.
func entries(t *testing.T, path string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, entry := range all {
		names = append(names, entry.Name())
	}
	return names
}
