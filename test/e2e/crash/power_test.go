package crash

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// A powered filesystem is one that is tried against a loss of power.
type powered struct {
	kind     string
	format   []string
	options  []string
	enforced bool
}

func poweredFilesystems() []powered {
	xfs := powered{"xfs", []string{"mkfs.xfs", "-q"}, nil, false}
	// What ext4 has left to do after mkfs.ext4 it would do meanwhile, for minutes.
	ext4 := powered{"ext4", []string{"mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"}, nil, false}
	if testenv.Guest() {
		xfs.options, xfs.enforced = []string{"prjquota"}, true
		ext4.options, ext4.enforced = []string{"prjquota"}, true
		ext4.format = append(ext4.format, "-O", "quota,project", "-E", "quotatype=prjquota,lazy_itable_init=0,lazy_journal_init=0")
		if testing.Short() {
			return []powered{xfs}
		}
		return []powered{xfs, ext4}
	}
	return []powered{xfs, ext4, {"btrfs", []string{"mkfs.btrfs", "-q", "-m", "single"}, nil, true}}
}

// A loss is a moment at which the power may go, and what there may be of the volumes then.
type loss struct {
	when   string
	left   disk.Image
	before map[string]state // or, while a call is at work:
	after  map[string]state
}

// What was acknowledged is there when the power goes, whatever of the rest the disk has
// stored. Snapshots, and volumes made from them, are whole or not there.
func TestPowerLoss(t *testing.T) {
	driver := drivertest.Built(t)
	sample := 29 // with -short, one of so many
	if testenv.Guest() {
		sample = 47
	}
	for _, fs := range poweredFilesystems() {
		t.Run(fs.kind, func(t *testing.T) {
			r := &recorder{T: t, fs: fs, random: rand.New(rand.NewPCG(1, 2)), now: make(map[string]state)}
			p := place{name: fs.kind, kind: quota.Kind(fs.kind), enforced: fs.enforced}
			r.record(p, driver)
			t.Logf("%d losses of power", len(r.losses))
			for i, l := range r.losses {
				if testing.Short() && i%sample != 0 {
					continue
				}
				r.verify(p, driver, fmt.Sprintf("%d, %s", i+1, l.when), l)
			}
		})
	}
}

// A recorder makes calls, and keeps what losses of power would leave.
type recorder struct {
	*testing.T
	fs     powered
	random *rand.Rand
	bytes  int64 // of the disk
	now    map[string]state
	losses []loss
}

// record makes the calls on a filesystem whose disk forgets.
func (r *recorder) record(p place, driver string) {
	r.Helper()
	testenv.NeedPrograms(r.T, r.fs.format[0], "mount")
	file := filepath.Join(r.TempDir(), "formatted")
	must.Succeed(r.T, os.WriteFile(file, nil, 0o600))
	must.Succeed(r.T, os.Truncate(file, 320*mib))
	run(r.T, append(slices.Clone(r.fs.format), file)...)
	d := disk.New(r.T, file, r.TempDir())
	must.Succeed(r.T, os.Remove(file))
	r.bytes = d.Bytes
	mountImage(r.T, r.fs.kind, r.fs.options, d.Path, func(mounted string) {
		if r.fs.kind == "btrfs" {
			must.Succeed(r, loopfs.SwitchQuotasOn(r.Context(), mounted))
		}
		p.mounted = mounted
		w := newEmptyWorld(r.T, p, driver, filepath.Join(mounted, "pool"))
		for _, s := range r.calls(w) {
			r.during(d, s, func() { must.Succeed(r.T, s.make().err) })
		}
		for id, is := range r.now {
			if is.published {
				must.Succeed(r.T, w.unpublishOf(id).err)
			}
		}
		must.Succeed(r.T, w.close())
	})
}

// A timed call leads to a state of a volume.
type timed struct {
	name string
	id   string
	to   state
	make func() answer
}

func (r *recorder) calls(h *harness) []timed {
	const directory, raw = "pvc-directory", "pvc-raw"
	creating := func(id string, s state) timed {
		return timed{"create " + id, id, s, func() answer { return h.create(id, s.block, s.bytes) }}
	}
	publishing := func(id string, s state) timed {
		s.published = true
		return timed{"publish " + id, id, s, func() answer { return h.publish(id, s.block, false) }}
	}
	growing := func(id string, s state) timed {
		return timed{"expand " + id, id, s, func() answer { return h.expand(id, s.block, s.bytes) }}
	}
	deleting := func(id string) timed {
		return timed{"delete " + id, id, state{}, func() answer { return h.deleteOf(id) }}
	}
	unpublishing := func(id string, s state) timed {
		return timed{"unpublish " + id, id, s, func() answer { return h.unpublishOf(id) }}
	}
	const second, restored, cloned = "pvc-second", "pvc-restored", "pvc-cloned"
	snapshotting := func(name, of string, block bool) timed {
		return timed{"snapshot " + of, "~" + name, state{block: block, copied: true}, func() answer {
			h.writeUnflushed(of, block)
			a, err := h.Snapshot(h.Context(), name, of, "")
			return answer{a, err}
		}}
	}
	removing := func(name string) timed {
		return timed{"delete snapshot " + name, "~" + name, state{}, func() answer {
			return answer{nil, h.DeleteSnapshot(h.Context(), name+"@"+drivertest.NodeName)}
		}}
	}
	restoring := func(id, from string, s state) timed {
		s.copied = true
		return timed{"restore " + from, id, s, func() answer {
			a, err := h.Restore(h.Context(), asked(id, s.block, s.bytes), from+"@"+drivertest.NodeName)
			return answer{a, err}
		}}
	}
	cloning := func(id, of string, s state) timed {
		s.copied = true
		return timed{"clone " + of, id, s, func() answer {
			a, err := h.Clone(h.Context(), asked(id, s.block, s.bytes), of)
			return answer{a, err}
		}}
	}
	return []timed{
		creating(directory, state{bytes: small}),
		creating(raw, state{bytes: small, block: true}),
		publishing(directory, state{bytes: small}),
		publishing(raw, state{bytes: small, block: true}),
		growing(directory, state{bytes: large, published: true}),
		growing(raw, state{bytes: large, block: true, published: true}),
		unpublishing(raw, state{bytes: large, block: true}),
		deleting(raw),
		creating(second, state{bytes: small}),
		deleting(second),
		creating(second, state{bytes: medium, block: true}),
		snapshotting("of-block", second, blockMode),
		restoring(restored, "of-block", state{bytes: large, block: true}),
		removing("of-block"),
		deleting(restored),
		deleting(second),
		creating(second, state{bytes: small}),
		snapshotting("of-tree", second, mountMode),
		cloning(cloned, second, state{bytes: medium}),
		deleting(second),
		restoring(restored, "of-tree", state{bytes: small}),
	}
}

// writeUnflushed has a user write to a volume. It is not flushed when a snapshot is made.
func (h *harness) writeUnflushed(id string, block bool) {
	h.Helper()
	name := h.pool.Image(id)
	if !block {
		name = filepath.Join(h.pool.Path, id, "sub", "file")
		h.Must(os.Mkdir(filepath.Dir(name), 0o755))
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600)
	h.Must(err)
	_, err = f.WriteString(content)
	h.Must(errors.Join(err, f.Close()))
	h.awaitTick()
}

// during keeps what the power would leave at each flush while a call is at work, and
// right after the answer: of what is not flushed then nothing, all, and some of it.
func (r *recorder) during(d *disk.Disk, c timed, work func()) {
	r.Helper()
	before := asOnDisk(r.now)
	r.now[c.id] = c.to
	after := asOnDisk(r.now)
	flush := 0
	d.OnFlush(func(left disk.Image) {
		flush++
		r.losses = append(r.losses, loss{fmt.Sprintf("after flush %d during %s", flush, c.name), left, before, after})
	})
	work()
	d.OnFlush(nil)
	for _, kept := range []struct {
		share string
		keep  func() bool
	}{
		{"nothing", func() bool { return false }},
		{"all", func() bool { return true }},
		{"half", func() bool { return r.random.IntN(2) == 0 }},
		{"most", func() bool { return r.random.IntN(8) != 0 }},
	} {
		when := fmt.Sprintf("after the answer to %s, with %s of what was not flushed", c.name, kept.share)
		r.losses = append(r.losses, loss{when, d.AfterPowerLoss(kept.keep), after, after})
	}
}

// asOnDisk are the states as a machine finds them that starts anew: nothing is mounted.
func asOnDisk(all map[string]state) map[string]state {
	left := make(map[string]state)
	for id, s := range all {
		s.published = false
		if s != (state{}) {
			left[id] = s
		}
	}
	return left
}

// verify starts the driver on what the power has left.
func (r *recorder) verify(p place, driver, when string, l loss) {
	r.Helper()
	file := filepath.Join(r.TempDir(), "left")
	l.left.Store(r.T, file, r.bytes)
	defer os.Remove(file)
	mountImage(r.T, r.fs.kind, r.fs.options, file, func(mounted string) {
		p.mounted = mounted
		w := newEmptyWorld(r.T, p, driver, filepath.Join(mounted, "pool"))
		w.awaitNoTrash()
		got := must.Value(w.volumes())(r.T)
		before, after := w.differs(got, l.before), w.differs(got, l.after)
		if before != nil && after != nil {
			r.Errorf("%s: there is %+v; want %+v, or what was before: %+v", when, got, l.after, l.before)
		}
		w.wantWhole(when, got)
		must.Succeed(r.T, w.close())
	})
}

// wantWhole expects volumes and snapshots to be in order, with the content of what they were made
// from.
func (h *harness) wantWhole(when string, got map[string]state) {
	h.Helper()
	var all []drivertest.Kept
	for id, s := range got {
		path := filepath.Join(h.pool.Path, id)
		if name, is := strings.CutPrefix(id, "~"); is {
			path = h.pool.Own("snapshots", id)
			h.pool.Snapshots = append(h.pool.Snapshots, name)
		} else {
			all = append(all, kept(id, s))
		}
		if s.copied {
			h.wantContent(when, path, s.block)
		}
	}
	if err := h.pool.Problems(all); err != nil {
		h.Errorf("%s: %v", when, err)
	}
	list, err := h.Snapshots(h.Context(), "")
	if err != nil || len(list) != len(h.pool.Snapshots) {
		h.Errorf("%s: listed are the snapshots %v, %v; want %q", when, list, err, h.pool.Snapshots)
	}
	for _, s := range list {
		if !s.GetReadyToUse() {
			h.Errorf("%s: %v is not ready", when, s)
		}
	}
}

// volumes are those that have a record, and the snapshots: what these are promised is what they hold.
func (h *harness) volumes() (map[string]state, error) {
	all := make(map[string]state)
	names, err := drivertest.Names(h.pool.Own("volumes"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		id := strings.TrimSuffix(name, ".json")
		r, err := h.pool.Record(id)
		if err != nil {
			return nil, err
		}
		all[id] = state{bytes: r.Bytes, block: r.Mode == "block", inline: r.Inline, copied: r.Origin.Method != ""}
		if strings.HasPrefix(id, "~") {
			all[id] = state{block: r.Mode == "block", copied: true}
		}
	}
	return all, nil
}

func (h *harness) differs(got, want map[string]state) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d volumes, want %d", len(got), len(want))
	}
	for id, s := range want {
		if got[id] != s {
			return fmt.Errorf("%s is %+v, want %+v", id, got[id], s)
		}
	}
	return nil
}

// newEmptyWorld starts a driver, which is not killed, on a pool that may be there.
func newEmptyWorld(t *testing.T, p place, driver, pool string) *harness {
	t.Helper()
	w := &harness{place: p, pool: p.pool(pool)}
	w.run(t, driver)
	return w
}

// close lets go of the pool, so that its filesystem can be unmounted.
func (h *harness) close() error {
	return errors.Join(h.Process.Close(), h.UnmountAll(), loopfs.Detach(h.pool.Path))
}

func mounts(t *testing.T, at string) int {
	t.Helper()
	all := must.Value(mountns.Below(at))(t)
	return len(all)
}

func run(t *testing.T, args ...string) {
	t.Helper()
	if output, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%q: %v: %s", args, err, output)
	}
}

// mountImage has a filesystem mounted, in a file or on a disk, while a function works.
func mountImage(t *testing.T, kind string, options []string, file string, work func(mounted string)) {
	t.Helper()
	mounted := filepath.Join(t.TempDir(), "fs")
	must.Succeed(t, os.Mkdir(mounted, 0o755))
	if kind == "btrfs" {
		// The kernel remembers the newest state of each filesystem that it has seen, and
		// refuses to mount an older one.
		run(t, "btrfs", "device", "scan", "--forget")
	}
	must.Succeed(t, loopfs.MountImage(t.Context(), file, mounted, kind, options...))
	t.Cleanup(func() {
		if mounts(t, mounted) > 0 {
			must.Succeed(t, loopfs.Unmount(mounted))
		}
	})
	work(mounted)
	must.Succeed(t, loopfs.Unmount(mounted))
}
