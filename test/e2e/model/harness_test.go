package model

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const nodeName = "node-1"

// A harness is a node, and the model of what is on it.
type harness struct {
	*rapid.T
	disks  map[string]string // where those of the pools are mounted
	root   string            // has the rest
	set    *pool.Set
	mounts *bindtest.Fake
	loops  *looptest.Fake
	dev    *dir.Dir
	quota  *quotatest.Fake
	stamps int

	// The model.
	volumes map[string]*modelVolume
	outside map[string]*modelVolume // taken out by hand
	targets map[string]*publication
	left    map[string]bool   // targets that a crash left, and whether for a device
	records map[string][]byte // as they were before they were torn
	foreign map[string]int64  // what a pool takes others to have, as in docs/capacity.md
}

func newHarness(t *rapid.T, disks map[string]string) *harness {
	h := &harness{
		T: t, disks: disks,
		mounts: &bindtest.Fake{}, quota: &quotatest.Fake{},
		volumes: make(map[string]*modelVolume), outside: make(map[string]*modelVolume),
		targets: make(map[string]*publication), left: make(map[string]bool),
		records: make(map[string][]byte), foreign: make(map[string]int64),
	}
	var err error
	h.root, err = os.MkdirTemp("", "model-")
	must.Succeed(h, err)
	for _, name := range []string{"pods", "dev"} {
		must.Succeed(h, os.Mkdir(filepath.Join(h.root, name), 0o755))
	}
	h.dev, err = dir.Open(filepath.Join(h.root, "dev"))
	must.Succeed(h, err)
	h.loops = looptest.NewFake(h.dev)
	for _, in := range pools {
		must.Succeed(h, os.Mkdir(filepath.Join(disks[in], "out"), 0o755))
	}
	h.start()
	return h
}

// end leaves nothing behind, also after a failure.
func (h *harness) end() {
	errs := []error{h.set.Close(background), h.mounts.Close(), h.loops.Close(), h.dev.Close(), os.RemoveAll(h.root)}
	for _, in := range pools {
		for _, name := range []string{"pool", "out"} {
			errs = append(errs, os.RemoveAll(filepath.Join(h.disks[in], name)))
		}
	}
	must.Succeed(h, errors.Join(errs...))
}

func (h *harness) start() {
	node, err := volume.ParseNodeID(nodeName)
	must.Succeed(h, err)
	configs, err := poolconfig.Parse(fmt.Sprintf(`[
		{"name":%q,"path":%q,"reserve":"10%%","bytesPerInode":0},
		{"name":%q,"path":%q,"allocation":"thin","overprovision":2},
		{"name":%q,"path":%q,"shared":true}]`,
		kept, h.path(kept), thin, h.path(thin), shared, h.path(shared)), "/")
	must.Succeed(h, err)
	h.set = pool.Start(configs, pool.Options{
		Node: node, Mounts: h.mounts, Labels: &labeltest.Fake{}, Devices: h.loops, Dev: h.dev,
		DetectQuota: h.detect, CheckEvery: time.Minute, Log: logr.Discard(),
		// A walk takes hours of the bubble's time: by the machine's uptime, inline volumes would count as left behind.
		SinceBoot: func() time.Duration { return 0 },
	})
	must.Succeed(h, h.set.Wait(background))
	h.foreign[thin] = 0 // as the format file has it
	h.wait()
}

func (h *harness) detect(d *dir.Dir) (quota.Facility, error) {
	if d.String() == h.path(kept) {
		return h.quota, nil
	}
	return nil, quota.ErrNone
}

// restart is a new process on the same disk.
func (h *harness) restart() {
	h.Log("restart")
	must.Succeed(h, h.set.Close(background))
	h.start()
}

// wait lets all that is periodic happen, and counting after it.
func (h *harness) wait() {
	synctest.Wait()
	time.Sleep(3 * time.Minute) // the bubble's
	synctest.Wait()
	h.learn()
}

func (h *harness) lock(name string) (unlock func()) {
	unlock, err := h.set.Lock(id(name))
	must.Succeed(h, err)
	return unlock
}

func (h *harness) lockTarget(name, target string) (unlock func()) {
	unlock, err := h.set.Publications().Lock(pool.Publication{ID: id(name), Target: h.target(target), SingleTarget: true})
	must.Succeed(h, err)
	return unlock
}

// path is in a pool's directory, and own in what the driver has there.
func (h *harness) path(in string, elements ...string) string {
	return filepath.Join(append([]string{h.disks[in], "pool"}, elements...)...)
}

func (h *harness) own(in string, elements ...string) string {
	return h.path(in, append([]string{".hostpath-provisioner"}, elements...)...)
}

// entry is the directory of a volume or of a snapshot.
func (h *harness) entry(name string, v *modelVolume) string {
	if isSnapshot(name) {
		return h.own(v.pool, "snapshots", name)
	}
	return h.path(v.pool, name)
}

func isSnapshot(name string) bool { return strings.HasPrefix(name, "~") }

func (h *harness) out(in, name string) string { return filepath.Join(h.disks[in], "out", name) }

func (h *harness) pod(target string) string { return filepath.Join(h.root, "pods", target) }

func (h *harness) target(name string) bind.Target {
	target := must.Value(bind.ParseTarget(h.pod(name)))(h)
	return target
}

// stamp marks a new volume, so that it is known again.
func (h *harness) stamp(name string, v *modelVolume) {
	if v.dir.stamp != "" {
		return
	}
	h.stamps++
	v.dir.stamp = fmt.Sprintf("stamp %04d", h.stamps)
	file, err := os.OpenFile(filepath.Join(h.entry(name, v), v.dir.file()), os.O_WRONLY|os.O_CREATE, 0o600)
	must.Succeed(h, err)
	_, err = file.WriteString(v.dir.stamp)
	must.Succeed(h, errors.Join(err, file.Close()))
}

// file is where the stamp is.
func (d *directory) file() string {
	if d.disk {
		return "disk.img"
	}
	return "stamp"
}

// space is the size of a pool's disk, and what of it is free.
func (h *harness) space(in string) (size, free int64) {
	var st unix.Statfs_t
	must.Succeed(h, unix.Statfs(h.disks[in], &st))
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize
}

func (h *harness) size(in string) int64 {
	size, _ := h.space(in)
	return size
}

func (h *harness) names(path string) map[string]bool {
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		h.Fatal(err)
	}
	all := make(map[string]bool)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".hostpath-") {
			all[e.Name()] = true
		}
	}
	return all
}

func id(name string) volume.ID {
	parsed, err := volume.ParseEntry(name)
	if err != nil {
		panic(err)
	}
	return parsed
}

func poolName(name string) volume.PoolName {
	parsed, err := volume.ParsePoolName(name)
	if err != nil {
		panic(err)
	}
	return parsed
}
