package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

const (
	withoutSocket = ", without the socket"
	// making is what making a volume may cost, as a multiple of the limit.
	making = 1.5
	// fullBytes is enough for the names of a great many files.
	fullBytes = 1 << 30
	// inEach is how many files are in a directory.
	inEach = 1000
	// inFlight is how many volumes are asked for at once.
	inFlight = 16
	// pageEntries are so many that what the page itself costs does not count.
	pageEntries = 100
	// statsID is the volume of each pool that is published.
	statsID = "pvc-0-stats"
	// scrapes are so many that the driver's memory has seen what each of them takes.
	scrapes = 20
	// diskFile is the file of a block volume in its directory.
	diskFile = "disk.img"
)

// mountRows compare publishing with the system calls that it cannot do without:
// through the socket, where no call can cost less than an empty one, and without it.
func mountRows(h *harness) []row {
	const id, name = "pvc-mount", "pvc-inside"
	a := h.enter("fs")
	pools, inside, target := a.inside(), got(volume.ParseID(name)), got(bind.ParseTarget(a.Target(name)))
	got(pools.Create(h.ctx, pool.Request{ID: inside, Range: volume.Range{Required: volumeBytes}}))
	a.create(id, volumeBytes)()
	bareTarget := a.Target("bare")
	check(os.MkdirAll(filepath.Dir(bareTarget), 0o750), os.Mkdir(filepath.Dir(target.String()), 0o750))
	bare := pair{
		func() { bindMount(filepath.Join(a.pool(), id), bareTarget) },
		func() { check(unix.Unmount(bareTarget, unix.UMOUNT_NOFOLLOW), unix.Rmdir(bareTarget)) }, nothing,
	}
	within := pair{
		func() { check(pools.Publications().Publish(h.ctx, pool.Publication{ID: inside, Target: target})) },
		func() { check(pools.Publications().Unpublish(h.ctx, inside, target)) }, nothing,
	}
	publish, unpublish := row{name: "NodePublishVolume", budget: budget{atMost: 3}}, row{name: "NodeUnpublishVolume", budget: budget{atMost: 2}}
	rows := both("", h.samples, pair{a.publish(id), a.unpublish(id), nothing}, a.asked(bare), publish, unpublish)
	rows = append(rows, both(withoutSocket, h.samples, within, bare, publish, unpublish)...)
	return append(rows, row{name: "an empty call", unit: micros, samples: h.samples, ours: timed(nothing, a.ask, nothing)})
}

// bindMount makes a directory appear at a path that is not there yet, by what the
// kernel needs for it and nothing else.
func bindMount(source, target string) {
	check(os.Mkdir(target, 0o750))
	tree := got(unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC))
	check(unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Propagation: unix.MS_PRIVATE}))
	check(unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH), unix.Close(tree))
}

// callRows compare the calls that come all day with one that does nothing.
func callRows(h *harness) []row {
	const id = "pvc-stats"
	a := h.enter("fs")
	inOrder(a.create(id, volumeBytes), a.publish(id))()
	one := func(name string, call action) row {
		return row{name, micros, budget{atMost: 1.5}, h.samples, timed(nothing, call, nothing), timed(nothing, a.ask, nothing)}
	}
	return []row{one("NodeGetVolumeStats", a.stats(id)), one("GetCapacity", a.capacity)}
}

// creationRows compare making and removing a volume with what the disk and the
// kernel have to do for it, through the socket and without it.
func creationRows(h *harness) []row {
	const name = "pvc-new"
	a := h.enter("fs")
	pools, id, bare := a.inside(), got(volume.ParseID(name)), h.maker(a.beside("bare")).volume(name)
	within := pair{
		func() { got(pools.Create(h.ctx, pool.Request{ID: id, Range: volume.Range{Required: volumeBytes}})) },
		func() { check(pools.Delete(h.ctx, id)) }, h.settled(a.beside("inside")),
	}
	create, remove := row{name: "CreateVolume", budget: budget{atMost: making}}, row{name: "DeleteVolume", budget: budget{atMost: 2}}
	rows := both("", h.fewer(3), a.volume(name), a.asked(bare), create, remove)
	return append(rows, both(withoutSocket, h.fewer(3), within, bare, create, remove)...)
}

// fewer is the number of samples of what takes so much longer than microseconds.
func (o order) fewer(times int) int { return max(1, o.samples/times) }

// removalRows compare removing a volume that is full of files with removing one that has none.
func removalRows(h *harness) []row {
	const full, fresh = "pvc-full", "pvc-fresh"
	a := h.enter("fs")
	// While the files are made the driver sleeps, and its first call is slower.
	awake := func() {
		for range h.samples {
			a.ask()
		}
	}
	fill := func() { scatter(filepath.Join(a.pool(), full), h.files, nil) }
	rest := h.settled(a.pool())
	return []row{{
		name: fmt.Sprintf("DeleteVolume with %s files", thousands(h.files)), unit: micros, budget: budget{atMost: 2},
		ours:  timed(inOrder(a.create(full, fullBytes), fill, awake), a.remove(full), rest),
		limit: timed(inOrder(a.create(fresh, volumeBytes), awake), a.remove(fresh), rest),
	}}
}

// scatter makes files of one content in directories, and brings them to the disk: what waits
// to be written would be written by the next process that syncs.
func scatter(path string, files int, content []byte) {
	for i := range files {
		d := filepath.Join(path, fmt.Sprintf("dir-%d", i/inEach))
		if i%inEach == 0 {
			check(os.Mkdir(d, 0o755))
		}
		check(os.WriteFile(filepath.Join(d, fmt.Sprintf("file-%d", i)), content, 0o600))
	}
	syncfs(path)
}

func syncfs(path string) {
	d := got(os.Open(path))
	check(unix.Syncfs(int(d.Fd())), d.Close())
}

// parallelRows compare how many volumes are made in a second when many are asked for at once.
func parallelRows(h *harness) []row {
	a := h.enter("fs")
	m := h.maker(a.beside("bare"))
	count := max(inFlight, h.samples)
	rate := func(of func(id string) pair) func() float64 {
		each := func(choose func(pair) action) action {
			return func() { inParallel(count, func(i int) { choose(of(fmt.Sprintf("pvc-%d", i)))() }) }
		}
		took := timed(nothing, each(func(p pair) action { return p.do }), each(func(p pair) action { return inOrder(p.undo, p.rest) }))
		return func() float64 { return float64(count) * 1e6 / took() }
	}
	return []row{{
		name: fmt.Sprintf("CreateVolume, %d in flight", inFlight), unit: "/s", budget: budget{atLeast: 1 / making}, ours: rate(a.volume),
		limit: rate(func(id string) pair {
			return pair{inOrder(a.ask, m.volume(id).do), m.volume(id).undo, m.volume(id).rest}
		}),
	}}
}

// inParallel does something count times, inFlight at a time.
func inParallel(count int, do func(i int)) {
	numbers := make(chan int)
	problems := make([]error, inFlight)
	var workers sync.WaitGroup
	for worker := range problems {
		workers.Go(func() {
			for i := range numbers {
				problems[worker] = errors.Join(problems[worker], try(func() { do(i) }))
			}
		})
	}
	for i := range count {
		numbers <- i
	}
	close(numbers)
	workers.Wait()
	check(problems...)
}

// scaleRows compare a driver whose pool has many volumes with one whose pool has a tenth of them or none. All of
// them run at the same time.
func scaleRows(h *harness) []row {
	none, tenth, many := h.enterWith(0), h.enterWith(h.volumes/10), h.enterWith(h.volumes)
	with := ", " + thousands(h.volumes) + " volumes"
	one := func(name string, fewer int, how func(a *actor) func() float64, other *actor) row {
		return row{name + with, micros, budget{atMost: 1.5}, h.fewer(fewer), how(many), how(other)}
	}
	// Compared with an empty call of the same driver.
	empty := func(name string, call action, atMost float64) row {
		return row{name + with, micros, budget{atMost: atMost}, h.fewer(3), timed(nothing, call, nothing), timed(nothing, many.ask, nothing)}
	}
	start := func(a *actor) func() float64 { return timed(func() { check(a.Process.Stop()) }, a.restart, nothing) }
	const fresh = "pvc-1-new"
	return []row{
		one("CreateVolume", 10, func(a *actor) func() float64 {
			return timed(nothing, a.volume(fresh).do, inOrder(a.volume(fresh).undo, a.volume(fresh).rest))
		}, none),
		one("NodeGetVolumeStats", 3, func(a *actor) func() float64 { return timed(nothing, a.stats(statsID), nothing) }, none),
		one("GetCapacity", 3, func(a *actor) func() float64 { return timed(nothing, a.capacity, nothing) }, none),
		one(fmt.Sprintf("ListVolumes, a page of %d", pageEntries), 3, func(a *actor) func() float64 { return timed(nothing, a.page, nothing) }, tenth),
		empty("NodeGetVolumeHealth", many.volumeHealth, 1.5),
		empty("ControllerListVolumeHealth, all healthy", many.listIll, 2),
		// Starts come last: the calls are of drivers that have been running for a while.
		{name: "start" + with, unit: micros, budget: budget{max: 0.5e6}, ours: start(many), limit: timed(nothing, many.readRecords, nothing)},
		{name: "start, no volumes", unit: micros, ours: start(none)},
		{name: "memory" + with, unit: "MiB", budget: budget{max: 48}, ours: many.memory},
		{name: "memory, no volumes", unit: "MiB", ours: none.memory},
	}
}

// enterWith starts a driver on a pool with volumes, and one more.
func (h *harness) enterWith(volumes int) *actor {
	a := h.enter("fs")
	// Names are as long as external-provisioner makes them: the driver remembers all of them.
	inParallel(volumes, func(i int) { a.create(fmt.Sprintf("pvc-00000000-0000-4000-8000-%012d", i), volumeBytes)() })
	inOrder(a.create(statsID, volumeBytes), a.publish(statsID))()
	return a
}

// restart starts a driver that was stopped, and waits until its pool serves: calls are taken before.
func (a *actor) restart() {
	check(a.Process.Restart(a.s.ctx))
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		_, err := a.Stats(a.s.ctx, statsID, statsID)
		if status.Code(err) != codes.Unavailable {
			check(err)
			return
		}
		select {
		case <-again.C:
		case <-a.s.ctx.Done():
			check(context.Cause(a.s.ctx), err)
		}
	}
}

// page asks for the first volumes.
func (a *actor) page() {
	got(a.Controller().ListVolumes(a.s.ctx, &csi.ListVolumesRequest{MaxEntries: pageEntries}))
}

// volumeHealth asks for the health of the published volume.
func (a *actor) volumeHealth() {
	health := got(a.Kubelet().NodeGetVolumeHealth(a.s.ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: statsID, VolumePublishPath: a.Target(statsID)}))
	if len(health.GetVolumeHealth().GetHealthStatuses()) > 0 {
		check(fmt.Errorf("the volume is not healthy: %v", health))
	}
}

// listIll asks for the volumes that are not healthy. There are none.
func (a *actor) listIll() {
	if ill := got(a.Controller().ControllerListVolumeHealth(a.s.ctx, &csi.ControllerListVolumeHealthRequest{})); len(ill.GetEntries()) > 0 {
		check(fmt.Errorf("volumes are not healthy: %v", ill))
	}
}

// readRecords does what cannot be left out to know the volumes of a pool.
func (a *actor) readRecords() {
	got(os.ReadDir(a.pool()))
	records := filepath.Join(a.pool(), ".hostpath-provisioner", "volumes")
	for _, entry := range got(os.ReadDir(records)) {
		got(os.ReadFile(filepath.Join(records, entry.Name())))
	}
}

// memory is the most MiB that the driver had since its start, after what is done to it all day:
// external-health-monitor asks for all volumes, in pages as large as the driver likes, and Prometheus for the metrics.
func (a *actor) memory() float64 {
	got(a.List(a.s.ctx, 0))
	for range scrapes {
		got(a.Metrics(a.s.ctx))
	}
	return peakOf(a.Process.Pid())
}

// peakOf is the most MiB that a process had so far (proc_pid_status(5)), and 0 of one that has ended.
func peakOf(pid int) float64 {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)) // empty
	_, most, _ := strings.Cut(string(status), "VmHWM:")
	var kib float64
	_, _ = fmt.Sscanf(most, "%f kB", &kib) // 0 without it
	return kib / 1024
}

func (o order) blockVolume() drivertest.Volume {
	return drivertest.Volume{ID: diskID, Pool: poolName, Block: true, Bytes: o.disk}
}

// createDisk makes a block volume, and returns the path of its file.
func (a *actor) createDisk() string {
	got(a.Create(a.s.ctx, a.s.blockVolume()))
	return filepath.Join(a.pool(), diskID, diskFile)
}

func writeDisk(path string, size int64) {
	disk := got(os.OpenFile(path, os.O_WRONLY, 0))
	content := bytes.Repeat([]byte("bench"), 1<<20)[:1<<20]
	for at := int64(0); at < size; at += int64(len(content)) {
		got(disk.WriteAt(content, at))
	}
	check(disk.Sync(), disk.Close())
}
