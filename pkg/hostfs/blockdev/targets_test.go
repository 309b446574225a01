package blockdev

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// What LIO and the controllers of nvmet write is written here as their sources do: no kernel of the tests has them. For the namespaces
// of nvmet there is TestDiskServedByKernelIsRefused.
func TestTargets(t *testing.T) {
	testenv.NeedRoot(t)
	image := filepath.Join(t.TempDir(), "disk")
	must.Succeed(t, os.WriteFile(image, make([]byte, 1<<20), 0o600))
	loop, err := loopfs.Attach(image)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, loop.Close()) })
	number, err := At(loop.Name())
	must.Succeed(t, err)
	facts, err := Inspect(number)
	must.Succeed(t, err)
	null := Number{1, 3}
	facts.Commands = []Number{null}
	info := func(path string) string {
		return "Status: ACTIVATED  Max Queue Depth: 128  SectorSize: 512  HwMaxSectors: 16384\n        TCM FILEIO ID: 0        File: " + path + "  Size: 1048576  Mode: O_DSYNC Async: 0\n"
	}
	for name, c := range map[string]struct {
		file, content string
		served, fails bool
	}{
		"LIO":                     {"target/core/fileio_0/a/info", info(loop.Name()), true, false},
		"LIO, another device":     {"target/core/fileio_0/a/info", info("/dev/zero"), false, false},
		"LIO, not set up":         {"target/core/fileio_0/a/info", "Status: DEACTIVATED\n", false, false},
		"LIO, a path that is not": {"target/core/fileio_0/a/info", info("/none"), false, true},
		"nvmet":                   {"nvmet/subsystems/a/namespaces/1/device_path", loop.Name() + "\n", true, false},
		"nvmet, its controller":   {"nvmet/subsystems/a/passthru/device_path", "/dev/null\n", true, false},
		"nvmet, not set up":       {"nvmet/subsystems/a/namespaces/1/device_path", "(null)\n", false, false},
	} {
		t.Run(name, func(t *testing.T) {
			config := t.TempDir()
			must.Succeed(t, os.MkdirAll(filepath.Dir(filepath.Join(config, c.file)), 0o700))
			must.Succeed(t, os.WriteFile(filepath.Join(config, c.file), []byte(c.content), 0o600))
			users, err := FindTargets([]Facts{facts}, config, "/")
			if (err != nil) != c.fails || slices.Equal(users.Targets, []string{filepath.Dir(c.file)}) != c.served {
				t.Errorf("targets %q, %v; want one: %t, an error: %t", users.Targets, err, c.served, c.fails)
			}
		})
	}
}

// What is mounted below a directory whose server is gone, and can be seen nowhere else, may be any device.
func TestMountThatCannotBeSeenIsHidden(t *testing.T) {
	if _, err := newSearch(View{}, nil).elsewhere(mount{pid: os.Getpid(), id: -1, on: "0:5", root: "/node"}); !errors.Is(err, ErrHidden) {
		t.Errorf("elsewhere = %v, want %v", err, ErrHidden)
	}
}
