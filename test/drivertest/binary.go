package drivertest

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// BinaryVariable names a driver that is already built, in place of a fresh one.
const BinaryVariable = "HOSTPATH_CSI_DRIVER"

// MostBytes is how large the driver's program may be, built as the image has it.
const MostBytes = 18_000_000

const command = "kubevirt.io/hostpath-provisioner/cmd/hostpath-csi-driver"

// Built is Binary, built once for all tests of a package that has testenv.Main, which removes it.
// These tests need root.
func Built(t testing.TB) string {
	t.Helper()
	testenv.NeedRoot(t)
	path, err := built()
	must.Succeed(t, err)
	return path
}

var built = sync.OnceValues(func() (string, error) { return Binary(context.Background(), os.TempDir()) })

// Binary returns the path of the driver's program: the one that $HOSTPATH_CSI_DRIVER
// names, or one built into dir. That has the race detector if the caller has it.
// The working directory has to be inside this module.
func Binary(ctx context.Context, dir string) (string, error) {
	if given := os.Getenv(BinaryVariable); given != "" {
		if _, err := os.Stat(given); err != nil {
			return "", fmt.Errorf("find the driver that $%s names: %w", BinaryVariable, err)
		}
		return filepath.Abs(given)
	}
	return build(ctx, dir, raceDetector())
}

// StaticBinary is Binary, built as the image has it: without cgo, which the race
// detector needs. It runs where there is nothing else, and gives up the privileges that
// it does not need.
func StaticBinary(ctx context.Context, dir string) (string, error) {
	if given := os.Getenv(BinaryVariable); given != "" {
		info, err := buildinfo.ReadFile(given)
		if err != nil {
			return "", fmt.Errorf("read how the driver that $%s names was built: %w", BinaryVariable, err)
		}
		if hasSetting(info, "CGO_ENABLED", "0") {
			return filepath.Abs(given)
		}
	}
	return build(ctx, dir, false)
}

func build(ctx context.Context, dir string, race bool) (string, error) {
	program := filepath.Join(dir, filepath.Base(command))
	args, cgo := []string{"build", "-o", program}, "CGO_ENABLED=0"
	if race {
		args, cgo = append(args, "-race"), "CGO_ENABLED=1"
	}
	cmd := exec.CommandContext(ctx, "go", append(args, command)...)
	cmd.Env = append(os.Environ(), cgo)
	output, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", command, err, bytes.TrimSpace(output))
	}
	return program, nil
}

func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && hasSetting(info, "-race", "true")
}

func hasSetting(info *debug.BuildInfo, key, value string) bool {
	return slices.Contains(info.Settings, debug.BuildSetting{Key: key, Value: value})
}
