package sanity

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func TestMain(m *testing.M) {
	if encoded := os.Getenv(suiteVariable); encoded != "" {
		os.Exit(runSuite(encoded))
	}
	testenv.Main(m)
}

const (
	poolName   = "local"
	poolBytes  = 8 << 30
	volumeSize = 64 << 20
	grownSize  = 128 << 20
)

func TestSanity(t *testing.T) {
	driver := drivertest.Built(t)
	for _, c := range configurations() {
		t.Run(c.name+" "+c.access, func(t *testing.T) { testPool(t, driver, c) })
	}
}

// testPool runs csi-sanity on a pool and checks what it leaves.
func testPool(t *testing.T, driver string, c configuration) {
	pool, dir := c.pool(t), t.TempDir()
	mounts := mountsBelow(t, pool)
	n := startNode(t, driver, drivertest.PoolConfig{Name: poolName, Path: pool, Enforcement: c.enforcement})

	s := suite{
		Endpoint:   n.Endpoint(),
		Dir:        dir,
		Access:     c.access,
		Size:       volumeSize,
		Grown:      grownSize,
		Parameters: map[string]string{"storagePool": poolName},
	}
	specs, output := s.run(t)
	for _, problem := range problems(specs) {
		t.Error(problem)
	}
	wantNothingLeft(t, n, pool)
	wantMounts(t, dir, 0)
	wantMounts(t, pool, mounts)
	wantNoDevices(t, pool)
	if err := n.Stop(); err != nil {
		t.Error(err)
	}
	if t.Failed() {
		t.Logf("what csi-sanity printed:\n%s", output)
		t.Logf("what the driver wrote:\n%s", n.Log())
	}
}

func startNode(t *testing.T, driver string, pool drivertest.PoolConfig) *drivertest.Process {
	t.Helper()
	n, err := drivertest.StartProcess(t.Context(), drivertest.Config{
		Binary:  driver,
		Name:    "sanity",
		Version: "sanity",
		Pools:   []drivertest.PoolConfig{pool},
		Flags:   []string{"--v=3"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// wantNothingLeft searches for volumes that csi-sanity's own clean-up should have had
// removed. The trash may still be full: it is emptied later.
func wantNothingLeft(t *testing.T, n *drivertest.Process, pool string) {
	t.Helper()
	if !n.Running() {
		t.Error("the driver has ended by itself")
		return
	}
	listed, err := csi.NewControllerClient(n.Conn()).ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil || len(listed.GetEntries()) > 0 {
		t.Errorf("volumes left behind: %v, %v", listed.GetEntries(), err)
	}
	snapshots, err := csi.NewControllerClient(n.Conn()).ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	if err != nil || len(snapshots.GetEntries()) > 0 {
		t.Errorf("snapshots left behind: %v, %v", snapshots.GetEntries(), err)
	}
	for _, pattern := range []string{"*", ".hostpath-provisioner/volumes/*", ".hostpath-provisioner/snapshots/*", ".hostpath-provisioner/creating/*/*"} {
		if found := names(t, pool, pattern); len(found) > 0 {
			t.Errorf("left behind in the pool: %s", strings.Join(found, ", "))
		}
	}
}

func mountsBelow(t *testing.T, dir string) int {
	t.Helper()
	found, err := mountns.Below(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(found)
}

func wantMounts(t *testing.T, dir string, want int) {
	t.Helper()
	if found, err := mountns.Below(dir); err != nil || len(found) != want {
		t.Errorf("mounts at %s: %q, %v; want %d", dir, found, err, want)
	}
}

func wantNoDevices(t *testing.T, pool string) {
	t.Helper()
	if found, err := loopfs.Left(pool); err != nil || len(found) > 0 {
		t.Errorf("loop devices left behind: %q, %v", found, err)
	}
}

// names lists what matches a pattern in a pool and is a volume's: not what the
// filesystem and the driver keep there for themselves.
func names(t *testing.T, pool, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(pool, pattern))
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(found, func(path string) bool {
		name := filepath.Base(path)
		return name == "lost+found" || name == ".hostpath-provisioner"
	})
}
