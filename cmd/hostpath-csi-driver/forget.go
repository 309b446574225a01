package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
)

const forgetPoolCommand = "forget-pool"

// runForgetPool has the driver take the volumes of a pool that is not configured any more for deleted, and returns the
// exit status. Nothing in the pool changes.
func runForgetPool(args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	i, err := parseInspection(forgetPoolCommand, args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return healthy
	}
	if err == nil {
		err = i.forget(context.Background(), stdout)
	}
	if err != nil {
		fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", forgetPoolCommand, err)
		return failed
	}
	return healthy
}

func (i inspection) forget(ctx context.Context, stdout io.Writer) error {
	options, err := i.options()
	if err != nil {
		return err
	}
	pools, err := options.Served.OutOfUse(options.Configured(ctx, i.pools))
	if err != nil {
		return err
	}
	forgotten := 0
	for _, p := range pools {
		if p.Name != i.forgotten {
			continue
		}
		if err := options.Served.Forget(p); err != nil {
			return err
		}
		forgotten++
		fmt.Fprintf(stdout, "forgot pool %s at %s: its volumes stay on the disk, and count as deleted\n", p.Name, p.Path)
	}
	if forgotten == 0 {
		return fmt.Errorf("no pool of the name %q was served here and is not configured any more", i.forgotten)
	}
	return nil
}
