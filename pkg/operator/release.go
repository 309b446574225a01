package operator

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"kubevirt.io/hostpath-provisioner/pkg/operator/render"
)

// Release is where the images of the operator's release are: where its own is, which its pod says. Of an image with another name nothing
// can be said, and without a name of the pod neither: then they are where the manifests have them.
func Release(ctx context.Context, api client.Reader, namespace, name string) (render.Release, error) {
	if name == "" {
		return render.Release{}, nil
	}
	pod := &corev1.Pod{}
	if err := api.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, pod); err != nil {
		return render.Release{}, fmt.Errorf("read the operator's own pod, POD_NAME %s in POD_NAMESPACE %s: %w", name, namespace, err)
	}
	var problem error
	for _, container := range pod.Spec.Containers {
		release, err := render.ReleaseOf(container.Image)
		if err == nil {
			return release, nil
		}
		problem = err
	}
	log.FromContext(ctx).Info("Images are taken from where the manifests have them", "reason", problem)
	return render.Release{}, nil
}
