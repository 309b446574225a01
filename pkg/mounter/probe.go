package mounter

import (
	"errors"
	"fmt"
	"strings"

	"k8s.io/utils/exec"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
)

// A content is what blkid(8) finds on a device.
type content struct {
	filesystem string // TYPE, if its USAGE is filesystem
	other      string // TYPE of anything else, such as LVM2_member
	partitions string // PTTYPE
}

func (c content) nothing() bool { return c == content{} }

// String names what was found.
func (c content) String() string {
	switch {
	case c.partitions != "":
		return "a partition table (" + c.partitions + ")"
	case c.other != "":
		return c.other
	case c.filesystem != "":
		return "a filesystem (" + c.filesystem + ")"
	}
	return "nothing known"
}

// probe asks blkid(8) for all that it knows. An error of it is an error: that blkid found
// nothing, which it reports with status 2, is one of its answers, but it gives the same one for a device that
// it could not read, so the caller has to read it too.
func probe(run exec.Interface, device string) (content, error) {
	output, err := run.Command("blkid", "-p", "-o", "export", "-s", "TYPE", "-s", "PTTYPE", "-s", "USAGE", device).CombinedOutput()
	var exit exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.Exited() && exit.ExitStatus() == 2 && len(strings.TrimSpace(string(output))) == 0:
		return content{}, nil
	case err != nil:
		return content{}, fmt.Errorf("find out what is on %s: blkid: %w: %s", device, err, strings.TrimSpace(string(output)))
	}
	return parse(device, string(output))
}

func parse(device, output string) (content, error) {
	values := make(map[string]string)
	for line := range strings.Lines(output) {
		line = strings.TrimSpace(line)
		key, value, ok := strings.Cut(line, "=")
		if line != "" && !ok {
			return content{}, fmt.Errorf("find out what is on %s: blkid printed %q", device, line)
		}
		values[key] = value
	}
	found := content{partitions: values["PTTYPE"]}
	if values["USAGE"] == "filesystem" && found.partitions == "" {
		found.filesystem = values["TYPE"]
	} else {
		found.other = values["TYPE"]
	}
	return found, nil
}

// unfinished reports whether what was found is what a killed mkfs leaves on a blank device that is not blank any more: an XFS that is marked
// as being made. The others write what has a name last, and the first bytes not before.
func (c content) unfinished(device blockdev.Device) bool {
	if c.filesystem != "xfs" {
		return false
	}
	inProgress, err := device.ByteAt(xfsInProgress)
	return err == nil && inProgress != 0
}

// xfsInProgress is the offset of sb_inprogress in the superblock of XFS: 1 until mkfs is done
// (XFS Algorithms & Data Structures, "Superblocks").
const xfsInProgress = 126
