// Package devicestest has nodes with disks for tests of what pkg/devices does to them: real devices full of a pattern,
// and an agent whose API is a list.
package devicestest

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

const mib = 1 << 20

// A Harness is a node with disks, and what its API has.
type Harness struct {
	*testing.T
	// Dir is the directory of the configuration.
	Dir     string
	Config  devices.Config
	Records *devices.Records
	Agent   *devices.Agent
	// PVs are what a cache has; API is what the API has, if that is different.
	PVs []devices.Volume
	API func() ([]devices.Volume, error)
	// Reserved are the nodes that have reserved disks, which other harnesses may share.
	Reserved *sync.Map
	// Settle is the agent's, which is given the time Now, and Attaching the volume that is being attached to the node.
	Settle   time.Duration
	Now      time.Time
	Attached string
	// Root is its root directory, if it is not that of this machine.
	Root string
	// Hostname is its name.
	Hostname string
	// Taken are names of volumes of other nodes.
	Taken map[string]bool
	// Identified says that the agent knows disks by their files.
	Identified bool
	// Step is called after each step of cleaning, if it is set.
	Step func()

	files, recordDir string
	wiped            atomic.Int64
	changed          chan struct{}
}

// New makes a node without disks, whose configuration offers those whose name begins with "disk".
func New(t *testing.T) *Harness {
	t.Helper()
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "wipefs")
	h := &Harness{T: t, Hostname: "node", Reserved: new(sync.Map), files: t.TempDir(), Dir: t.TempDir(), changed: make(chan struct{}, 1)}
	h.Config = devices.Config{VolumeMode: devices.Block, DeviceDir: h.Dir, Filter: regexp.MustCompile(`^disk`),
		Wipe: devices.WipeSignatures}
	h.Open(t.TempDir())
	h.Start()
	t.Cleanup(func() { h.Agent.Close() })
	return h
}

// Open has the records of a directory be those of the node.
func (h *Harness) Open(dir string) {
	h.Helper()
	records, err := devices.OpenRecords(dir)
	must.Succeed(h, err)
	h.Records, h.recordDir = records, dir
	h.Cleanup(func() { must.Succeed(h, records.Close()) })
}

// DamageRecords has no record be one.
func (h *Harness) DamageRecords() {
	h.Helper()
	records, err := filepath.Glob(filepath.Join(h.recordDir, "*.json"))
	must.Succeed(h, err)
	for _, record := range records {
		must.Succeed(h, os.WriteFile(record, []byte("{"), 0o600))
	}
}

// Start starts an agent, as after a restart.
func (h *Harness) Start() {
	view := View()
	view.Root = h.Root
	h.Agent = devices.NewAgent(devices.Options{
		Settle: h.Settle, Now: func() time.Time { return h.Now },
		Node: h.Hostname, Records: h.Records, API: h, Log: testr.New(h.T), View: view,
		Changed: func() {
			select {
			case h.changed <- struct{}{}:
			default:
			}
		},
		Wiped: func(bytes int64) {
			h.wiped.Add(bytes)
			if h.Step != nil {
				h.Step()
			}
		},
	})
}

// View is of all processes but those that this machine hides from its tests, and those of the tests of other packages: what these
// mount below a directory whose server is gone may be any device.
func View() blockdev.View {
	hidden := make(map[int]bool)
	links, _ := filepath.Glob("/proc/[0-9]*/fd") // the pattern is right
	for _, dir := range links {
		entries, err := os.ReadDir(dir)
		if err == nil && len(entries) > 0 {
			_, err = os.Readlink(filepath.Join(dir, entries[0].Name()))
		}
		if pid, badPid := strconv.Atoi(filepath.Base(filepath.Dir(dir))); badPid == nil && errors.Is(err, fs.ErrPermission) {
			hidden[pid] = true
		}
	}
	own, first := mountsOf("self"), mountsOf("1")
	return blockdev.View{Unseen: func(pid int) bool {
		if hidden[pid] {
			return true
		}
		namespace := mountsOf(strconv.Itoa(pid))
		return namespace != own && namespace != first && !isDescendant(pid)
	}, UnseenLoop: testenv.IsLoopOfOthers}
}

// mountsOf is the mount namespace of a process.
func mountsOf(pid string) string {
	namespace, err := os.Readlink(filepath.Join("/proc", pid, "ns", "mnt"))
	if err != nil {
		return "" // it has ended
	}
	return namespace
}

// isDescendant reports whether these tests have started a process. Those of another package have mount namespaces of their own
// (testenv.Main), too.
func isDescendant(pid int) bool {
	for pid > 1 && pid != os.Getpid() {
		stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
		if err != nil {
			return false // it has ended
		}
		// After the name, which may have any character, are the state and the parent (proc_pid_stat(5)).
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if pid, err = strconv.Atoi(fields[1]); err != nil {
			return false
		}
	}
	return pid == os.Getpid()
}

// Restart ends the agent, and starts another one.
func (h *Harness) Restart() {
	h.Agent.Close()
	h.Start()
}

// Volumes implements devices.API.
func (h *Harness) Volumes(context.Context) ([]devices.Volume, map[string]bool, error) {
	if h.API != nil {
		volumes, err := h.API()
		return volumes, h.Taken, err
	}
	return h.PVs, h.Taken, nil
}

// Attaching implements devices.API.
func (h *Harness) Attaching(context.Context) (string, error) { return h.Attached, nil }

// Reserve implements devices.API.
func (h *Harness) Reserve(_ context.Context, disk string) (string, error) {
	node, _ := h.Reserved.LoadOrStore(disk, h.Hostname)
	return node.(string), nil
}

// Wiped is how many bytes were overwritten.
func (h *Harness) Wiped() int64 { return h.wiped.Load() }

// Changed has something each time when a pass would find something new.
func (h *Harness) Changed() <-chan struct{} { return h.changed }

// Request is what a pass works on.
func (h *Harness) Request() devices.Request {
	reserved := []string{}
	h.Reserved.Range(func(disk, node any) bool {
		if node == h.Hostname {
			reserved = append(reserved, disk.(string))
		}
		return true
	})
	return devices.Request{Volumes: h.PVs, Wipe: h.Config.Wipe, Offer: &h.Config, Reserved: reserved}
}

// Answer does what a report asks for with disks that are reserved, or are not.
func (h *Harness) Answer(r devices.Report) {
	h.Helper()
	for _, disk := range r.NotReserved {
		must.Succeed(h, h.Agent.Reserve(h.Context(), disk))
	}
	for _, disk := range r.GivenUp {
		h.Reserved.CompareAndDelete(disk, h.Hostname)
		h.Agent.Unreserved(disk)
	}
}

// Pass starts what a pass starts, waits for it, and returns what is reported then. Where the first process of the machine is hidden from its
// tests, a process that it starts can be so for a moment: then it is looked again, as an agent does.
func (h *Harness) Pass() devices.Report {
	h.Helper()
	hidden := func(p devices.Problem) bool { return p.Reason == devices.Hidden }
	for tries := 1; ; tries++ {
		report := h.pass()
		if tries < 5 && slices.ContainsFunc(report.Problems, hidden) {
			continue
		}
		for _, p := range report.Problems {
			must.SayOnce(h, p.Error())
		}
		return report
	}
}

func (h *Harness) pass() devices.Report {
	h.Helper()
	r := h.Request()
	r.Retry = true
	for _, disk := range h.Agent.Pass(r).NotReserved {
		must.Succeed(h, h.Agent.Reserve(h.Context(), disk))
	}
	r.Retry, r.Reserved = false, nil
	for {
		report := h.Agent.Pass(r)
		if len(report.Wiping) == 0 {
			return report
		}
		<-h.changed
	}
}

// Offered makes a volume of the only offer.
func (h *Harness) Offered() devices.Offer {
	h.Helper()
	r := h.Pass()
	if len(r.Offers) != 1 || len(r.Problems) > 0 {
		h.Fatalf("offers %+v, problems %v; want one offer", r.Offers, r.Problems)
	}
	o := r.Offers[0]
	must.Succeed(h, h.Agent.Offering(h.Context(), o))
	v := devices.Volume{Name: o.Name, UID: "uid of " + o.Name, Path: o.Path, Bytes: o.Bytes, Identity: o.Identity, Unidentified: o.Identity == ""}
	h.PVs = append(h.PVs, v)
	must.Succeed(h, h.Agent.Offered(o, v.UID, nil))
	return o
}

// A Refusal is a problem that is expected, and so no error.
type Refusal devices.Problem

// Refused wants a problem of a device, and nothing else.
func (h *Harness) Refused(want devices.Reason) Refusal {
	h.Helper()
	r := h.Pass()
	if len(r.Problems) != 1 || r.Problems[0].Reason != want || len(r.Offers) > 0 || len(r.Cleaned) > 0 {
		h.Fatalf("problems %v, offers %+v, cleaned %v; want only %s", r.Problems, r.Offers, r.Cleaned, want)
	}
	return Refusal(r.Problems[0])
}

// A Disk is a device of the node.
type Disk struct {
	testing.TB
	// Path is in the directory of the configuration, Node is the device itself, and Image its file, if it has one.
	Path, Node, Image string
}

// CountNothing has the kernel not count what is read from a disk and written to it, as an administrator may, and some drivers do.
func CountNothing(d *Disk) {
	d.Helper()
	iostats := filepath.Join("/sys/block", filepath.Base(d.Node), "queue/iostats")
	must.Succeed(d, os.WriteFile(iostats, []byte("0"), 0))
	d.Cleanup(func() { must.Succeed(d, os.WriteFile(iostats, []byte("1"), 0)) })
}

// Disk makes a disk, a loop device, that is full of a pattern up to 256 MiB.
func (h *Harness) Disk(name string, bytes int64) *Disk {
	h.Helper()
	image := filepath.Join(h.files, name)
	file, err := os.Create(image)
	must.Succeed(h, err)
	fill(h, file, min(bytes, 256*mib))
	must.Succeed(h, errors.Join(file.Truncate(bytes), file.Close()))
	return h.Attach(name, image)
}

func fill(t testing.TB, to io.WriterAt, bytes int64) {
	t.Helper()
	content := Pattern()
	for at := int64(0); at < bytes; at += mib {
		_, err := to.WriteAt(content, at)
		must.Succeed(t, err)
	}
}

// Pattern is one MiB without zeroes.
func Pattern() []byte {
	content := make([]byte, mib)
	for at := range content {
		content[at] = byte(at%251) + 1
	}
	return content
}

// Blank makes a disk, a loop device, that reads as zeroes.
func (h *Harness) Blank(name string, bytes int64) *Disk {
	h.Helper()
	image := filepath.Join(h.files, name)
	must.Succeed(h, os.WriteFile(image, nil, 0o600))
	must.Succeed(h, os.Truncate(image, bytes))
	return h.Attach(name, image)
}

// Attach makes a file a disk, as it is.
func (h *Harness) Attach(name, image string) *Disk {
	h.Helper()
	device, err := loopfs.Attach(image)
	must.Succeed(h, err)
	h.Cleanup(func() { device.Close() })
	d := h.Link(name, device.Name())
	d.Image = image
	return d
}

// Link makes a device that there is a disk, as it is.
func (h *Harness) Link(name, node string) *Disk {
	h.Helper()
	d := &Disk{TB: h, Path: filepath.Join(h.Dir, name), Node: node}
	must.Succeed(h, os.Symlink(node, d.Path))
	return d
}

// Fill overwrites the disk with the pattern.
func (d *Disk) Fill() {
	d.Helper()
	device, err := os.OpenFile(d.Node, os.O_RDWR, 0)
	must.Succeed(d, err)
	fill(d, device, d.Bytes())
	must.Succeed(d, errors.Join(device.Sync(), device.Close()))
}

// Write has the disk begin with this.
func (d *Disk) Write(content []byte) {
	d.Helper()
	d.WriteAt(content, 0)
}

// WriteAt has the disk have this at an offset.
func (d *Disk) WriteAt(content []byte, offset int64) {
	d.Helper()
	device, err := os.OpenFile(d.Node, os.O_RDWR, 0)
	must.Succeed(d, err)
	_, err = device.WriteAt(content, offset)
	must.Succeed(d, errors.Join(err, device.Sync(), device.Close()))
}

// Resize gives the disk's file, and so the disk, another size, in bytes.
func (d *Disk) Resize(bytes int64) error {
	if err := os.Truncate(d.Image, bytes); err != nil {
		return err
	}
	return loopfs.Resized(d.Node)
}

// Bytes is the size of the disk.
func (d *Disk) Bytes() int64 {
	d.Helper()
	device, err := os.Open(d.Node)
	must.Succeed(d, err)
	defer device.Close()
	bytes, err := device.Seek(0, io.SeekEnd)
	must.Succeed(d, err)
	return bytes
}

var seed = maphash.MakeSeed()

// Sum is of all that is on the disk.
func (d *Disk) Sum() uint64 {
	d.Helper()
	device, err := os.Open(d.Node)
	must.Succeed(d, err)
	defer device.Close()
	var h maphash.Hash // an emulated processor takes a hundred times as long for SHA-256
	h.SetSeed(seed)
	_, err = io.Copy(&h, device)
	must.Succeed(d, err)
	return h.Sum64()
}

// Untouched fails the test if the disk is not as it is now, in any byte, when that ends, or the kernel has counted a write.
func (d *Disk) Untouched() {
	d.Helper()
	before, written := d.Sum(), d.Written()
	d.Cleanup(func() {
		if now := d.Written(); d.Sum() != before || now != written {
			d.Errorf("%s was written to: %q, and before %q", d.Path, now, written)
		}
	})
}

// Written are the sectors that the kernel has counted, after all was written that is in the page cache. It counts a flush as a request.
func (d *Disk) Written() string {
	d.Helper()
	device, err := os.OpenFile(d.Node, os.O_RDWR, 0)
	must.Succeed(d, err)
	must.Succeed(d, errors.Join(device.Sync(), device.Close()))
	counts := strings.Fields(d.facts().Written())
	for n := range len(counts) / 2 {
		counts[n] = counts[2*n+1]
	}
	return strings.Join(counts[:len(counts)/2], " ")
}

// Number identifies the disk.
func (d *Disk) Number() blockdev.Number {
	d.Helper()
	number, err := blockdev.At(d.Node)
	must.Succeed(d, err)
	return number
}

func (d *Disk) facts() blockdev.Facts {
	d.Helper()
	facts, err := blockdev.Inspect(d.Number())
	must.Succeed(d, err)
	if h, ok := d.TB.(*Harness); ok && h.Identified {
		facts.Identity = facts.Alike
	}
	return facts
}

// Volume is a volume of the disk.
func (d *Disk) Volume(name string) devices.Volume {
	d.Helper()
	identity := d.facts().Identity
	return devices.Volume{Name: name, UID: "uid of " + name, Path: d.Path, Bytes: d.Bytes(), Identity: identity, Unidentified: identity == ""}
}

// PassUntilCleaning has the agent begin to clean, which stays at its first step until goOn.
func (h *Harness) PassUntilCleaning() (goOn func()) {
	begun, end := make(chan struct{}), make(chan struct{})
	h.Step = func() {
		h.Step = nil
		close(begun)
		<-end
	}
	h.Agent.Pass(h.Request())
	<-begun
	return func() { close(end) }
}

// Identity is what a disk with a file is known by, alone or with others.
func (d *Disk) Identity() string { return "backing_file=" + d.Image }

// WantZero wants zeroes on a part of the disk, in bytes.
func (d *Disk) WantZero(from, to int64) {
	d.Helper()
	d.want(from, to, make([]byte, mib))
}

// WantPattern wants the pattern on a part of the disk, in bytes.
func (d *Disk) WantPattern(from, to int64) {
	d.Helper()
	d.want(from, to, Pattern())
}

func (d *Disk) want(from, to int64, content []byte) {
	d.Helper()
	device, err := os.Open(d.Node)
	must.Succeed(d, err)
	defer device.Close()
	buffer := make([]byte, mib)
	for at := from; at < to; at += mib {
		_, err := device.ReadAt(buffer, at)
		must.Succeed(d, err)
		if !bytes.Equal(buffer, content) {
			d.Fatalf("the MiB at %d of %s is not as it should be", at, d.Path)
		}
	}
}

// WantNoSignature asks util-linux.
func (d *Disk) WantNoSignature() {
	d.Helper()
	output, err := exec.CommandContext(d.Context(), "wipefs", "--no-act", d.Node).CombinedOutput()
	if err != nil || len(output) > 0 {
		d.Errorf("signatures on %s: %s, %v; want none", d.Node, output, err)
	}
}

// Bound is a volume that a claim has.
func Bound(v devices.Volume) devices.Volume {
	v.Used, v.Bound, v.ClaimUID, v.Claim = true, true, "uid-1", "default/data"
	return v
}

// Released is a volume whose claim was deleted.
func Released(v devices.Volume) devices.Volume {
	v = Bound(v)
	v.Used, v.Bound, v.Released = false, false, true
	return v
}

// Released is a volume whose claim was deleted, of which the node has a record.
func (h *Harness) Released(v devices.Volume) devices.Volume {
	h.Helper()
	released := Released(v)
	record, err := h.Records.Get(v.Path)
	must.Succeed(h, err)
	if record.State == "" {
		number, err := blockdev.At(v.Path)
		must.Succeed(h, err)
		facts, err := blockdev.Inspect(number)
		must.Succeed(h, err)
		if v.Identity != "" {
			facts.Alike = ""
		}
		instance, err := facts.Instance()
		must.Succeed(h, err)
		must.Succeed(h, h.Records.Put(devices.Record{Path: v.Path, Bytes: v.Bytes, Identity: v.Identity, Alike: facts.Alike, Instance: instance, State: devices.Bound,
			Volume: v.Name, VolumeUID: v.UID, ClaimUID: released.ClaimUID, Claim: released.Claim}))
	}
	return released
}

// Run runs a program, which has to succeed.
func Run(t testing.TB, args ...string) {
	t.Helper()
	testenv.NeedPrograms(t, args[0])
	if output, err := exec.CommandContext(context.WithoutCancel(t.Context()), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%q: %v: %s", args, err, output)
	}
}
