package main

import (
	"context"
	"fmt"
	"time"
)

const (
	volumeBytes = 1 << 30

	// The small one is filled.
	smallBytes = 64 << 20
	grownBytes = 2 * smallBytes

	// The disk of a virtual machine.
	diskBytes      = 128 << 20
	grownDiskBytes = 2 * diskBytes
)

// A step is one row of the table.
type step struct {
	what string
	// call is the CSI call that it makes, whose time is shown; or, if local is
	// set, what is done on the node itself, and then all of it is timed.
	call  string
	local bool
	// run returns the answer in few words. An error is an answer that the driver
	// should not have given.
	run func(*scene, context.Context) (answer, error)
}

// An answer is the third cell of a row.
type answer struct {
	text string
	look look
}

func fine(format string, args ...any) (answer, error) {
	return answer{fmt.Sprintf(format, args...), good}, nil
}

// steps are the lives of a volume and its snapshot, of a small volume and of a disk, with
// what goes wrong in them.
var steps = []step{
	{what: "Who is there?", call: "GetPluginInfo", run: (*scene).askName},
	{what: "Are the pools ready?", call: "Probe", run: (*scene).probe},
	{what: "Which node is this?", call: "NodeGetInfo", run: (*scene).askNode},
	{what: "How much room is there?", call: "GetCapacity", run: (*scene).askRoom},
	{what: "Make a volume of 1 GiB", call: "CreateVolume", run: (*scene).create},
	{what: "How much room is left?", call: "GetCapacity", run: (*scene).askRoomLeft},
	{what: "Mount it for a pod", call: "NodePublishVolume", run: (*scene).publish},
	{what: "The pod writes 4 MiB", call: "write, sync", local: true, run: (*scene).write},
	{what: "How full is the volume?", call: "NodeGetVolumeStats", run: (*scene).stats},
	{what: "What does df show?", call: "statfs", local: true, run: (*scene).df},
	{what: "Make a small one, of 64 MiB", call: "CreateVolume", run: (*scene).createSmall},
	{what: "Mount it for another pod", call: "NodePublishVolume", run: (*scene).publishSmall},
	{what: "That pod fills it", call: "write, sync", local: true, run: (*scene).fillSmall},
	{what: "It writes one byte more", call: "write", local: true, run: (*scene).overfill},
	{what: "How full is it now?", call: "NodeGetVolumeStats", run: (*scene).statsFull},
	{what: "Grow it to 128 MiB, in use", call: "NodeExpandVolume", run: (*scene).grow},
	{what: "Its pod writes 32 MiB more", call: "write, sync", local: true, run: (*scene).writeMore},
	{what: "How is the first one meanwhile?", call: "NodeGetVolumeStats", run: (*scene).statsUntouched},
	{what: "Unmount the small one", call: "NodeUnpublishVolume", run: (*scene).unpublishSmall},
	{what: "Delete it", call: "DeleteVolume", run: (*scene).removeSmall},
	{what: "Mount the first read-only too", call: "NodePublishVolume", run: (*scene).publishReadOnly},
	{what: "Write there", call: "open", local: true, run: (*scene).writeReadOnly},
	{what: "Make a block volume of 128 MiB", call: "CreateVolume", run: (*scene).createDisk},
	{what: "Give it to a virtual machine", call: "NodePublishVolume", run: (*scene).publishDisk},
	{what: "The machine writes 4 MiB", call: "write, sync", local: true, run: (*scene).writeDisk},
	{what: "It writes past the disk's end", call: "write", local: true, run: (*scene).overfillDisk},
	{what: "Grow it to 256 MiB, in use", call: "NodeExpandVolume", run: (*scene).growDisk},
	{what: "Mount a volume ../../etc", call: "NodePublishVolume", run: (*scene).publishHostile},
	{what: "Make one too large for the pool", call: "CreateVolume", run: (*scene).createTooLarge},
	{what: "Delete the volume in use", call: "DeleteVolume", run: (*scene).deleteInUse},
	{what: "Crash the driver, start it anew", call: "SIGKILL, start", local: true, run: (*scene).crash},
	{what: "The pod reads its 4 MiB", call: "read", local: true, run: (*scene).read},
	{what: "Mount it again, as kubelet does", call: "NodePublishVolume", run: (*scene).publishAgain},
	{what: "The machine reads its 4 MiB", call: "read", local: true, run: (*scene).readDisk},
	{what: "Take the disk from the machine", call: "NodeUnpublishVolume", run: (*scene).unpublishDisk},
	{what: "Delete the disk", call: "DeleteVolume", run: (*scene).removeDisk},
	{what: "Unmount the read-only one", call: "NodeUnpublishVolume", run: (*scene).unpublishReadOnly},
	{what: "Unmount the pod's", call: "NodeUnpublishVolume", run: (*scene).unpublish},
	{what: "Take a snapshot of the volume", call: "CreateSnapshot", run: (*scene).takeSnapshot},
	{what: "Delete the volume", call: "DeleteVolume", run: (*scene).remove},
	{what: "Delete it again, as if unheard", call: "DeleteVolume", run: (*scene).remove},
	{what: "Restore the snapshot", call: "CreateVolume", run: (*scene).restore},
	{what: "Mount the restored volume", call: "NodePublishVolume", run: (*scene).publishRestored},
	{what: "A pod reads the 4 MiB in it", call: "read", local: true, run: (*scene).read},
	{what: "Unmount it", call: "NodeUnpublishVolume", run: (*scene).unpublishRestored},
	{what: "Delete the restored volume", call: "DeleteVolume", run: (*scene).removeRestored},
	{what: "Delete the snapshot", call: "DeleteSnapshot", run: (*scene).removeSnapshot},
	{what: "How much room is there now?", call: "GetCapacity", run: (*scene).askRoom},
}

// show takes a step and writes its row, also if the answer is wrong.
func (s *scene) show(ctx context.Context, table *table, step step) error {
	s.meter = meter{}
	begin := time.Now()
	answer, err := step.run(s, ctx)
	took := time.Since(begin)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !step.local {
		took = s.meter.spent
		s.calls += s.meter.calls
		s.spent += s.meter.spent
	}
	if err != nil {
		table.row(step.what, step.call, bad, "not as it should be", took)
		return fmt.Errorf("%s (%s): %w", step.what, step.call, err)
	}
	table.row(step.what, step.call, answer.look, answer.text, took)
	return nil
}
