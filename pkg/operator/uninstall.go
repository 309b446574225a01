package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	movev1 "kubevirt.io/hostpath-provisioner/api/v1alpha1"
	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/status"
)

// podsAnnotation of a HostPathProvisioner has its deletion leave the driver there as long as a pod uses a volume of it, in whatever pool: one may
// start after an uninstallation has looked. A deletion by hand, as for another driver that comes, does not wait for those in pools that stay.
const podsAnnotation = "hostpathprovisioner.kubevirt.io/waits-for-pods"

// An InUseError says what still needs the driver, or the operator.
type InUseError struct{ Users []string }

func (e *InUseError) Error() string {
	return "nothing was removed, because this is in use: " + status.Some(e.Users) + ". End it, and try again"
}

// A LeftError says what was not removed in time.
type LeftError struct{ Waiting []string }

func (e *LeftError) Error() string {
	return "not removed yet: " + status.Some(e.Waiting) + ". The operator goes on while it runs: try again later"
}

// A DeployedError says that the driver is not that of this operator.
type DeployedError struct{ Namespace string }

func (e *DeployedError) Error() string {
	return fmt.Sprintf("the driver was deployed by an operator in the namespace %s: uninstall it there", e.Namespace)
}

// An Uninstallation removes what only an operator that runs can remove, before that is removed itself: finalizers wait for it. It removes no
// data, and nothing as long as a pod uses a volume of the driver, which could not end without it.
type Uninstallation struct {
	// Client has no cache.
	Client client.Client
	// Namespace is that of the operator.
	Namespace string
	// Poll is how often it looks whether something is left.
	Poll time.Duration
	// Say tells what it does.
	Say func(format string, args ...any)
}

// Run removes all HostPathProvisioners and VolumeMoves, and waits for their end until the context ends. It returns an *ElsewhereError or a
// *DeployedError if these are of an operator in another namespace, an *InUseError if they are in use, and a *LeftError if they did not end.
func (u *Uninstallation) Run(ctx context.Context) error {
	if err := CheckAlone(ctx, u.Client, u.Namespace); err != nil {
		return fmt.Errorf("the definitions and their objects may not be this operator's: %w", err)
	}
	objects, moves, err := u.owned(ctx)
	if err != nil {
		return err
	}
	at, err := deployedIn(ctx, u.Client)
	if err != nil {
		return err
	}
	if len(objects) > 0 && at != "" && at != u.Namespace {
		return &DeployedError{at}
	}
	c := &cluster{Client: u.Client, api: u.Client, namespace: u.Namespace}
	underway, err := c.moves(ctx) // also of VolumeMoves that were removed by force
	if err != nil {
		return err
	}
	users := begun(underway)
	if len(objects) > 0 {
		// Without such an object the driver is not the operator's, and stays.
		pods, err := c.podsWithVolumes(ctx)
		if err != nil {
			return err
		}
		users = append(users, pods...)
	}
	if len(users) > 0 {
		return &InUseError{users}
	}
	for i := range moves {
		// One that has begun by now is another version, which is not deleted.
		if err := u.delete(ctx, &moves[i], client.Preconditions{UID: &moves[i].UID, ResourceVersion: &moves[i].ResourceVersion}); err != nil {
			return err
		}
	}
	waits := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, podsAnnotation))
	for i := range objects {
		seen := objects[i].UID // what is patched may be another object by then
		if err := u.Client.Patch(ctx, &objects[i], waits); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("have the deletion of HostPathProvisioner %s wait for pods: %w", named(&objects[i]), err)
		}
		if err := u.delete(ctx, &objects[i], client.Preconditions{UID: &seen}); err != nil {
			return err
		}
	}
	return u.wait(ctx)
}

func (u *Uninstallation) delete(ctx context.Context, object client.Object, only client.Preconditions) error {
	kind, err := u.Client.GroupVersionKindFor(object)
	if err != nil {
		return err
	}
	u.Say("Deleting %s %s", kind.Kind, named(object))
	if err := u.Client.Delete(ctx, object, only); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s %s: %w", kind.Kind, named(object), err)
	}
	return nil
}

func named(object client.Object) string {
	return strings.TrimPrefix(object.GetNamespace()+"/"+object.GetName(), "/")
}

// owned are the objects whose finalizers wait for an operator. A kind whose definition is not there has none.
func (u *Uninstallation) owned(ctx context.Context) ([]hppv1.HostPathProvisioner, []movev1.VolumeMove, error) {
	objects, moves := &hppv1.HostPathProvisionerList{}, &movev1.VolumeMoveList{}
	for _, list := range []client.ObjectList{objects, moves} {
		if err := u.Client.List(ctx, list); err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
			return nil, nil, fmt.Errorf("look for what the operator has to remove: %w", err)
		}
	}
	return objects.Items, moves.Items, nil
}

// begun says which moves have begun: to undo hours of copying is not for an uninstallation to decide.
func begun(moves []movev1.VolumeMove) (users []string) {
	for i := range moves {
		users = append(users, fmt.Sprintf("VolumeMove %s, which is %s (let it end, or delete it)", named(&moves[i]), moves[i].Status.Phase))
	}
	return users
}

// wait returns when nothing is left, or says what was when the context ended.
func (u *Uninstallation) wait(ctx context.Context) error {
	var waiting []string
	err := wait.PollUntilContextCancel(ctx, u.Poll, true, func(ctx context.Context) (bool, error) {
		objects, moves, err := u.owned(ctx)
		if err != nil {
			return false, err
		}
		var left []string
		for i := range objects {
			left = append(left, "HostPathProvisioner "+named(&objects[i])+because(objects[i].Status.Conditions, hppv1.ConditionProgressing))
		}
		for i := range moves {
			left = append(left, "VolumeMove "+named(&moves[i])+because(moves[i].Status.Conditions, movev1.ConditionComplete))
		}
		if len(left) > 0 && !slices.Equal(left, waiting) {
			u.Say("Waiting for the end of %s", status.Some(left))
		}
		waiting = left
		return len(left) == 0, nil
	})
	if errors.Is(err, ctx.Err()) && len(waiting) > 0 {
		return &LeftError{waiting}
	}
	return err
}

// because is the message of a condition, in parentheses.
func because(conditions []metav1.Condition, of string) string {
	if c := meta.FindStatusCondition(conditions, of); c != nil && c.Message != "" {
		return " (" + c.Message + ")"
	}
	return ""
}
