package loop

import (
	"errors"
	"path"
	"strings"
)

// deleted is what the kernel adds to the name of a file that is in no directory any more
// (d_path in fs/d_path.c).
const deleted = " (deleted)"

// OnDeleted are the devices of this package on files which had that name, and are deleted:
// only the device keeps the file, and with it the filesystem. Other devices are not opened.
// FormerPath is the path that the file had.
func (k *Kernel) OnDeleted(fileName string) ([]Device, error) {
	numbers, err := attachedNumbers()
	if err != nil {
		return nil, err
	}
	var devices []Device
	for _, number := range numbers {
		former, err := formerPath(nodeName(number))
		if errors.Is(err, ErrNotAttached) {
			continue
		}
		if err != nil {
			return nil, err
		}
		was, gone := strings.CutSuffix(former, deleted)
		if !gone || path.Base(was) != fileName {
			continue
		}
		d, err := k.Inspect(nodeName(number))
		switch {
		case errors.Is(err, ErrNotAttached), err == nil && !d.Ours:
			continue
		case err != nil:
			return nil, err
		}
		d.FormerPath = was
		devices = append(devices, d)
	}
	return devices, nil
}
