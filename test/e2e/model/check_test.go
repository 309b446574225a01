package model

import (
	"io"
	"os"
	"path/filepath"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// check compares all that can be seen with the model.
func (w *world) check() {
	synctest.Wait()
	for _, status := range w.set.Status() {
		w.checkPool(status)
		w.checkDisk(status.Name.String())
	}
	for name, v := range w.volumes {
		if isSnapshot(name) {
			w.checkSnapshot(name, v)
		} else {
			got, err := w.set.Volume(background, id(name))
			must.Succeed(w, err)
			w.same(got)
		}
		if v.dir != nil {
			w.checkDirectory(name, v)
		}
	}
	w.checkTargets()
}

func (w *world) checkPool(status pool.Status) {
	in := status.Name.String()
	volumes, snapshots := 0, 0
	for name, v := range w.volumes {
		switch {
		case v.pool != in:
		case isSnapshot(name):
			snapshots++
		default:
			volumes++
		}
	}
	if status.Snapshots.Count != snapshots {
		w.Fatalf("pool %+v, want it to have %d snapshots", status, snapshots)
	}
	if promised := w.promises(in); status.Err != nil || status.Volumes != volumes || status.Promised != promised || status.Trash.Pieces != 0 {
		w.Fatalf("pool %+v, want it to serve %d volumes with %d bytes promised, and no trash", status, volumes, promised)
	}
	got, err := w.set.Capacity(status.Name, false)
	must.Succeed(w, err)
	// Rounded down to the step of a small pool.
	if want := w.available(in) / mib * mib; got != want {
		w.Fatalf("the capacity of %s is %d, want %d", in, got, want)
	}
}

// checkDisk says that volumes, records and marks are those of the model, and that
// nothing else is there.
func (w *world) checkDisk(in string) {
	present, copied := make(map[string]bool), make(map[string]bool)
	recorded, marked := make(map[string]bool), make(map[string]bool)
	for name, v := range w.volumes {
		if v.pool != in {
			continue
		}
		switch {
		case v.dir == nil:
		case isSnapshot(name):
			copied[name] = true
		default:
			present[name] = true
		}
		if v.record != nil {
			recorded[name+".json"] = true
		}
		if in == shared && len(w.published(v, "")) > 0 {
			marked[name] = true
		}
	}
	nothing := make(map[string]bool)
	for path, want := range map[string]map[string]bool{
		w.path(in):                       present,
		w.own(in, "snapshots"):           copied,
		w.own(in, "volumes"):             recorded,
		w.own(in, "published", nodeName): marked,
		w.own(in, "creating", nodeName):  nothing,
		w.own(in, "trash", nodeName):     nothing,
	} {
		if diff := cmp.Diff(want, w.names(path)); diff != "" {
			w.Fatalf("%s (-want +got):\n%s", path, diff)
		}
	}
}

// checkDirectory says that it is the one that was made, and that its size is enforced.
func (w *world) checkDirectory(name string, v *modelVolume) {
	path := w.entry(name, v)
	size := w.checkStamp(filepath.Join(path, v.dir.file()), v.dir)
	p := v.promise()
	if p.mode == volume.ModeBlock && size < least(name, v) {
		w.Fatalf("the file of %s has %d bytes, want %d", name, size, least(name, v))
	}
	if !p.kept {
		return
	}
	d, err := dir.Open(path)
	must.Succeed(w, err)
	defer func() { must.Succeed(w, d.Close()) }()
	carried, err := w.quota.IDOf(d)
	must.Succeed(w, err)
	usage, err := w.quota.Usage(d, carried)
	must.Succeed(w, err)
	want := p.bytes
	if p.mode == volume.ModeBlock {
		want += want/16 + mib
	}
	if got := usage.Limit.Bytes; got < want || got >= want+block {
		w.Fatalf("the limit of %s is %d, want %d", name, got, want)
	}
}

// checkStamp says that a file is the one of a directory, and answers its size.
func (w *world) checkStamp(path string, of *directory) (size int64) {
	file, err := os.Open(path)
	must.Succeed(w, err)
	defer file.Close()
	got := make([]byte, len(of.stamp))
	_, err = io.ReadFull(file, got)
	must.Succeed(w, err)
	if string(got) != of.stamp {
		w.Fatalf("%s does not hold what was written: %q, but %q", path, of.stamp, got)
	}
	info, err := file.Stat()
	must.Succeed(w, err)
	return info.Size()
}

// same compares what is reported of a volume.
func (w *world) same(got pool.Volume) {
	v := w.volumes[got.ID.String()]
	if v == nil {
		w.Fatalf("there is %+v, want none", got)
	}
	type facts struct {
		Pool                                   string
		Mode                                   volume.Mode
		Bytes                                  int64
		Shared, Enforced, Lost, Here, Abnormal bool
	}
	p := v.promise()
	want := facts{
		Pool: v.pool, Mode: p.mode, Bytes: w.bytes(v), Shared: v.pool == shared, Enforced: p.kept || p.mode == volume.ModeBlock,
		Lost: v.dir == nil, Here: len(w.published(v, "")) > 0, Abnormal: v.torn || v.dir == nil,
	}
	has := facts{
		Pool: got.Pool.String(), Mode: got.Mode, Bytes: got.Bytes, Shared: got.Shared, Enforced: got.Enforced,
		Lost: got.Lost, Here: len(got.Nodes) > 0, Abnormal: got.Condition.Abnormal,
	}
	if diff := cmp.Diff(want, has); diff != "" {
		w.Fatalf("volume %s, %s (-want +got):\n%s", got.ID, got.Condition.Message, diff)
	}
}

// checkTargets says that what is mounted and attached is what was published.
func (w *world) checkTargets() {
	want := make(map[string]bool)
	writable, readers := make(map[publication]bool), 0
	for target, at := range w.targets {
		want[target] = true
		switch {
		case at.device && at.readOnly:
			readers++ // each has its own
		case at.device:
			writable[*at] = true
		}
	}
	for target := range w.left {
		want[target] = true
	}
	if diff := cmp.Diff(want, w.names(w.pod(""))); diff != "" {
		w.Fatalf("targets (-want +got):\n%s", diff)
	}
	attached, err := w.loops.Attached()
	must.Succeed(w, err)
	if want := len(writable) + readers; len(attached) != want {
		w.Fatalf("%d devices are attached, want %d: %+v", len(attached), want, attached)
	}
	for target, at := range w.targets {
		if at.device {
			continue
		}
		d, err := w.mounts.Open(w.target(target))
		must.Succeed(w, err)
		w.checkStamp(d.HandlePath()+"/"+at.dir.file(), at.dir)
		must.Succeed(w, d.Close())
	}
}
