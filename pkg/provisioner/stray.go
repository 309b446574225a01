package provisioner

import (
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/sig-storage-lib-external-provisioner/v13/util"

	"kubevirt.io/hostpath-provisioner/pkg/provisioner/origin"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const (
	// strayEvery is how often claims are checked that no instance serves, and directories of no PersistentVolume.
	strayEvery = 10 * time.Second
	// strayAfter is how long the instance that a claim may be for has to serve it.
	strayAfter = 10 * time.Second
	// strayAgain is when a claim is checked again. Each instance asks the API server once for each claim in that time.
	strayAgain = 10 * time.Minute
)

// strays reports claims that no instance will ever serve: each of them leaves such a claim to another one. All
// instances check, and the reporter makes one event of what they find.
type strays struct {
	*Provisioner
	checked map[types.UID]time.Time
}

// watch checks, until ctx ends, what no request asks for.
func (i *Instance) watch(ctx context.Context) {
	p := i.provisioner
	claims := &strays{Provisioner: p, checked: make(map[types.UID]time.Time)}
	volumes := &orphans{Provisioner: p}
	directories := &abandoned{Provisioner: p, settled: make(map[volume.ID]types.UID)}
	lookedForUpstream := time.Now()
	tick := time.NewTicker(strayEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if !i.synced() {
				continue
			}
			directories.remove(ctx)
			if p.config.Mode == PerNode { // else it serves all claims itself
				if p.refuseUpstream() != nil || now.Sub(lookedForUpstream) > strayAgain {
					_ = p.findUpstream(ctx) // Ready says it
					lookedForUpstream = now
				}
				p.selectNamedNode(ctx)
				claims.check(ctx, now)
				volumes.check(ctx, now)
			}
		}
	}
}

func (s *strays) check(ctx context.Context, now time.Time) {
	claims, err := s.claims.List(labels.Everything())
	if err != nil {
		s.events.log.Error(err, "Failed to list claims")
		return
	}
	pending := make(map[types.UID]time.Time)
	for _, claim := range claims {
		if !s.waits(claim, now) {
			continue
		}
		last, known := s.checked[claim.UID]
		if known && now.Sub(last) < strayAgain {
			pending[claim.UID] = last
			continue
		}
		if err := s.checkClaim(ctx, claim); err != nil {
			s.events.log.Error(err, "Failed to check a claim that waits", "namespace", claim.Namespace, "claim", claim.Name)
			continue
		}
		pending[claim.UID] = now
	}
	s.checked = pending
}

// waits reports whether a claim of this provisioner waits for another instance, longer than that should take.
func (s *strays) waits(claim *corev1.PersistentVolumeClaim, now time.Time) bool {
	return s.serves(claim) && claim.Spec.VolumeName == "" && claim.DeletionTimestamp == nil &&
		now.Sub(claim.CreationTimestamp.Time) > strayAfter && nodeOf(claim) != s.config.Node
}

// serves reports whether a claim is for the provisioners of this name, on any node. A claim for whose node the
// scheduler is asked has no annotation before there is a pod: its class says whose it will be.
func (s *strays) serves(claim *corev1.PersistentVolumeClaim) bool {
	name := cmp.Or(claim.Annotations[StorageProvisioner], claim.Annotations["volume.beta.kubernetes.io/storage-provisioner"])
	if name == "" && claim.Spec.VolumeName == "" {
		if class, err := s.classes.Get(util.GetPersistentVolumeClaimClass(claim)); err == nil {
			name = class.Provisioner
		}
	}
	return name == s.config.Name()
}

func (s *strays) checkClaim(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if node := nodeOf(claim); node != "" {
		return s.checkNode(ctx, claim, node)
	}
	class, err := s.classes.Get(util.GetPersistentVolumeClaimClass(claim))
	if apierrors.IsNotFound(err) {
		return nil // the persistent volume controller says so
	}
	if err != nil {
		return err
	}
	if class.VolumeBindingMode == nil || *class.VolumeBindingMode == storagev1.VolumeBindingImmediate {
		s.events.warn(ctx, claim, "ProvisioningFailed", fmt.Sprintf("StorageClass %s binds immediately, so that no node is chosen for this claim: "+
			"name one in its annotation %s, or use a class with volumeBindingMode WaitForFirstConsumer", class.Name, origin.ProvisionOnNode))
	}
	return nil
}

func (s *strays) checkNode(ctx context.Context, claim *corev1.PersistentVolumeClaim, node string) error {
	_, err := s.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return err
	}
	annotation, remedy := SelectedNode, "remove it, so that the scheduler chooses another node"
	if claim.Annotations[origin.ProvisionOnNode] != "" {
		annotation, remedy = origin.ProvisionOnNode, "name another node in it"
	}
	s.events.warn(ctx, claim, "ProvisioningFailed", fmt.Sprintf("annotation %s names node %q, which does not exist: %s", annotation, node, remedy))
	return nil
}
