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

const (
	removeInlineCommand = "remove-inline"
	removeLostCommand   = "remove-lost"
)

// removable says of each command which volumes it removes: why not, or nil.
var removable = map[string]func(inspect.Volume) error{
	removeInlineCommand: leftBehind,
	removeLostCommand:   lost,
}

// removeWithin is how long the driver may take to remove a volume.
const removeWithin = 30 * time.Second

// runRemove removes a volume that inspect names, if it is of the kind that the command is
// for, and returns the exit status. Others are deleted with their PersistentVolume.
func runRemove(command string, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	i, err := parseInspection(command, args, getenv, stdout)
	if errors.Is(err, flag.ErrHelp) {
		return healthy
	}
	if err == nil {
		err = i.remove(removable[command])
	}
	if err != nil {
		fmt.Fprintf(stderr, "hostpath-csi-driver %s: %v\n", command, err)
		return failed
	}
	fmt.Fprintf(stdout, "removed %s\n", i.volume)
	return healthy
}

func (i inspection) remove(check func(inspect.Volume) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), removeWithin)
	defer cancel()
	report, err := i.report(ctx)
	if err != nil {
		return err
	}
	if err := onlyRemovable(&report, i.volume, check); err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix://"+i.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	return errors.Join(removeAbnormal(ctx, csi.NewControllerClient(conn), i.volume), conn.Close())
}

// removeAbnormal has the driver delete a volume that the driver finds abnormal too: another directory
// may have been inspected than the one that it serves. It refuses a volume that is published.
func removeAbnormal(ctx context.Context, driver csi.ControllerClient, id volume.ID) error {
	found, err := driver.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id.String()})
	if err != nil {
		return err
	}
	if condition := found.GetStatus().GetVolumeCondition(); !condition.GetAbnormal() {
		return fmt.Errorf("volume %s is in order for the driver (%s): is it the driver of the pool that was inspected?", id, condition.GetMessage())
	}
	_, err = driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id.String()})
	return err
}

// onlyRemovable answers why a volume is not to be removed; nil if it is.
func onlyRemovable(r *inspect.Report, id volume.ID, check func(inspect.Volume) error) error {
	found := 0
	for _, p := range r.Pools {
		for _, v := range p.Volumes {
			if err := check(v); err != nil {
				return err
			}
			found++
		}
	}
	if found != 1 {
		return fmt.Errorf("volume %s is in %d of the pools that could be read", id, found)
	}
	return nil
}

// leftBehind answers why a volume is not one that its pod left behind; nil if it is.
func leftBehind(v inspect.Volume) error {
	switch {
	case !v.Inline:
		return fmt.Errorf("volume %s is no inline volume: delete its PersistentVolume instead", v.ID)
	case v.Reason != string(health.InlineUnpublished):
		return fmt.Errorf("volume %s is not left behind: %s", v.ID, v.Condition)
	}
	return nil
}

// lost answers why a volume does not consist of only a record; nil if it does.
func lost(v inspect.Volume) error {
	if !v.Lost {
		return fmt.Errorf("volume %s has its directory: delete its PersistentVolume instead", v.ID)
	}
	return nil
}
