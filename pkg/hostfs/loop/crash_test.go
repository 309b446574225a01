package loop_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// attachIn has this test binary attach and detach the file "a" in a directory until
// it is killed. It says what it has done, and goes on when asked to.
const attachIn = "LOOP_TEST_ATTACH_IN"

func TestMain(m *testing.M) {
	if root := os.Getenv(attachIn); root != "" {
		fmt.Println(attachAndDetach(root))
		os.Exit(1)
	}
	testenv.Main(m)
}

func attachAndDetach(root string) error {
	d, err := dir.Open(root)
	if err != nil {
		return err
	}
	dev, err := dir.Open("/dev")
	if err != nil {
		return err
	}
	f, err := loop.Open(d, "a")
	if err != nil {
		return err
	}
	k := loop.NewKernel(dev)
	input := bufio.NewReader(os.Stdin)
	for {
		device, err := k.Attach(f, loop.Options{})
		if err != nil {
			return err
		}
		fmt.Println("attached")
		if _, err := input.ReadString('\n'); err != nil {
			return err
		}
		if err := k.Detach(context.Background(), device); err != nil {
			return err
		}
		fmt.Println("detached")
		if _, err := input.ReadString('\n'); err != nil {
			return err
		}
	}
}

// Whenever the process is killed, it leaves a complete device or none.
func TestCrash_deviceIsFoundAgain(t *testing.T) {
	testenv.NeedRoot(t)
	at := testenv.Tmpfs(t, 64*mib)
	f := file(t, open(t, at), "a", mib)
	k := kernel(t)
	found := 0
	for round := range 12 {
		runUntilKilled(t, at, round)
		all, err := k.Attached()
		must.Succeed(t, err)
		for _, d := range all {
			if d.Backing != f.ID() {
				continue
			}
			found++
			if !d.Ours || d.SizeBytes != mib || d.BlockBytes != 512 {
				t.Errorf("round %d left %+v", round, d)
			}
			again, err := k.Attach(f, loop.Options{})
			if err != nil || again.Name != d.Name || again.Ending {
				t.Errorf("round %d: attached %+v, %v; want %+v", round, again, err, d)
			}
			must.Succeed(t, k.Detach(t.Context(), again))
		}
	}
	t.Logf("%d rounds of 12 left a device", found)
	if found < 3 {
		t.Error("three rounds end the process while it waits with a device")
	}
}

// runUntilKilled kills the process after so many steps of it, two rounds each: while it waits
// to be asked, and in whatever it does after that.
func runUntilKilled(t *testing.T, at string, round int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), attachIn+"="+at)
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	must.Succeed(t, cmd.Start())
	reader := bufio.NewReader(output)
	for step := range round/2 + 1 {
		line, err := reader.ReadString('\n')
		if err != nil || !strings.HasSuffix(line, "tached\n") {
			t.Errorf("the process said %q, %v", line, err)
			break
		}
		if step < round/2 || round%2 == 1 {
			_, err = io.WriteString(input, "\n")
			must.Succeed(t, err)
		}
	}
	must.Succeed(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
}
