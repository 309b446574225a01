package loop_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// attachIn has this test binary attach and detach the file "a" in a directory until
// it is killed.
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
	for {
		device, err := k.Attach(f, loop.Options{})
		if err != nil {
			return err
		}
		fmt.Println("attached")
		if err := k.Detach(context.Background(), device); err != nil {
			return err
		}
		fmt.Println("detached")
	}
}

// Whenever the process dies, what is left is a whole device or none.
func TestWhatAKilledProcessAttachedIsFound(t *testing.T) {
	testenv.NeedRoot(t)
	at := testenv.Tmpfs(t, 64*mib)
	f := file(t, open(t, at), "a", mib)
	k := kernel(t)
	found := 0
	for round := range 12 {
		runUntilKilled(t, at, round)
		all, err := k.Attached()
		must(t, err)
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
			must(t, k.Detach(t.Context(), again))
		}
	}
	t.Logf("%d rounds of 12 left a device", found)
	if found == 0 {
		t.Error("no round left a device")
	}
}

// runUntilKilled kills the process after so many lines of it, in whatever it does then.
func runUntilKilled(t *testing.T, at string, lines int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), attachIn+"="+at)
	output, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	reader := bufio.NewReader(output)
	for range lines + 1 {
		line, err := reader.ReadString('\n')
		if err != nil || !strings.HasSuffix(line, "tached\n") {
			t.Errorf("the process said %q, %v", line, err)
			break
		}
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
}
