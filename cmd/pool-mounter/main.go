// Command pool-mounter keeps the PersistentVolumeClaim of a storage pool mounted at the pool's path on a
// node. It runs in a pod that has the claim, and needs no Kubernetes API.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
)

func main() {
	command, err := parse(os.Args[1:], os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "pool-mounter: invalid command line:\n%v\n", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// After the first signal the default holds again: a second one ends the process.
	context.AfterFunc(ctx, stop)
	err = confine()
	if err == nil {
		err = run(ctx, command)
	}
	klog.Flush()
	if err != nil {
		// The last line, which is what Kubernetes shows of a container that failed.
		fmt.Fprintf(os.Stderr, "pool-mounter %s: %v\n", command.name, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, c command) error {
	switch c.name {
	case probeCommand:
		return c.mounter.Check()
	case lookCommand:
		return c.mounter.Look(ctx)
	case unmountCommand:
		return c.mounter.Unmount(ctx)
	}
	return c.mounter.Run(ctx)
}

// confine gives up what the mounter does not need: a privileged container has everything.
func confine() error {
	missing, err := privilege.Keep(privilege.ForMounter)
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		klog.V(2).InfoS("Keeping all capabilities: this binary was built with cgo")
		return nil
	case err != nil:
		return err
	case len(missing) > 0:
		klog.InfoS("Missing capabilities; some steps will fail", "missing", fmt.Sprint(missing))
	}
	return nil
}
