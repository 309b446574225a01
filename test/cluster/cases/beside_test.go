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
func besideProvisioner(t *testing.T, s *scene) {
	outside := filepath.Dir(operatorPool)
	s.apply("-k", "../overlay/provisioner-outside")
	s.provisioners(perNode, len(c.Nodes), true)

	const each = 8
	var claims []string
	for i := range each {
		made, driven := fmt.Sprintf("outside-%d", i), fmt.Sprintf("inside-%d", i)
		claims = append(claims, made, driven)
		s.claim(made, "16Mi", ofClass("hostpath-provisioner-immediate"), madeOn(nodeA))
		s.claim(driven, "16Mi", ofClass(operatorClass), func(claim *corev1.PersistentVolumeClaim) {
			claim.Annotations = map[string]string{selectedNode: nodeA}
		})
	}
	volumes := make(map[string]string) // by PersistentVolume, the directory
	for _, claim := range claims {
		s.bound(claim)
		volume := s.volume(claim)
		if volume.Spec.CSI != nil {
			volumes[volume.Name] = s.disk(volume)
		} else {
			volumes[volume.Name] = c.Nodes[nodeA].Disk(volume.Spec.HostPath.Path)
		}
	}
	owners := make(map[quota.ID]string)
	for _, directory := range volumes {
		id := s.limited(directory)
		if other := owners[id]; other != "" {
			t.Errorf("%s and %s have one limit", directory, other)
		}
		owners[id] = directory
	}
	if made, err := filepath.Glob(filepath.Join(c.Nodes[nodeA].Disk(outside), "pvc-*")); err != nil || len(made) != each {
		t.Errorf("the provisioner has %q (%v), want %d", made, err, each)
	}

	s.kubectl(append([]string{"delete", "pvc", "-n", s.namespace}, claims...)...)
	for volume, directory := range volumes {
		s.wantVolumeGone(volume, directory)
	}
	s.provisioners(perNode, len(c.Nodes), true) // which have not refused since
}

// limited is what the kernel limits a volume by. It has to be one of 16 MiB.
func (s *scene) limited(directory string) quota.ID {
	s.Helper()
	volume, err := dir.Open(directory)
	must.Succeed(s, err)
	defer func() { must.Succeed(s, volume.Close()) }()
	facility, err := quota.Detect(volume)
	must.Succeed(s, err)
	id, err := facility.IDOf(volume)
	must.Succeed(s, err)
	usage, err := facility.Usage(volume, id)
	must.Succeed(s, err)
	if usage.Limit.Bytes != 16<<20 {
		s.Errorf("%s has %+v", directory, usage)
	}
	return id
}
