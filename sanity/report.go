// Package sanity runs csi-sanity, the conformance suite of the CSI community,
// against the real driver with real mounts, on a pool of each filesystem. No
// spec may fail, and one may be skipped only for a capability that the driver
// is not to have.
package sanity

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// A spec is one of csi-sanity's tests and how it ended.
type spec struct {
	name string
	// state is Ginkgo's word: passed, failed, skipped, pending and a few more.
	state string
	// message is why it was skipped or failed.
	message string
}

// Ginkgo's words for ends that are no failure. Pending is what csi-sanity's own
// authors have switched off.
const (
	passed  = "passed"
	skipped = "skipped"
	pending = "pending"
)

// readReport reads the JSON report of a Ginkgo run.
func readReport(r io.Reader) ([]spec, error) {
	var suites []struct {
		SpecialSuiteFailureReasons []string
		SpecReports                []struct {
			ContainerHierarchyTexts []string
			LeafNodeType            string
			LeafNodeText            string
			State                   string
			Failure                 struct{ Message string }
		}
	}
	if err := json.NewDecoder(r).Decode(&suites); err != nil {
		return nil, fmt.Errorf("read the report of csi-sanity: %w", err)
	}
	var specs []spec
	for _, suite := range suites {
		for _, reason := range suite.SpecialSuiteFailureReasons {
			specs = append(specs, spec{name: "the suite as a whole", state: "failed", message: reason})
		}
		for _, report := range suite.SpecReports {
			// Set-up and reporting of the suite are nodes too, but count only if they fail.
			if report.LeafNodeType != "It" && report.State == passed {
				continue
			}
			specs = append(specs, spec{
				name:    strings.TrimSpace(strings.Join(append(report.ContainerHierarchyTexts, report.LeafNodeText), " ")),
				state:   report.State,
				message: strings.TrimSpace(report.Failure.Message),
			})
		}
	}
	return specs, nil
}

// lacking are csi-sanity's words for the capabilities that the driver is not to have. A capability that is lost is
// skipped with other words.
var lacking = []string{
	"Controller Publish, UnpublishVolume not supported",
	"ControllerExpandVolume not supported",
	"ControllerModifyVolume not supported",
	"ControllerPublishVolume not supported",
	"ControllerPublishVolume.readonly field not supported",
	"ControllerUnpublishVolume not supported",
	"GroupControllerService not supported",
	"Modify Volume not supported",
	"Modify volume not supported",
	"NodeStageVolume not supported",
	"NodeUnstageVolume not supported",
}

// needed are in the names of specs of which one each has to pass: a spec that is renamed, or not in the suite any
// more, is not among those that are skipped.
var needed = []string{
	"CreateVolume", "DeleteVolume", "ListVolumes", "GetCapacity", "NodePublishVolume", "NodeGetVolumeStats", "NodeExpandVolume",
	"CreateSnapshot", "DeleteSnapshot", "ListSnapshots", "GetSnapshot", "existing source snapshot", "existing source volume",
	"ControllerGetVolumeHealth", "ControllerListVolumeHealth", "NodeGetVolumeHealth", "NodeGetStorageHealth", "snapshot with accessibility requirements",
}

// always are in the names of specs, of health and of the topology of snapshots, that have to pass: nothing excuses one.
var always = []string{"VolumeHealth", "StorageHealth", "snapshot with accessibility requirements"}

// problems are the specs that failed or were skipped without leave, and what no spec has tried.
func problems(specs []spec) (found []string) {
	for _, s := range specs {
		excused := s.state == pending || s.state == skipped && slices.Contains(lacking, s.message)
		required := slices.ContainsFunc(always, func(word string) bool { return strings.Contains(s.name, word) })
		if s.state == passed || excused && !required {
			continue
		}
		found = append(found, fmt.Sprintf("%s: %s: %s", s.name, s.state, s.message))
	}
	for _, name := range needed {
		if !slices.ContainsFunc(specs, func(s spec) bool { return s.state == passed && strings.Contains(s.name, name) }) {
			found = append(found, fmt.Sprintf("no spec of %q has passed", name))
		}
	}
	return found
}
