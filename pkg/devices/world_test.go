package devices_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"github.com/go-logr/logr/testr"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(cleanIn); path != "" {
		bytes, err := strconv.ParseInt(os.Getenv("DEVICES_TEST_BYTES"), 10, 64)
		if err == nil {
			err = cleanUntilKilled(path, bytes, devices.Wipe(os.Getenv("DEVICES_TEST_WIPE")), os.Getenv("DEVICES_TEST_RECORDS"))
		}
		fmt.Println(err)
		os.Exit(1)
	}
	testenv.Main(m)
}

const mib = 1 << 20

// A world is a node with disks, and what its API has. All disks are loop devices of files of the test.
type world struct {
	t       *testing.T
	files   string
	dir     string // the directory of the configuration
	records *devices.Records
	agent   *devices.Agent
	config  devices.Config
	// volumes are what a cache has; api is what the API has, if that is different.
	volumes []devices.Volume
	api     func() ([]devices.Volume, error)
	wiped   int64
}

func newWorld(t *testing.T) *world {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "wipefs")
	w := &world{t: t, files: t.TempDir(), dir: t.TempDir()}
	w.config = devices.Config{VolumeMode: devices.Block, DeviceDir: w.dir, Filter: regexp.MustCompile(`^disk`),
		ExistingData: devices.Keep, Wipe: devices.WipeSignatures}
	var err error
	w.records, err = devices.OpenRecords(t.TempDir())
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, w.records.Close()) })
	w.start()
	t.Cleanup(func() { w.agent.Close() })
	return w
}

// start starts an agent, as after a restart.
func (w *world) start() {
	w.agent = devices.NewAgent(devices.Options{
		Node: "node", Records: w.records, API: w, Log: testr.New(w.t),
		Changed: func() {}, Wiped: func(bytes int64) { w.wiped += bytes },
	})
}

// Volumes is the answer of the API.
func (w *world) Volumes(context.Context) ([]devices.Volume, error) {
	if w.api != nil {
		return w.api()
	}
	return w.volumes, nil
}

// pass does what a pass starts, and answers what the next one reports.
func (w *world) pass() devices.Report {
	w.t.Helper()
	r := devices.Request{Volumes: w.volumes, Wipe: w.config.Wipe, Offer: &w.config, Retry: true}
	w.agent.Pass(r)
	w.agent.Settle()
	r.Retry = false
	return w.agent.Pass(r)
}

// A testDisk is a loop device on a file.
type testDisk struct {
	t *testing.T
	// path is in the directory of the configuration, node is the device itself, and image its file.
	path, node, image string
}

// disk makes a disk that is full of a pattern.
func (w *world) disk(name string, bytes int64) *testDisk {
	w.t.Helper()
	image := filepath.Join(w.files, name)
	file, err := os.Create(image)
	must.Succeed(w.t, err)
	content := pattern()
	for at := int64(0); at < min(bytes, 256*mib); at += mib {
		_, err := file.WriteAt(content, at)
		must.Succeed(w.t, err)
	}
	must.Succeed(w.t, errors.Join(file.Truncate(bytes), file.Close()))
	return w.attach(name, image)
}

// pattern is one MiB without zeroes.
func pattern() []byte {
	content := make([]byte, mib)
	for at := range content {
		content[at] = byte(at%251) + 1
	}
	return content
}

func (w *world) attach(name, image string) *testDisk {
	w.t.Helper()
	device, err := loopfs.Attach(image)
	must.Succeed(w.t, err)
	d := &testDisk{w.t, filepath.Join(w.dir, name), device.Name(), image}
	w.t.Cleanup(func() { device.Close() })
	must.Succeed(w.t, os.Symlink(d.node, d.path))
	return d
}

// sum is of all that is on the disk.
func (d *testDisk) sum() string {
	d.t.Helper()
	device, err := os.Open(d.node)
	must.Succeed(d.t, err)
	defer device.Close()
	h := sha256.New()
	_, err = io.Copy(h, device)
	must.Succeed(d.t, err)
	return string(h.Sum(nil))
}

// untouched fails the test if the disk is not as it is now when that ends.
func (d *testDisk) untouched() {
	d.t.Helper()
	before := d.sum()
	d.t.Cleanup(func() {
		if d.sum() != before {
			d.t.Errorf("%s was written to", d.path)
		}
	})
}

func (d *testDisk) bytes() int64 {
	info, err := os.Stat(d.image)
	must.Succeed(d.t, err)
	return info.Size()
}

// volume is a volume of the disk.
func (d *testDisk) volume(name string) devices.Volume {
	return devices.Volume{Name: name, Path: d.path, Bytes: d.bytes()}
}

func bound(v devices.Volume) devices.Volume {
	v.Used, v.ClaimUID, v.Claim = true, "uid-1", "default/data"
	return v
}

func released(v devices.Volume) devices.Volume {
	v = bound(v)
	v.Used, v.Released = false, true
	return v
}

// offered makes a volume of the only offer.
func (w *world) offered() devices.Offer {
	w.t.Helper()
	r := w.pass()
	if len(r.Offers) != 1 || len(r.Problems) > 0 {
		w.t.Fatalf("offers %+v, problems %v; want one offer", r.Offers, r.Problems)
	}
	o := r.Offers[0]
	must.Succeed(w.t, w.agent.Offering(o))
	w.volumes = append(w.volumes, devices.Volume{Name: o.Name, Path: o.Path, Bytes: o.Bytes})
	w.agent.Offered(o)
	return o
}

// A refusal is a problem that is expected, and so no error.
type refusal devices.Problem

// refused wants a problem of a device, and no offer.
func (w *world) refused(want devices.Reason) refusal {
	w.t.Helper()
	r := w.pass()
	if len(r.Problems) != 1 || r.Problems[0].Reason != want || len(r.Offers) > 0 || len(r.Cleaned) > 0 {
		w.t.Fatalf("problems %v, offers %+v, cleaned %v; want only %s", r.Problems, r.Offers, r.Cleaned, want)
	}
	return refusal(r.Problems[0])
}

func run(t *testing.T, args ...string) {
	t.Helper()
	testenv.NeedPrograms(t, args[0])
	if output, err := exec.CommandContext(context.WithoutCancel(t.Context()), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%q: %v: %s", args, err, output)
	}
}
