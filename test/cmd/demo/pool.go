package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A ground is what a pool can be made on.
type ground struct {
	name  string
	mount func(ctx context.Context, dir string) error
}

// grounds are what sizes can be kept on, and what is still better than a directory.
var grounds = []ground{
	{"XFS with project quota", func(ctx context.Context, dir string) error {
		return loopfs.Mount(ctx, dir, "xfs", poolBytes, "prjquota")
	}},
	{"ext4 with project quota", mountExt4},
	{"btrfs with quotas on", mountBtrfs},
	{"XFS", func(ctx context.Context, dir string) error {
		return loopfs.Mount(ctx, dir, "xfs", poolBytes)
	}},
}

// makePool makes the best pool that this machine can have, and says what it is and
// the quota that enforces the sizes of its volumes; empty if there is none.
func makePool(ctx context.Context, path string, table *table) (quota.Kind, error) {
	if err := os.Mkdir(path, 0o750); err != nil {
		return "", fmt.Errorf("make the pool: %w", err)
	}
	name, err := firstGround(ctx, path, table)
	if err != nil {
		return "", err
	}
	table.note("A node with one storage pool: " + name + ".")
	return tellQuota(path, table)
}

func firstGround(ctx context.Context, path string, table *table) (name string, err error) {
	for _, g := range grounds {
		err := g.mount(ctx, path)
		if err == nil {
			return g.name + ", in a loop file of " + size(poolBytes), nil
		}
		if ctx.Err() != nil {
			return "", err
		}
		table.note("Not " + g.name + ": " + whyNot(err) + ".")
	}
	return "a directory", nil
}

// whyNot leaves out what mount(8) says, which can only guess.
func whyNot(err error) string {
	if errors.Is(err, loopfs.ErrMissing) || errors.Is(err, exec.ErrNotFound) {
		return err.Error()
	}
	return "it cannot be mounted here"
}

// tellQuota asks as the driver does.
func tellQuota(path string, table *table) (quota.Kind, error) {
	d, err := dir.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = d.Close() }()
	facility, err := quota.Detect(d)
	if errors.Is(err, quota.ErrNone) {
		table.note("Sizes are not enforced: " + err.Error() + "\n")
		return "", nil
	}
	if err != nil {
		return "", err
	}
	table.note("Sizes are enforced by the kernel.\n")
	return facility.Kind(), nil
}

// mountExt4 is loopfs.Mount with the features that project quota needs.
func mountExt4(ctx context.Context, path string) error {
	image := path + ".img"
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return err
	}
	// The loop device holds it from now on.
	defer os.Remove(image)
	if err := os.Truncate(image, poolBytes); err != nil {
		return err
	}
	if err := run(ctx, "mkfs.ext4", "-q", "-F", "-O", "project,quota", image); err != nil {
		return err
	}
	return run(ctx, "mount", "-t", "ext4", "-o", "loop,prjquota", image, path)
}

func mountBtrfs(ctx context.Context, path string) error {
	if err := loopfs.Mount(ctx, path, "btrfs", poolBytes); err != nil {
		return err
	}
	if err := loopfs.SwitchQuotasOn(ctx, path); err != nil {
		return errors.Join(err, loopfs.Unmount(path))
	}
	return nil
}

func run(ctx context.Context, args ...string) error {
	output, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", args[0], err, output)
	}
	return nil
}
