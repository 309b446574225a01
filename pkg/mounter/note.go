package mounter

import (
	"errors"
	"io/fs"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// noteFile is next to the mount point while a blank device is formatted. It names the device as it is in
// this boot. An XFS on it that is marked as being made is then what a mkfs has left that was killed, and is made again. Nothing
// else is: the device may have been used for other data since. The note goes with the mount, and with the clean-up of the pool.
const noteFile = ".pool-mounter.formatting"

const noteBytes = 4096

func note(state *dir.Dir, device blockdev.Device) error {
	instance, err := device.Instance()
	if errors.Is(err, errors.ErrUnsupported) {
		return nil // what a mkfs leaves that is killed has to be erased by hand
	}
	if err != nil {
		return err
	}
	return state.WriteFile(noteFile, []byte(instance))
}

// noted reports whether the device was blank when a mounter began to format it, in this boot.
func noted(state *dir.Dir, device blockdev.Device) (bool, error) {
	content, err := state.ReadFile(noteFile, noteBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	instance, err := device.Instance()
	return string(content) == instance, err
}

// forget removes the note.
func forget(state *dir.Dir) error {
	return removeFile(state, noteFile)
}

func removeFile(from *dir.Dir, name string) error {
	err := from.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return errors.Join(err, from.Sync())
}
