package move

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// What the runbooks have a user type and look for is there.
func TestRunbooks(t *testing.T) {
	const runbooks = "../../../docs/runbooks/"
	fence, still := must.Value(os.ReadFile(runbooks+"HostPathMoveFenced.md"))(t), must.Value(os.ReadFile(runbooks+"HostPathMoveStandsStill.md"))(t)
	text := string(fence) + string(still)

	patches := regexp.MustCompile(`patch volumemove -n NAMESPACE MOVE --type=merge -p '([^']+)'`).FindAllStringSubmatch(text, -1)
	if len(patches) != 1 {
		t.Fatalf("%d patches are found", len(patches))
	}
	var patched v1alpha1.VolumeMove
	strict := json.NewDecoder(bytes.NewBufferString(patches[0][1]))
	strict.DisallowUnknownFields()
	if must.Succeed(t, strict.Decode(&patched)); patched.Spec.When != v1alpha1.WhenEvict {
		t.Errorf("%s has pods evicted when %q", patches[0][1], patched.Spec.When)
	}

	selectors := regexp.MustCompile(`get pods -n hostpath-provisioner -l (\S+)`).FindAllStringSubmatch(text, -1)
	m := madeFor("m")
	for _, s := range selectors {
		if selector := must.Value(labels.Parse(s[1]))(t); !selector.Matches(labels.Set(m.meta("-out").Labels)) {
			t.Errorf("%s selects no mover", selector)
		}
	}
	if len(selectors) == 0 {
		t.Error("no movers are listed")
	}

	phases := regexp.MustCompile("phase is `([A-Z][a-z]+)`|- `([A-Z][a-z]+)`:").FindAllStringSubmatch(text, -1)
	for _, p := range phases {
		if phase := v1alpha1.Phase(p[1] + p[2]); !slices.Contains(v1alpha1.Phases, phase) {
			t.Errorf("there is no phase %s", phase)
		}
	}
	if len(phases) < 3 {
		t.Errorf("only %d phases are found", len(phases))
	}
	if !strings.Contains(text, fmt.Sprintf("port %d", port)) {
		t.Errorf("the port is not %d", port)
	}
}
