package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const removeInlineCommand = "remove-inline"

// removeWithin is how long the driver may take to remove a volume.
const removeWithin = 30 * time.Second

// runRemoveInline removes an inline volume that its pod left behind, and returns the exit
// status. It removes no other: what has a PersistentVolume is deleted by that.
func runRemoveInline(args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	i, err := parseInspection(removeInlineCommand, args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return healthy
	}
	if err == nil {
		err = i.removeInline()
	}
	if err != nil {
		fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", removeInlineCommand, err)
		return failed
	}
	fmt.Fprintf(stdout, "removed %s\n", i.volume)
	return healthy
}

func (i inspection) removeInline() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeWithin)
	defer cancel()
	report, err := i.report(ctx)
	if err != nil {
		return err
	}
	if err := leftBehind(&report, i.volume); err != nil {
		return err
	}
	// The driver knows what it is doing with the volume at the moment, and refuses one that is
	// published.
	conn, err := grpc.NewClient("unix://"+i.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	_, err = csi.NewControllerClient(conn).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: i.volume.String()})
	return errors.Join(err, conn.Close())
}

// leftBehind answers why a volume is not one that its pod left behind; nil if it is.
func leftBehind(r *inspect.Report, id volume.ID) error {
	found := 0
	for _, p := range r.Pools {
		for _, v := range p.Volumes {
			switch {
			case !v.Inline:
				return fmt.Errorf("volume %s is no inline volume: delete its PersistentVolume instead", id)
			case v.Reason != string(health.InlineUnpublished):
				return fmt.Errorf("volume %s is not left behind: %s", id, v.Condition)
			}
			found++
		}
	}
	if found != 1 {
		return fmt.Errorf("volume %s is in %d of the pools that could be read", id, found)
	}
	return nil
}
