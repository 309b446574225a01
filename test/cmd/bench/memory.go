package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// manifestFlags are flags of deploy/csi that take memory.
var manifestFlags = []string{"--v=2", drivertest.ServeMetrics}

// scrapes are so many that the driver's memory has seen what each of them takes.
const scrapes = 20

// isWatched has done to a driver what is done to it all day: external-health-monitor asks
// for all volumes, in pages as large as the driver likes, and Prometheus for the metrics.
func (a *actor) isWatched(ctx context.Context) error {
	if _, err := a.List(ctx, 0); err != nil {
		return err
	}
	for range scrapes {
		if _, err := a.Metrics(ctx); err != nil {
			return err
		}
	}
	return nil
}

// memory is a size that the kernel reports of the driver's process (proc_pid_status(5)).
func (a *actor) memory(field string) measureFunc {
	return func(context.Context) (float64, error) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Process.Pid()))
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, field+":"); ok {
				var kib float64
				_, err := fmt.Sscanf(value, "%f kB", &kib)
				return kib / 1024, err
			}
		}
		return 0, fmt.Errorf("the kernel reports no %s of process %d", field, a.Process.Pid())
	}
}
