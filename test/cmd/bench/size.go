package main

import (
	"context"
	"fmt"
	"os"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// prepareSize reports how large the program is, on disk and in memory.
func prepareSize(ctx context.Context, s *scene) ([]comparison, error) {
	idle, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	loaded, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	const inFlight = 64
	work := func(ctx context.Context) error {
		return inParallel(ctx, inFlight, max(inFlight, 10*s.order.samples), func(ctx context.Context, id string) error {
			for _, call := range []func(context.Context, string) error{loaded.create, loaded.publish, loaded.stats, loaded.unpublish, loaded.Delete} {
				if err := call(ctx, id); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return []comparison{
		{name: "the program", unit: megabytes, budget: budget{Max: drivertest.MostBytes / 1e6}, ours: fileSize(s.binary)},
		{name: "memory, idle", unit: mebibytes, ours: idle.memory("VmRSS")},
		{
			name: fmt.Sprintf("memory, most under calls of %d at a time", inFlight), unit: mebibytes, limit: "idle",
			ours: after(work, loaded.memory("VmHWM")), bare: idle.memory("VmRSS"),
		},
	}, nil
}

func fileSize(path string) measureFunc {
	return func(context.Context) (float64, error) {
		info, err := os.Stat(path)
		if err != nil {
			return 0, err
		}
		return float64(info.Size()) / 1e6, nil
	}
}
