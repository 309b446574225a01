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
	"google.golang.org/grpc/metadata"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/inspect"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

const (
	removeInlineCommand = "remove-inline"
	removeLostCommand   = "remove-lost"
)

// A removal is what a command removes: check returns why not a volume, or nil, and only is the
// reason for which the driver, too, must find it abnormal.
type removal struct {
	check func(inspect.Volume) error
	only  health.Reason
}

var removable = map[string]removal{
	removeInlineCommand: {leftBehind, health.InlineUnpublished},
	removeLostCommand:   {lost, health.DirectoryMissing},
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

// remove has the driver delete the volume, if the driver, under the volume's lock, finds it
// abnormal for the same reason: another directory may have been inspected than the one that it
// serves, and what was inspected may have changed.
func (i inspection) remove(r removal) error {
	ctx, cancel := context.WithTimeout(context.Background(), removeWithin)
	defer cancel()
	report, err := i.report(ctx)
	if err != nil {
		return err
	}
	if err := onlyRemovable(&report, i.volume, r.check); err != nil {
		return err
	}
	if r.only == health.DirectoryMissing && !i.dataIsGone {
		return fmt.Errorf("volume %s: the removal of its record cannot be undone: were the directory put back afterwards, the volume would have neither a promise nor a limit; "+
			"if no claim and no PersistentVolume has it (kubectl get pv -o custom-columns=NAME:.metadata.name,HANDLE:.spec.csi.volumeHandle | grep %s) and the directory will not come back, repeat the command with --data-is-gone", i.volume, i.volume)
	}
	conn, err := grpc.NewClient("unix://"+i.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	ctx = metadata.AppendToOutgoingContext(ctx, driver.OnlyIfKey, string(r.only))
	_, err = csi.NewControllerClient(conn).DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: i.volume.String()})
	return errors.Join(err, conn.Close())
}

// onlyRemovable returns why a volume is not to be removed; nil if it is.
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

// leftBehind returns why a volume is not one that its pod left behind; nil if it is.
func leftBehind(v inspect.Volume) error {
	switch {
	case !v.Inline:
		return fmt.Errorf("volume %s is no inline volume: delete its PersistentVolume instead", v.ID)
	case v.Reason != string(health.InlineUnpublished):
		return fmt.Errorf("volume %s is not left behind: %s", v.ID, v.Condition)
	}
	return nil
}

// lost returns why a volume does not consist of only a record; nil if it does.
func lost(v inspect.Volume) error {
	if !v.Lost {
		return fmt.Errorf("volume %s has its directory: delete its PersistentVolume instead", v.ID)
	}
	return nil
}
