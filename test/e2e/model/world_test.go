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

// A world is a node, and the model of what is on it.
type world struct {
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

func newWorld(t *rapid.T, disks map[string]string) *world {
	w := &world{
		T: t, disks: disks,
		mounts: &bindtest.Fake{}, quota: &quotatest.Fake{},
		volumes: make(map[string]*modelVolume), outside: make(map[string]*modelVolume),
		targets: make(map[string]*publication), left: make(map[string]bool),
		records: make(map[string][]byte), foreign: make(map[string]int64),
	}
	var err error
	w.root, err = os.MkdirTemp("", "model-")
	must.Succeed(w, err)
	for _, name := range []string{"pods", "dev"} {
		must.Succeed(w, os.Mkdir(filepath.Join(w.root, name), 0o755))
	}
	w.dev, err = dir.Open(filepath.Join(w.root, "dev"))
	must.Succeed(w, err)
	w.loops = looptest.NewFake(w.dev)
	for _, in := range pools {
		must.Succeed(w, os.Mkdir(filepath.Join(disks[in], "out"), 0o755))
	}
	w.start()
	return w
}

// end leaves nothing behind, also after a failure.
func (w *world) end() {
	errs := []error{w.set.Close(background), w.mounts.Close(), w.loops.Close(), w.dev.Close(), os.RemoveAll(w.root)}
	for _, in := range pools {
		for _, name := range []string{"pool", "out"} {
			errs = append(errs, os.RemoveAll(filepath.Join(w.disks[in], name)))
		}
	}
	must.Succeed(w, errors.Join(errs...))
}

func (w *world) start() {
	node, err := volume.ParseNodeID(nodeName)
	must.Succeed(w, err)
	configs, err := poolconfig.Parse(fmt.Sprintf(`[
		{"name":%q,"path":%q,"reserve":"10%%","bytesPerInode":0},
		{"name":%q,"path":%q,"allocation":"thin","overprovision":2},
		{"name":%q,"path":%q,"shared":true}]`,
		kept, w.path(kept), thin, w.path(thin), shared, w.path(shared)), "/")
	must.Succeed(w, err)
	w.set = pool.Start(configs, pool.Options{
		Node: node, Mounts: w.mounts, Labels: &labeltest.Fake{}, Devices: w.loops, Dev: w.dev,
		DetectQuota: w.detect, CheckEvery: time.Minute, Log: logr.Discard(),
		// A walk takes hours of the bubble's time: by the machine's uptime, inline volumes would count as left behind.
		SinceBoot: func() time.Duration { return 0 },
	})
	must.Succeed(w, w.set.Wait(background))
	w.foreign[thin] = 0 // as the format file has it
	w.wait()
}

func (w *world) detect(d *dir.Dir) (quota.Facility, error) {
	if d.String() == w.path(kept) {
		return w.quota, nil
	}
	return nil, quota.ErrNone
}

// restart is a new process on the same disk.
func (w *world) restart() {
	w.Log("restart")
	must.Succeed(w, w.set.Close(background))
	w.start()
}

// wait lets all that is periodic happen, and counting after it.
func (w *world) wait() {
	synctest.Wait()
	time.Sleep(3 * time.Minute) // the bubble's
	synctest.Wait()
	w.learn()
}

func (w *world) lock(name string) (unlock func()) {
	unlock, err := w.set.Lock(id(name))
	must.Succeed(w, err)
	return unlock
}

func (w *world) lockTarget(name, target string) (unlock func()) {
	unlock, err := w.set.Publications().Lock(pool.Publication{ID: id(name), Target: w.target(target), SingleTarget: true})
	must.Succeed(w, err)
	return unlock
}

// path is in a pool's directory, and own in what the driver has there.
func (w *world) path(in string, elements ...string) string {
	return filepath.Join(append([]string{w.disks[in], "pool"}, elements...)...)
}

func (w *world) own(in string, elements ...string) string {
	return w.path(in, append([]string{".hostpath-provisioner"}, elements...)...)
}

// entry is the directory of a volume or of a snapshot.
func (w *world) entry(name string, v *modelVolume) string {
	if isSnapshot(name) {
		return w.own(v.pool, "snapshots", name)
	}
	return w.path(v.pool, name)
}

func isSnapshot(name string) bool { return strings.HasPrefix(name, "~") }

func (w *world) out(in, name string) string { return filepath.Join(w.disks[in], "out", name) }

func (w *world) pod(target string) string { return filepath.Join(w.root, "pods", target) }

func (w *world) target(name string) bind.Target {
	target, err := bind.ParseTarget(w.pod(name))
	must.Succeed(w, err)
	return target
}

// stamp marks a new volume, so that it is known again.
func (w *world) stamp(name string, v *modelVolume) {
	if v.dir.stamp != "" {
		return
	}
	w.stamps++
	v.dir.stamp = fmt.Sprintf("stamp %04d", w.stamps)
	file, err := os.OpenFile(filepath.Join(w.entry(name, v), v.dir.file()), os.O_WRONLY|os.O_CREATE, 0o600)
	must.Succeed(w, err)
	_, err = file.WriteString(v.dir.stamp)
	must.Succeed(w, errors.Join(err, file.Close()))
}

// file is where the stamp is.
func (d *directory) file() string {
	if d.disk {
		return "disk.img"
	}
	return "stamp"
}

// space is the size of a pool's disk, and what of it is free.
func (w *world) space(in string) (size, free int64) {
	var st unix.Statfs_t
	must.Succeed(w, unix.Statfs(w.disks[in], &st))
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize
}

func (w *world) size(in string) int64 {
	size, _ := w.space(in)
	return size
}

func (w *world) names(path string) map[string]bool {
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.Fatal(err)
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
