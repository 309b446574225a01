package loop

import (
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
)

// CheckNodes returns ErrNodes where no file can be made a device: without the loop driver, and
// where the directory of nodes is not a devtmpfs, since the kernel makes the nodes of new
// devices only there. It attaches nothing.
func (k *Kernel) CheckNodes() error {
	var st unix.Statx_t
	if err := unix.Statx(k.dev.Fd(), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: k.dev.String(), Err: err}
	}
	mounts, err := mountinfo.Own()
	if err != nil {
		return err
	}
	// None where /proc is of another namespace: then it is not known.
	if m := mounts.ByID(st.Mnt_id); m != nil && m.Type != "devtmpfs" {
		return fmt.Errorf("%w: the directory of device nodes %s (--device-nodes) is not the host's /dev but on %s: "+
			"mount the host's /dev into the driver's container, and name that mount", ErrNodes, k.dev, m.Type)
	}
	c, err := k.control()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNodes, err)
	}
	return c.close()
}
