package cases_test

import (
	"fmt"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// besideProvisioner has the provisioner from before CSI in the directory in which the operator's driver has its pool, each in
// its container. Both serve, and make and remove volumes at the same time.
func besideProvisioner(t *testing.T, h *harness) {
	outside := filepath.Dir(operatorPool)
	h.apply("-k", "../overlay/provisioner-outside")
	h.provisioners(perNode, len(c.Nodes), true)

	const each = 8
	var claims []string
	for i := range each {
		made, driven := fmt.Sprintf("outside-%d", i), fmt.Sprintf("inside-%d", i)
		claims = append(claims, made, driven)
		h.claim(made, "16Mi", ofClass("hostpath-provisioner-immediate"), madeOn(nodeA))
		h.claim(driven, "16Mi", ofClass(operatorClass), func(claim *corev1.PersistentVolumeClaim) {
			claim.Annotations = map[string]string{selectedNode: nodeA}
		})
	}
	volumes := make(map[string]string) // by PersistentVolume, the directory
	for _, claim := range claims {
		h.bound(claim)
		volume := h.volume(claim)
		if volume.Spec.CSI != nil {
			volumes[volume.Name] = h.disk(volume)
		} else {
			volumes[volume.Name] = c.Nodes[nodeA].Disk(volume.Spec.HostPath.Path)
		}
	}
	owners := make(map[quota.ID]string)
	for _, directory := range volumes {
		id := h.limited(directory)
		if other := owners[id]; other != "" {
			t.Errorf("%s and %s have one limit", directory, other)
		}
		owners[id] = directory
	}
	if made, err := filepath.Glob(filepath.Join(c.Nodes[nodeA].Disk(outside), "pvc-*")); err != nil || len(made) != each {
		t.Errorf("the provisioner has %q (%v), want %d", made, err, each)
	}

	h.kubectl(append([]string{"delete", "pvc", "-n", h.namespace}, claims...)...)
	for volume, directory := range volumes {
		h.wantVolumeGone(volume, directory)
	}
	h.provisioners(perNode, len(c.Nodes), true) // which have not refused since
}

// limited is what the kernel limits a volume by. It has to be one of 16 MiB.
func (h *harness) limited(directory string) quota.ID {
	h.Helper()
	volume, err := dir.Open(directory)
	must.Succeed(h, err)
	defer func() { must.Succeed(h, volume.Close()) }()
	facility, err := quota.Detect(volume)
	must.Succeed(h, err)
	id, err := facility.IDOf(volume)
	must.Succeed(h, err)
	usage, err := facility.Usage(volume, id)
	must.Succeed(h, err)
	if usage.Limit.Bytes != 16<<20 {
		h.Errorf("%s has %+v", directory, usage)
	}
	return id
}
