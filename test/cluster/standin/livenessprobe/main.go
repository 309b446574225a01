// livenessprobe stands in for the real one: a request for /healthz probes the
// driver.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"kubevirt.io/hostpath-provisioner/test/cluster/standin/sidecar"
)

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "socket of the driver")
	endpoint := flag.String("http-endpoint", "", "address to answer at /healthz on")
	timeout := flag.Duration("probe-timeout", time.Second, "for a call to the driver")
	flag.String("metrics-path", "/metrics", "without effect")
	flag.Int("v", 0, "how much is logged; without effect")
	flag.Parse()

	sidecar.Main(func(ctx context.Context) error { return run(ctx, *address, *endpoint, *timeout) })
}

func run(ctx context.Context, address, endpoint string, timeout time.Duration) error {
	connection, err := sidecar.Dial(address)
	if err != nil {
		return err
	}
	driver := csi.NewIdentityClient(connection)
	return sidecar.ServeHealth(ctx, endpoint, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		answer, err := driver.Probe(ctx, &csi.ProbeRequest{})
		if err != nil {
			return fmt.Errorf("probe the driver: %w", err)
		}
		if ready := answer.GetReady(); ready != nil && !ready.GetValue() {
			return errors.New("the driver is not ready")
		}
		return nil
	})
}
