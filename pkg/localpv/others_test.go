package localpv

import (
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What a volume is of has to be known also where the node has lost its records.
func TestVolumeHasTheIdentityOfItsDevice(t *testing.T) {
	c := newCluster(t, Options{})
	pv := volume()
	delete(pv.Annotations, identityAnnotation) // as one of an earlier program
	must.Succeed(t, c.Create(t.Context(), pv))
	const identity = "wwid=naa.600a"
	must.Succeed(t, c.update(t.Context(), pv, devices.Known{Name: pv.Name, Bytes: mib, Identity: identity}))
	if v, _ := volumeOf(&c.volumes()[0]); v.Identity != identity {
		t.Errorf("it is of %q, want %q", v.Identity, identity)
	}
}

// That its device has none has to be known too: else any disk at its path would be taken for it.
func TestVolumeSaysThatItsDeviceHasNoIdentity(t *testing.T) {
	c := newCluster(t, Options{})
	pv := volume()
	if v, _ := volumeOf(pv); !v.Unidentified {
		t.Errorf("a new one is %+v", v)
	}
	delete(pv.Annotations, identityAnnotation)
	if v, _ := volumeOf(pv); v.Unidentified {
		t.Errorf("one of an earlier program is %+v", v)
	}
	must.Succeed(t, c.Create(t.Context(), pv))
	must.Succeed(t, c.update(t.Context(), pv, devices.Known{Name: pv.Name, Bytes: mib}))
	if v, _ := volumeOf(&c.volumes()[0]); !v.Unidentified {
		t.Errorf("then it is %+v", v)
	}
}

func TestVolumeGrowsWithItsDevice(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d := c.Blank("disk", 8*mib)
	c.configure(block())
	c.awaitVolumes(1)
	must.Succeed(t, d.Resize(16*mib))
	c.pass()
	size := c.volumes()[0].Spec.Capacity[corev1.ResourceStorage]
	if size.Value() != 16*mib {
		t.Errorf("it has %s", size.String())
	}
	writes := value(c.metrics.writes)
	c.pass()
	c.wantMetric(c.metrics.writes, writes)
	c.wantMetric(c.metrics.errors, 0)
}

// boundWithFinalizer is a volume that a claim has filled, as kube-controller-manager protects it.
func (c *cluster) boundWithFinalizer() (*devicestest.Disk, corev1.PersistentVolume) {
	c.Helper()
	d := c.Blank("disk", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(1)[0]
	pv.Finalizers = []string{"kubernetes.io/pv-protection"}
	pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "claim"}
	must.Succeed(c.Harness, c.Update(c.Context(), &pv))
	pv.Status.Phase = corev1.VolumeBound
	must.Succeed(c.Harness, c.Status().Update(c.Context(), &pv))
	c.pass()
	d.Fill()
	return d, pv
}

// An administrator who deletes a volume has its device, also while a finalizer keeps the object, as that of pv-protection until the claim is gone.
func TestVolumeThatIsBeingDeletedIsNotCleaned(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d, pv := c.boundWithFinalizer()
	d.Untouched()
	must.Succeed(t, c.Delete(t.Context(), &pv))
	pv = c.volumes()[0]
	c.release(&pv)
	c.pass()
	c.wantMetric(c.metrics.wiping, 0)
	c.wantMetric(c.metrics.uncleaned, 0)
	pv.Finalizers = nil
	must.Succeed(t, c.Update(t.Context(), &pv))
	c.until("the device to be kept", func() bool {
		return len(c.volumes()) == 0 && value(c.metrics.errors) == 1
	})
	c.wantEvent("DeviceVolumeDisappeared")
}

// A volume that the agent itself deletes, after it has cleaned the device, may be kept by a finalizer too.
func TestDeviceIsOfferedAgainAfterAFinalizerKeptItsVolume(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d, pv := c.boundWithFinalizer()
	c.release(&pv)
	c.until("the volume to be deleted", func() bool { return c.volumes()[0].DeletionTimestamp != nil })
	c.pass()
	pv = c.volumes()[0]
	pv.Finalizers = nil
	must.Succeed(t, c.Update(t.Context(), &pv))
	c.until("the device to be offered again", func() bool {
		volumes := c.volumes()
		return len(volumes) == 1 && volumes[0].Spec.ClaimRef == nil
	})
	d.WantZero(0, mib)
}

// A claim must not get what is left of another one's data.
func TestHalfCleanVolumeIsDeleted(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d := c.Blank("disk", 8*mib)
	c.configure(block())
	pv := c.awaitVolumes(1)[0]
	record, err := c.Records.Get(d.Path)
	must.Succeed(t, err)
	record.State, record.Volume, record.VolumeUID, record.ClaimUID = devices.Cleaning, pv.Name, string(pv.UID), "claim"
	must.Succeed(t, c.Records.Put(record))
	c.pass()
	if n := len(c.volumes()); n != 0 {
		t.Errorf("%d volumes, want it deleted", n)
	}
	c.wantEvent("DeviceHalfClean", d.Path)
}

// An administrator who gives a released volume back, to keep its data, takes the UID or the whole reference. Its phase follows when the
// controller of volumes has seen that.
func TestVolumeIsNotReleasedAfterItsClaimReferenceWasTaken(t *testing.T) {
	for name, take := range map[string]func(*corev1.PersistentVolume){
		"the UID":       func(pv *corev1.PersistentVolume) { pv.Spec.ClaimRef.UID = "" },
		"the reference": func(pv *corev1.PersistentVolume) { pv.Spec.ClaimRef = nil },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, Options{DefaultConfigMap: "map"})
			d := c.Blank("disk", 8*mib)
			c.configure(block())
			pv := c.awaitVolumes(1)[0]
			pv.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: "data", UID: "claim"}
			must.Succeed(t, c.Update(t.Context(), &pv))
			c.pass()
			d.Fill()
			take(&pv)
			must.Succeed(t, c.Update(t.Context(), &pv))
			pv.Status.Phase = corev1.VolumeReleased
			must.Succeed(t, c.Status().Update(t.Context(), &pv))
			d.Untouched()
			c.until("a volume that is kept", func() bool { return value(c.metrics.available) == 1 || value(c.metrics.wiped) > 0 })
			if n := len(c.volumes()); n != 1 {
				t.Errorf("%d volumes, want it kept", n)
			}
		})
	}
}

// The volumes of other nodes say which disks are theirs.
func TestVolumesOfOtherNodesAreTold(t *testing.T) {
	c := newCluster(t, Options{})
	other := nodeMetadata("n2")
	other.Labels = map[string]string{corev1.LabelHostname: "n2"}
	for name, identity := range map[string]string{"known": "wwid=naa.600a", "unknown": ""} {
		pv := newVolume(other, devices.Config{VolumeMode: devices.Block, Filter: regexp.MustCompile("")}, devices.Offer{Name: name, Path: "/dev/sda", Bytes: mib, Identity: identity})
		must.Succeed(t, c.Create(t.Context(), pv))
	}
	volumes, _, err := c.controller.Volumes(t.Context())
	must.Succeed(t, err)
	if len(volumes) != 1 || volumes[0].Name != "known" || !volumes[0].Elsewhere || volumes[0].Foreign || volumes[0].Identity != "wwid=naa.600a" {
		t.Errorf("the volumes are %+v, want the one whose disk is known", volumes)
	}
}

// What the node has for itself is no error, or no alert would ever clear.
func TestDeviceThatTheNodeUsesIsNoError(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map"})
	d := c.Blank("disk", 32*mib)
	devicestest.Run(t, "mkfs.ext4", "-q", "-F", d.Node)
	dir := t.TempDir()
	devicestest.Run(t, "mount", d.Node, dir)
	t.Cleanup(func() { devicestest.Run(t, "umount", dir) })
	c.configure(block())
	c.until("a used device", func() bool { return value(c.metrics.used) == 1 })
	c.wantMetric(c.metrics.errors, 0)
	c.wantEvent("DeviceMounted", dir)
}

func TestNameOfVolumeThatIsGone(t *testing.T) {
	c := newCluster(t, Options{})
	report := devices.Report{Cleaned: []string{"gone"}, HalfClean: []string{"gone"}, Wiping: []devices.Wiping{{Volume: "gone"}}}
	on := &metav1.PartialObjectMetadata{}
	if err := c.apply(t.Context(), on, devices.Config{}, nil, &report); err != nil || strings.Contains(c.logged.String(), "deleted") {
		t.Errorf("apply = %v, log %s", err, c.logged.String())
	}
}

// Kubelet and the attach/detach controller say at different times which volumes are there.
func TestVolumeThatIsBeingAttached(t *testing.T) {
	c := newCluster(t, Options{})
	const volume = "kubernetes.io/csi/ebs.csi.aws.com^vol-1"
	attached := []corev1.AttachedVolume{{Name: volume}}
	for title, tt := range map[string]struct {
		status corev1.NodeStatus
		want   string
	}{
		"none":                    {corev1.NodeStatus{}, ""},
		"one to be attached":      {corev1.NodeStatus{VolumesInUse: []corev1.UniqueVolumeName{volume}}, volume},
		"one that is attached":    {corev1.NodeStatus{VolumesInUse: []corev1.UniqueVolumeName{volume}, VolumesAttached: attached}, ""},
		"one that no pod has yet": {corev1.NodeStatus{VolumesAttached: attached}, volume},
	} {
		t.Run(title, func(t *testing.T) {
			object := &corev1.Node{}
			must.Succeed(t, c.Get(t.Context(), client.ObjectKey{Name: node}, object))
			object.Status = tt.status
			must.Succeed(t, c.Status().Update(t.Context(), object))
			if got, err := c.controller.Attaching(t.Context()); err != nil || got != tt.want {
				t.Errorf("%q is being attached (%v), want %q", got, err, tt.want)
			}
		})
	}
}

// The agent comes back when a new disk has been there for long enough, and does not poll until then.
func TestNewDisk_isWaitedFor(t *testing.T) {
	c := newCluster(t, Options{DefaultConfigMap: "map", PollingInterval: time.Hour, NewDeviceDelay: 20 * time.Minute})
	c.Blank("disk", 8*mib)
	c.configure(block())
	if result := c.pass(); result.RequeueAfter < 19*time.Minute || result.RequeueAfter > 21*time.Minute {
		t.Errorf("it comes back in %s", result.RequeueAfter)
	}
	c.wantMetric(c.metrics.errors, 0)
	if n := len(c.volumes()); n != 0 {
		t.Errorf("%d volumes", n)
	}
}
