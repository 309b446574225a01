package devices_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

func TestMain(m *testing.M) {
	trap.Launch()
	if child := strings.Fields(os.Getenv(childVariable)); len(child) == 3 {
		fmt.Fprintln(os.Stderr, cleanStepwise(child[0], devices.Wipe(child[1]), child[2])) // it returns with an error only
		os.Exit(1)
	}
	testenv.Main(m)
}

const mib = 1 << 20

// newIdentified makes a node whose loop devices stand for disks that have an identity: that of their file.
func newIdentified(t *testing.T) *devicestest.Harness {
	t.Helper()
	t.Cleanup(devices.IdentifyByFile())
	h := devicestest.New(t)
	h.Identified = true
	return h
}
