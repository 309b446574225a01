package migrate

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/migrate/others"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
)

// checkOthers refuses a directory that something else has too, by whatever path: it would find an empty place there, or write to
// what is another volume by then. It refuses a handle that is taken.
func (c checker) checkOthers(ctx context.Context, s *saved) error {
	here, only, err := findNode(ctx, c.client, c.Node)
	if err != nil {
		return err
	}
	shared := slices.ContainsFunc(c.Pools, func(p poolconfig.Config) bool { return p.Shared && p.Path == s.To.Directory })
	// A directory of no node is one of all nodes.
	o := others.Others{Node: here, Anywhere: shared || s.Volume.Spec.NodeAffinity == nil && !only}
	volumes, err := c.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	o.Volumes = slices.DeleteFunc(volumes.Items, func(pv corev1.PersistentVolume) bool { return pv.Name == s.Volume.Name })
	if o.Pods, err = c.pods(ctx, o.Anywhere); err != nil {
		return err
	}
	directories, err := others.New(c.host, s.From, s.To)
	if err != nil {
		return fmt.Errorf("--host-root: %w", err)
	}
	return errors.Join(s.checkHandles(o.Volumes), o.Check(directories))
}

func (s *saved) checkHandles(volumes []corev1.PersistentVolume) error {
	for i := range volumes {
		if c := volumes[i].Spec.CSI; c != nil && c.Driver == s.Driver && c.VolumeHandle == s.To.Name {
			return fmt.Errorf("PersistentVolume %s has the volume handle %s already", volumes[i].Name, s.To.Name)
		}
	}
	return nil
}

func (c checker) pods(ctx context.Context, anywhere bool) ([]corev1.Pod, error) {
	var on metav1.ListOptions
	if !anywhere {
		on.FieldSelector = "spec.nodeName=" + c.Node
	}
	list, err := c.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, on)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool { return ended(&pod) || !anywhere && pod.Spec.NodeName != c.Node }), nil
}

func (c checker) isDirectory(path, directory string) (bool, error) {
	if !filepath.IsAbs(path) {
		return false, nil
	}
	at, err := dir.Lookup(c.host, path)
	if dir.IsMissing(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look where %s leads: %w", path, err)
	}
	want, err := dir.Lookup(c.host, directory)
	return err == nil && at[0] == want[0], err
}
