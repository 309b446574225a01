package sanity

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// suiteVariable holds, as JSON, what a child of this test binary has to test.
const suiteVariable = "SANITY_SUITE"

// A suite is what csi-sanity needs to know of a driver.
type suite struct {
	Endpoint string
	// Dir is where it publishes volumes.
	Dir string
	// Access is "mount" or "block".
	Access string
	// Size is that of a volume, and Grown that of one that was expanded, in bytes.
	Size, Grown int64
	Parameters  map[string]string
}

// run runs csi-sanity in a process of its own, because Ginkgo can run only one
// suite in each. It returns every spec's end, and what the suite printed.
func (s suite) run(t *testing.T) (specs []spec, output string) {
	t.Helper()
	encoded, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	report := filepath.Join(t.TempDir(), "report.json")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "-ginkgo.no-color", "-ginkgo.json-report="+report)
	cmd.Env = append(os.Environ(), suiteVariable+"="+string(encoded))
	// The death signal is tied to the thread that forks.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}

	printed, err := cmd.CombinedOutput()
	printed = bytes.TrimSpace(printed)
	// Failed specs are in the report. What is not there is this package's fault.
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		t.Fatalf("run csi-sanity: %v\n%s", err, printed)
	}
	file, err := os.Open(report)
	if err != nil {
		t.Fatalf("csi-sanity left no report: %v\n%s", err, printed)
	}
	defer file.Close()
	if specs, err = readReport(file); err != nil {
		t.Fatal(err)
	}
	return specs, string(printed)
}

// runSuite is the child's part. It returns the status to exit with.
func runSuite(encoded string) int {
	var s suite
	if err := json.Unmarshal([]byte(encoded), &s); err != nil {
		fmt.Fprintf(os.Stderr, "read $%s: %v\n", suiteVariable, err)
		return 2
	}
	flag.Parse() // Ginkgo's
	config := sanity.NewTestConfig()
	config.Address = s.Endpoint
	config.TargetPath = filepath.Join(s.Dir, "target")
	config.StagingPath = filepath.Join(s.Dir, "staging")
	config.TestVolumeAccessType = s.Access
	config.TestVolumeSize = s.Size
	config.TestVolumeExpandSize = s.Grown
	config.TestVolumeParameters = s.Parameters
	config.DialOptions = append(config.DialOptions, grpc.WithChainUnaryInterceptor(drivertest.Patiently, sized))
	var outcome outcome
	sanity.Test(&outcome, config)
	return int(outcome)
}

// sized has a message that was received equal one that was sent. csi-sanity 5.6.0 compares the topologies of a node and of
// a snapshot as Go structures: what was sent has its size in a field, for the encoder, and what was received has not.
func sized(ctx context.Context, method string, request, response any, c *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	err := invoke(ctx, method, request, response, c, options...)
	if m, ok := response.(proto.Message); ok && err == nil {
		proto.Size(m)
	}
	return err
}

// An outcome is the exit status of a suite; Ginkgo calls Fail if a spec has.
type outcome int

func (o *outcome) Fail() { *o = 1 }
