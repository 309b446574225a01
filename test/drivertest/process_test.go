package drivertest

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// isParent makes this test binary one that has a child.
const isParent = "DRIVERTEST_PARENT"

func TestMain(m *testing.M) {
	if os.Getenv(isParent) != "" {
		os.Exit(haveChild())
	}
	testenv.Main(m)
}

// haveChild starts a child that shares the standard output and waits for it.
func haveChild() int {
	cmd := exec.Command("sleep", "3600")
	cmd.Stdout = os.Stdout
	child, err := startChild(cmd)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("child", child.Pid)
	<-child.exited
	return 0
}

// A disk that is slow, and what goes on because of that, ends no test but those that have it hang.
func TestCallsOnSlowDisk(t *testing.T) {
	slow := status.Error(codes.Unavailable, fmt.Sprintf("pool \"local\": %v", hang.Stuck(5*time.Second)))
	full := status.Error(codes.ResourceExhausted, slow.Error())
	busy := status.Error(codes.Aborted, "another call is in progress")
	other := status.Error(codes.Unavailable, "the pool is not mounted")
	for name, test := range map[string]struct {
		answers []error
		hanging bool
		want    codes.Code
		calls   int
	}{
		"slow":           {[]error{slow, full, busy, nil}, false, codes.OK, 4},
		"slow, then not": {[]error{slow, other}, false, codes.Unavailable, 2},
		"busy":           {[]error{busy}, false, codes.Aborted, 1},
		"refused":        {[]error{other}, false, codes.Unavailable, 1},
		"hanging":        {[]error{slow}, true, codes.Unavailable, 1},
	} {
		t.Run(name, func(t *testing.T) {
			p, calls := new(Process), 0
			if test.hanging {
				p.Hanging()
			}
			err := p.calling(t.Context(), "", nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				calls++
				return test.answers[calls-1]
			})
			if status.Code(err) != test.want || calls != test.calls {
				t.Errorf("%v after %d calls, want %v after %d", err, calls, test.want, test.calls)
			}
		})
	}
}

// No driver outlives a test that is killed.
func TestChildDiesWithParent(t *testing.T) {
	self, err := os.Executable()
	must.Succeed(t, err)
	parent := exec.CommandContext(t.Context(), self)
	parent.Env = append(os.Environ(), isParent+"=1")
	output, err := parent.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, parent.Start())
	_, err = output.Read(make([]byte, 64))
	must.Succeed(t, err)
	must.Succeed(t, parent.Process.Kill())
	// The pipe ends when neither of them holds it any more; a child that lives on
	// is found by the test's timeout.
	if rest, err := io.ReadAll(output); err != nil || len(rest) > 0 {
		t.Errorf("after the parent's death: %q, %v", rest, err)
	}
	_ = parent.Wait()
}
