// The program asks a driver for the condition of a volume as a client of CSI v1.12 does, with the
// types generated from that version, and prints what it was told. The module is not the product's,
// because both versions have one import path. test/e2e/health runs it beside a client of v1.13.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// A report is what the calls say; nil for one that has no condition.
type report struct {
	ControllerCapability, NodeCapability                 bool
	ListVolumes, ControllerGetVolume, NodeGetVolumeStats *condition
}

type condition struct {
	Abnormal bool
	Message  string
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: csi112 ENDPOINT VOLUME-ID VOLUME-PATH")
		os.Exit(2)
	}
	if err := run(context.Background(), os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, endpoint, id, path string) error {
	connection, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = connection.Close() }() // nothing is under way
	var r report
	if err := r.askController(ctx, csi.NewControllerClient(connection), id); err != nil {
		return err
	}
	if err := r.askNode(ctx, csi.NewNodeClient(connection), id, path); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

func (r *report) askController(ctx context.Context, client csi.ControllerClient, id string) error {
	has, err := client.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		return err
	}
	r.ControllerCapability = slices.ContainsFunc(has.GetCapabilities(), func(c *csi.ControllerServiceCapability) bool {
		return c.GetRpc().GetType() == csi.ControllerServiceCapability_RPC_VOLUME_CONDITION
	})
	list, err := client.ListVolumes(ctx, &csi.ListVolumesRequest{})
	if err != nil {
		return err
	}
	for _, entry := range list.GetEntries() {
		if entry.GetVolume().GetVolumeId() == id {
			r.ListVolumes = told(entry.GetStatus().GetVolumeCondition())
		}
	}
	got, err := client.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
	if err != nil {
		return err
	}
	r.ControllerGetVolume = told(got.GetStatus().GetVolumeCondition())
	return nil
}

func (r *report) askNode(ctx context.Context, client csi.NodeClient, id, path string) error {
	has, err := client.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return err
	}
	r.NodeCapability = slices.ContainsFunc(has.GetCapabilities(), func(c *csi.NodeServiceCapability) bool {
		return c.GetRpc().GetType() == csi.NodeServiceCapability_RPC_VOLUME_CONDITION
	})
	stats, err := client.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: path})
	if err != nil {
		return err
	}
	r.NodeGetVolumeStats = told(stats.GetVolumeCondition())
	return nil
}

func told(c *csi.VolumeCondition) *condition {
	if c == nil {
		return nil
	}
	return &condition{c.GetAbnormal(), c.GetMessage()}
}
