// Package sanity runs csi-sanity, the conformance suite of the CSI community,
// against the real driver with real mounts, on a pool of each filesystem. No
// spec may fail, and one may be skipped only for a capability that the driver
// does not advertise.
package sanity

import (
	"encoding/json"
	"fmt"
	"io"
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
