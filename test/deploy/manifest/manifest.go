// Package manifest renders what users apply from deploy/, with kustomize as a library, and decodes the objects as kubectl
// validates them.
package manifest

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// An Object is one as it is applied, before it is decoded.
type Object struct {
	metav1.TypeMeta
	metav1.ObjectMeta `json:"metadata"`

	YAML []byte `json:"-"`
}

func (o Object) String() string { return fmt.Sprintf("%s %s", o.Kind, o.Name) }

// Objects are those of a directory or a document.
type Objects []Object

// Render is what `kubectl kustomize dir` prints.
func Render(t *testing.T, dir string) Objects {
	t.Helper()
	rendered, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatalf("render %s: %v", dir, err)
	}
	var objects Objects
	for _, r := range rendered.Resources() {
		text, err := r.AsYAML()
		if err != nil {
			t.Fatalf("render %s: %v", r.CurId(), err)
		}
		objects = append(objects, parsed(t, text))
	}
	return objects
}

// Parse splits YAML into its objects.
func Parse(t *testing.T, text string) Objects {
	t.Helper()
	var objects Objects
	for document := range strings.SplitSeq(text, "---\n") {
		if o := parsed(t, []byte(document)); o.Kind != "" {
			objects = append(objects, o)
		}
	}
	return objects
}

func parsed(t *testing.T, text []byte) Object {
	t.Helper()
	o := Object{YAML: text}
	if err := yaml.Unmarshal(text, &o); err != nil {
		t.Fatalf("decode: %v in\n%s", err, text)
	}
	return o
}

// All decodes the objects of a kind. A field that the kind does not have, or that is there twice, ends the test.
func All[T any](t *testing.T, objects Objects, kind string) []T {
	t.Helper()
	var found []T
	for _, o := range objects {
		if o.Kind != kind {
			continue
		}
		var decoded T
		if err := yaml.UnmarshalStrict(o.YAML, &decoded); err != nil {
			t.Fatalf("decode %s: %v", o, err)
		}
		found = append(found, decoded)
	}
	return found
}

// Only decodes the one object of a kind.
func Only[T any](t *testing.T, objects Objects, kind string) T {
	t.Helper()
	found := All[T](t, objects, kind)
	if len(found) != 1 {
		t.Fatalf("there are %d objects of kind %s, want 1", len(found), kind)
	}
	return found[0]
}

// Named decodes the object of a kind that has a name.
func Named[T any](t *testing.T, objects Objects, kind, name string) T {
	t.Helper()
	var of Objects
	for _, o := range objects {
		if o.Name == name {
			of = append(of, o)
		}
	}
	return Only[T](t, of, kind)
}
