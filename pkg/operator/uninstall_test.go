package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// uninstallation is one of the operator of a harness. What it waits for calls do.
func (h *harness) uninstallation(do func()) *Uninstallation {
	return &Uninstallation{Client: h.Client, Namespace: "storage", Poll: time.Millisecond, Say: func(format string, args ...any) {
		if said := fmt.Sprintf(format, args...); strings.HasPrefix(said, "Waiting for ") {
			do()
		}
	}}
}

// Without the driver no pod that has a volume of it could end, and without the operator no move.
func TestUninstallationRefusesWhatIsInUse(t *testing.T) {
	inline := corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: render.DriverName}}
	ephemeral := corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}
	ended := podWith("user", "here", claimed("data"))
	ended.Status.Phase = corev1.PodFailed
	leaving := ended.DeepCopy()
	leaving.DeletionTimestamp, leaving.Finalizers = new(metav1.Now()), []string{"test"} // which the stand-in wants
	mounter := podWith("user", "here", claimed("data"))
	mounter.Namespace, mounter.Labels = "storage", render.PoolLabels("local")
	claim := volumeOn("of-mounter", "here", func(v *corev1.PersistentVolume) { v.Spec.ClaimRef.Namespace = "storage" })
	mounter.Spec.Volumes[0].PersistentVolumeClaim.ClaimName = claim.Spec.ClaimRef.Name
	const pod = "pod space/user on here"
	cases := map[string]struct {
		user client.Object
		want string
	}{
		"a pod with a claim":                        {podWith("user", "here", claimed("data")), pod},
		"a pod with an inline volume":               {podWith("user", "here", inline), pod},
		"a pod with an ephemeral claim":             {podWith("claim-of-an", "here", ephemeral), "pod space/claim-of-an on here"},
		"a pod that waits for a node":               {podWith("user", "", claimed("data")), ""},
		"a pod that has ended":                      {ended, ""},
		"a pod that has ended, and is not gone":     {leaving, pod},
		"a pod with a volume of another driver":     {podWith("user", "here", claimed("foreign")), ""},
		"a pod with one of the pre-CSI provisioner": {podWith("user", "here", claimed("legacy")), ""},
		"a pod that keeps a pool mounted":           {mounter, ""},
		"a move that was removed by force":          {forsaken("data", "there", "here"), "VolumeMove space/move-of-data, which is Undoing"},
	}
	for _, phase := range movev1.Phases {
		want := "VolumeMove space/move-of-data, which is " + string(phase)
		if slices.Contains([]movev1.Phase{movev1.Pending, movev1.Succeeded, movev1.Failed}, phase) {
			want = ""
		}
		move := underway("data", "there", "here", phase)
		cases["a move that is "+string(phase)] = struct {
			user client.Object
			want string
		}{move, want}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), c.user, claim,
				volumeOn("data", "here"), volumeOn("an-data", "here"), volumeOn("legacy", "", ofProvisioner("here")),
				volumeOn("foreign", "here", func(v *corev1.PersistentVolume) { v.Spec.CSI.Driver = "other" }))
			h.reconcile("hpp")
			err := h.uninstallation(func() { h.reconcile("hpp") }).Run(t.Context())
			inUse, refused := errors.AsType[*InUseError](err)
			if refused != (c.want != "") || !refused && err != nil {
				t.Fatalf("it ends with %v", err)
			}
			if h.has(stored("hpp", 1, false)) != refused {
				t.Errorf("the object is there: %t", !refused)
			}
			if refused && (len(inUse.Users) != 1 || !strings.HasPrefix(inUse.Users[0], c.want)) {
				t.Errorf("in use by %q, want %q", inUse.Users, c.want)
			}
			if _, of := c.user.(*movev1.VolumeMove); of && h.has(c.user) != refused {
				t.Errorf("the move is there: %t", !refused)
			}
		})
	}
}

// Where there is no HostPathProvisioner, the driver was installed in another way, and serves pods as before.
func TestUninstallationBesideAnotherDriver(t *testing.T) {
	h := newHarness(t, podWith("user", "here", claimed("data")), volumeOn("data", "here"))
	must.Succeed(t, h.uninstallation(func() { t.Error("it waits") }).Run(t.Context()))
}

func TestUninstallationRemovesWhatTheOperatorDeployed(t *testing.T) {
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), volumeOn("data", "here"))
	h.reconcile("hpp")
	if !h.has(set) {
		t.Fatal("the driver is not deployed")
	}
	must.Succeed(t, h.uninstallation(func() { h.reconcile("hpp") }).Run(t.Context()))
	if h.has(set) || h.has(stored("hpp", 1, false)) || !h.has(volumeOn("data", "here")) {
		t.Error("the driver or its object is there, or the volume is not")
	}
	// Again there is nothing to do.
	must.Succeed(t, h.uninstallation(func() { t.Error("it waits") }).Run(t.Context()))
}

// In a pool that nothing has to unmount, too: without the driver such a pod could never end.
func TestUninstallationWaitsForPodThatStartsMeanwhile(t *testing.T) {
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	user := podWith("user", "here", claimed("data"))
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), volumeOn("data", "here"))
	h.reconcile("hpp")
	looks := 0
	must.Succeed(t, h.uninstallation(func() {
		switch looks++; looks {
		case 1:
			must.Succeed(t, h.Create(t.Context(), user))
		case 2:
			if _, available := h.status(); !h.has(set) || !strings.Contains(available.Message, "pod space/user on here") {
				t.Errorf("the driver is there: %t; the condition says %q", h.has(set), available.Message)
			}
			must.Succeed(t, h.Delete(t.Context(), user))
		}
		h.reconcile("hpp")
	}).Run(t.Context()))
	if looks < 2 || h.has(set) {
		t.Errorf("it has waited %d times, and the driver is there: %t", looks, h.has(set))
	}
}

// The driver of a node may publish until its pod has ended: only a driver can unpublish that again.
func TestUninstallationDeploysTheDriverForPodThatStartsWhileItEnds(t *testing.T) {
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "storage", Name: render.DriverDaemonSet}}
	user, driver := podWith("user", "here", claimed("data")), driverPod("here")
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), volumeOn("data", "here"), driver)
	h.reconcile("hpp")
	looks := 0
	must.Succeed(t, h.uninstallation(func() {
		switch looks++; looks {
		case 2:
			if h.has(set) {
				t.Error("the driver was not removed")
			}
			must.Succeed(t, h.Create(t.Context(), user))
		case 3:
			if _, available := h.status(); !h.has(set) || !strings.Contains(available.Message, "pod space/user on here") {
				t.Errorf("the driver is there: %t; the condition says %q", h.has(set), available.Message)
			}
			must.Succeed(t, h.Delete(t.Context(), user))
			must.Succeed(t, h.Delete(t.Context(), driver))
		}
		h.reconcile("hpp")
	}).Run(t.Context()))
	if looks < 3 || h.has(set) {
		t.Errorf("it has waited %d times, and the driver is there: %t", looks, h.has(set))
	}
}

// What is not removed in time is named with what it waits for.
func TestUninstallationInVain(t *testing.T) {
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), driverPod("here"))
	h.reconcile("hpp")
	ctx, stop := context.WithCancel(t.Context())
	looks := 0
	err := h.uninstallation(func() {
		if looks++; looks > 1 { // the operator has written what it waits for
			stop()
		}
		h.reconcile("hpp")
	}).Run(ctx)
	left, ok := errors.AsType[*LeftError](err)
	if !ok || len(left.Waiting) != 1 || !strings.Contains(left.Waiting[0], "HostPathProvisioner hpp (Waiting for pod driver-here on here") {
		t.Errorf("it ends with %v", err)
	}
}

// Of two operators one can be removed by hand alone: what both have in common would go.
func TestUninstallationOfTheSecondOperator(t *testing.T) {
	h := newHarness(t, append(operatorRights("other"), stored("hpp", 1, false), operatorPod("other", 1, corev1.PodRunning))...)
	err := h.uninstallation(func() { t.Error("it waits") }).Run(t.Context())
	if elsewhere, ok := errors.AsType[*ElsewhereError](err); !ok || elsewhere.Namespace != "other" || !h.has(stored("hpp", 1, false)) {
		t.Errorf("it ends with %v", err)
	}
}

// The operator that has deployed the driver may be away, as while it is upgraded.
func TestUninstallationWhereTheDriverIsInAnotherNamespace(t *testing.T) {
	h := newHarness(t, stored("hpp", 1, false))
	h.reconcile("hpp")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	u := h.uninstallation(stop)
	u.Namespace = "other"
	err := u.Run(ctx)
	if there, ok := errors.AsType[*DeployedError](err); !ok || there.Namespace != "storage" || !h.has(stored("hpp", 1, false)) {
		t.Errorf("it ends with %v", err)
	}
}

// A move that begins after it was looked at is not deleted, and neither is the driver, which it needs.
func TestUninstallationWhileMoveBegins(t *testing.T) {
	move := underway("data", "there", "here", movev1.Pending)
	h := newHarness(t, stored("hpp", 1, false), nodeThat("here", corev1.ConditionTrue), move)
	h.reconcile("hpp")
	u := h.uninstallation(func() { t.Error("it waits") })
	u.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		Delete: func(ctx context.Context, api client.WithWatch, object client.Object, options ...client.DeleteOption) error {
			h.has(move)
			move.Status.Phase = movev1.Copying
			must.Succeed(t, api.Update(ctx, move))
			return api.Delete(ctx, object, options...)
		},
	})
	if err := u.Run(t.Context()); !apierrors.IsConflict(err) || !h.has(move) || !h.has(stored("hpp", 1, false)) {
		t.Errorf("it ends with %v", err)
	}
}

// Definitions that were removed have no objects.
func TestUninstallationWithoutDefinitions(t *testing.T) {
	h := newHarness(t)
	u := h.uninstallation(func() { t.Error("it waits") })
	u.Client = interceptor.NewClient(h.Client.(client.WithWatch), interceptor.Funcs{
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, options ...client.ListOption) error {
			switch list.(type) {
			case *movev1.VolumeMoveList, *hppv1.HostPathProvisionerList:
				return apierrors.NewNotFound(movev1.GroupVersion.WithResource("volumemoves").GroupResource(), "")
			}
			return api.List(ctx, list, options...)
		},
	})
	must.Succeed(t, u.Run(t.Context()))
}
