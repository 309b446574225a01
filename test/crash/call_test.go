package crash

import (
	"os"
	"path/filepath"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const victim = "pvc-victim"

var parameters = map[string]string{"storagePool": "local"}

func access(block bool) *csi.VolumeCapability {
	c := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
	}
	if block {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}}
	}
	return c
}

func (w *world) target(id string) string { return filepath.Join(w.targets, id, "target") }

func (w *world) create(id string, block bool, bytes int64) answer {
	a, err := w.controller().CreateVolume(w.Context(), &csi.CreateVolumeRequest{
		Name:               id,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{access(block)},
		Parameters:         parameters,
	})
	return answer{a, err}
}

// publish makes the directory that kubelet would make, and publishes there.
func (w *world) publish(id string, block, inline bool) answer {
	target := w.target(id)
	must(w.T, os.MkdirAll(filepath.Dir(target), 0o755))
	attributes := parameters
	if inline {
		attributes = map[string]string{
			"storagePool":                      "local",
			"csi.storage.k8s.io/ephemeral":     "true",
			"csi.storage.k8s.io/pod.name":      "pod",
			"csi.storage.k8s.io/pod.namespace": "default",
			"csi.storage.k8s.io/pod.uid":       "uid",
			"size":                             strconv.Itoa(small),
		}
	}
	a, err := w.kubelet().NodePublishVolume(w.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: id, TargetPath: target, VolumeCapability: access(block), VolumeContext: attributes,
	})
	return answer{a, err}
}

func (w *world) unpublishOf(id string) answer {
	a, err := w.kubelet().NodeUnpublishVolume(w.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: w.target(id)})
	return answer{a, err}
}

func (w *world) deleteOf(id string) answer {
	a, err := w.controller().DeleteVolume(w.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	return answer{a, err}
}

func (w *world) unpublish() answer { return w.unpublishOf(victim) }
func (w *world) delete() answer    { return w.deleteOf(victim) }

func creating(block bool, bytes int64) func(*world) answer {
	return func(w *world) answer { return w.create(victim, block, bytes) }
}

func publishing(block, inline bool) func(*world) answer {
	return func(w *world) answer { return w.publish(victim, block, inline) }
}

func expanding(block bool, bytes int64) func(*world) answer {
	return func(w *world) answer { return w.expand(victim, block, bytes) }
}

func (w *world) expand(id string, block bool, bytes int64) answer {
	a, err := w.kubelet().NodeExpandVolume(w.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: id, VolumePath: w.target(id), VolumeCapability: access(block),
		CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
	})
	return answer{a, err}
}

// reach brings the victim into a state by way of nothing.
func (w *world) reach(to state) {
	w.Helper()
	if w.now == to {
		return
	}
	if w.now.published {
		must(w.T, w.unpublish().err)
	}
	must(w.T, w.delete().err)
	w.awaitNoTrash()
	w.now, w.filled = state{}, false
	if to == w.now {
		return
	}
	if to.inline {
		must(w.T, w.publish(victim, false, true).err)
	} else {
		must(w.T, w.create(victim, to.block, to.bytes).err)
		w.fill(victim, to.block)
		w.filled = true
	}
	if to.published && !to.inline {
		must(w.T, w.publish(victim, to.block, false).err)
	}
	w.now = to
}

// content is what users have written.
const content = "written by a user, and not to be lost\n"

// fill writes to a volume that is not published: a tree, or the begin of the disk.
func (w *world) fill(id string, block bool) {
	w.Helper()
	if block {
		disk, err := os.OpenFile(filepath.Join(w.pool, id, "disk.img"), os.O_WRONLY, 0)
		must(w.T, err)
		_, err = disk.WriteString(content)
		must(w.T, err)
		must(w.T, disk.Sync())
		must(w.T, disk.Close())
		return
	}
	must(w.T, os.MkdirAll(filepath.Join(w.pool, id, "sub", "sub"), 0o755))
	must(w.T, os.WriteFile(filepath.Join(w.pool, id, "file"), []byte(content), 0o600))
}

// An other is a volume that stays as it is, whatever happens to the victim.
type other struct {
	id    string
	block bool
	bytes int64
}

var others = []other{{"pvc-other", false, 32 * mib}, {"pvc-other-disk", true, 16 * mib}}

func (w *world) makeOther(o other) {
	w.Helper()
	must(w.T, w.create(o.id, o.block, o.bytes).err)
	w.fill(o.id, o.block)
	must(w.T, w.publish(o.id, o.block, false).err)
}

func (w *world) unmakeOther(o other) {
	w.Helper()
	must(w.T, w.unpublishOf(o.id).err)
	must(w.T, w.deleteOf(o.id).err)
}
