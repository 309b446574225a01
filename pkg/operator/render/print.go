package render

import (
	"fmt"
	"io"

	"sigs.k8s.io/yaml"

	hppv1 "kubevirt.io/hostpath-provisioner/api/v1beta1"
)

// Print writes what the operator would deploy in a new cluster for the object that it reads, as YAML.
func Print(from io.Reader, to io.Writer, config Config, facts Facts) error {
	text, err := io.ReadAll(from)
	if err != nil {
		return err
	}
	object := &hppv1.HostPathProvisioner{}
	if err := yaml.UnmarshalStrict(text, object); err != nil {
		return fmt.Errorf("read a HostPathProvisioner: %w", err)
	}
	m, err := Load()
	if err != nil {
		return err
	}
	objects, err := m.For(config, facts, object).Objects()
	if err != nil {
		return err
	}
	return Write(to, objects)
}

// Write writes objects as YAML documents.
func Write[T any](to io.Writer, objects []T) error {
	for _, o := range objects {
		text, err := yaml.Marshal(o)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(to, "---\n%s", text); err != nil {
			return err
		}
	}
	return nil
}
