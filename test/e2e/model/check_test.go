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
func (h *harness) check() {
	synctest.Wait()
	for _, status := range h.set.Status() {
		h.checkPool(status)
		h.checkDisk(status.Name.String())
	}
	for name, v := range h.volumes {
		if isSnapshot(name) {
			h.checkSnapshot(name, v)
		} else {
			got := must.Value(h.set.Volume(background, id(name)))(h)
			h.same(got)
		}
		if v.dir != nil {
			h.checkDirectory(name, v)
		}
	}
	h.checkTargets()
}

func (h *harness) checkPool(status pool.Status) {
	in := status.Name.String()
	volumes, snapshots := 0, 0
	for name, v := range h.volumes {
		switch {
		case v.pool != in:
		case isSnapshot(name):
			snapshots++
		default:
			volumes++
		}
	}
	if status.Snapshots.Count != snapshots {
		h.Fatalf("pool %+v, want it to have %d snapshots", status, snapshots)
	}
	if promised := h.promises(in); status.Err != nil || status.Volumes != volumes || status.Promised != promised || status.Trash.Pieces != 0 {
		h.Fatalf("pool %+v, want it to serve %d volumes with %d bytes promised, and no trash", status, volumes, promised)
	}
	got := must.Value(h.set.Capacity(background, status.Name, false))(h)
	// Rounded down to the step of a small pool.
	if want := h.available(in) / mib * mib; got != want {
		h.Fatalf("the capacity of %s is %d, want %d", in, got, want)
	}
}

// checkDisk says that volumes, records and marks are those of the model, and that
// nothing else is there.
func (h *harness) checkDisk(in string) {
	present, copied := make(map[string]bool), make(map[string]bool)
	recorded, marked := make(map[string]bool), make(map[string]bool)
	for name, v := range h.volumes {
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
		if in == shared && len(h.published(v, "")) > 0 {
			marked[name] = true
		}
	}
	nothing := make(map[string]bool)
	for path, want := range map[string]map[string]bool{
		h.path(in):                       present,
		h.own(in, "snapshots"):           copied,
		h.own(in, "volumes"):             recorded,
		h.own(in, "published", nodeName): marked,
		h.own(in, "creating", nodeName):  nothing,
		h.own(in, "trash", nodeName):     nothing,
	} {
		if diff := cmp.Diff(want, h.names(path)); diff != "" {
			h.Fatalf("%s (-want +got):\n%s", path, diff)
		}
	}
}

// checkDirectory says that it is the one that was made, and that its size is enforced.
func (h *harness) checkDirectory(name string, v *modelVolume) {
	path := h.entry(name, v)
	size := h.checkStamp(filepath.Join(path, v.dir.file()), v.dir)
	p := v.promise()
	if p.mode == volume.ModeBlock && size < least(name, v) {
		h.Fatalf("the file of %s has %d bytes, want %d", name, size, least(name, v))
	}
	if !p.kept {
		return
	}
	d, err := dir.Open(path)
	must.Succeed(h, err)
	defer func() { must.Succeed(h, d.Close()) }()
	carried, err := h.quota.IDOf(d)
	must.Succeed(h, err)
	usage, err := h.quota.Usage(d, carried)
	must.Succeed(h, err)
	want := p.bytes
	if p.mode == volume.ModeBlock {
		want += want/16 + mib
	}
	if got := usage.Limit.Bytes; got < want || got >= want+block {
		h.Fatalf("the limit of %s is %d, want %d", name, got, want)
	}
}

// checkStamp says that a file is the one of a directory, and answers its size.
func (h *harness) checkStamp(path string, of *directory) (size int64) {
	file, err := os.Open(path)
	must.Succeed(h, err)
	defer file.Close()
	got := make([]byte, len(of.stamp))
	_, err = io.ReadFull(file, got)
	must.Succeed(h, err)
	if string(got) != of.stamp {
		h.Fatalf("%s does not hold what was written: %q, but %q", path, of.stamp, got)
	}
	info, err := file.Stat()
	must.Succeed(h, err)
	return info.Size()
}

// same compares what is reported of a volume.
func (h *harness) same(got pool.Volume) {
	v := h.volumes[got.ID.String()]
	if v == nil {
		h.Fatalf("there is %+v, want none", got)
	}
	type facts struct {
		Pool                                   string
		Mode                                   volume.Mode
		Bytes                                  int64
		Shared, Enforced, Lost, Here, Abnormal bool
	}
	p := v.promise()
	want := facts{
		Pool: v.pool, Mode: p.mode, Bytes: h.bytes(v), Shared: v.pool == shared, Enforced: p.kept || p.mode == volume.ModeBlock,
		Lost: v.dir == nil, Here: len(h.published(v, "")) > 0, Abnormal: v.torn || v.dir == nil,
	}
	has := facts{
		Pool: got.Pool.String(), Mode: got.Mode, Bytes: got.Bytes, Shared: got.Shared, Enforced: got.Enforced,
		Lost: got.Lost, Here: len(got.Nodes) > 0, Abnormal: got.Condition.Abnormal,
	}
	if diff := cmp.Diff(want, has); diff != "" {
		h.Fatalf("volume %s, %s (-want +got):\n%s", got.ID, got.Condition.Message, diff)
	}
}

// checkTargets says that what is mounted and attached is what was published.
func (h *harness) checkTargets() {
	want := make(map[string]bool)
	writable, readers := make(map[publication]bool), 0
	for target, at := range h.targets {
		want[target] = true
		switch {
		case at.device && at.readOnly:
			readers++ // each has its own
		case at.device:
			writable[*at] = true
		}
	}
	for target := range h.left {
		want[target] = true
	}
	if diff := cmp.Diff(want, h.names(h.pod(""))); diff != "" {
		h.Fatalf("targets (-want +got):\n%s", diff)
	}
	attached := must.Value(h.loops.Attached())(h)
	if want := len(writable) + readers; len(attached) != want {
		h.Fatalf("%d devices are attached, want %d: %+v", len(attached), want, attached)
	}
	for target, at := range h.targets {
		if at.device {
			continue
		}
		d := must.Value(h.mounts.Open(h.target(target)))(h)
		h.checkStamp(d.HandlePath()+"/"+at.dir.file(), at.dir)
		must.Succeed(h, d.Close())
	}
}
