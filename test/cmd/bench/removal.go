package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// fullBytes is enough for the names of a great many files.
const fullBytes = 1 << 30

// prepareRemoval compares removing a volume that is full of files with removing one
// that has none.
func prepareRemoval(ctx context.Context, s *scene) ([]comparison, error) {
	const full, fresh = "pvc-full", "pvc-fresh"
	a, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	fill := func(ctx context.Context) error {
		if _, err := a.Create(ctx, drivertest.Volume{ID: full, Pool: poolName, Bytes: fullBytes}); err != nil {
			return err
		}
		return scatter(ctx, filepath.Join(a.pool(), full), s.order.files, nil)
	}
	create := func(ctx context.Context) error { return a.create(ctx, fresh) }
	// While the files were made the driver slept, and its first call is slower.
	awake := func(ctx context.Context) error {
		for range s.order.samples {
			if err := a.nothing(ctx); err != nil {
				return err
			}
		}
		return nil
	}
	return []comparison{{
		name: fmt.Sprintf("DeleteVolume with %s files", thousands(s.order.files)), unit: micros, limit: "DeleteVolume of a fresh volume",
		budget: budget{AtMost: 2},
		ours:   then(after(both(fill, awake), timed(func(ctx context.Context) error { return a.Delete(ctx, full) })), a.settle),
		bare:   then(after(both(create, awake), timed(func(ctx context.Context) error { return a.Delete(ctx, fresh) })), a.settle),
	}}, nil
}

// inEach is how many files are in a directory.
const inEach = 1000

// scatter makes files of one content in directories, and brings them to the disk: what waits
// to be written would be written by the next process that syncs.
func scatter(ctx context.Context, path string, files int, content []byte) error {
	for i := range files {
		d := filepath.Join(path, fmt.Sprintf("dir-%d", i/inEach))
		if i%inEach == 0 {
			if err := errors.Join(ctx.Err(), os.Mkdir(d, 0o755)); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(d, fmt.Sprintf("file-%d", i)), content, 0o600); err != nil {
			return err
		}
	}
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}

// thousands writes a number as people read it.
func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%s,%03d", thousands(n/1000), n%1000)
}
