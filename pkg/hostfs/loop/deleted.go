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
	devices, err := k.look(func(former string) bool {
		was, gone := strings.CutSuffix(former, deleted)
		return gone && path.Base(was) == fileName
	})
	var ours []Device
	for _, d := range devices {
		if !d.Ours {
			continue
		}
		d.FormerPath, err = k.FilePath(d.Name)
		if errors.Is(err, ErrNotAttached) {
			continue
		}
		if err != nil {
			return nil, err
		}
		ours = append(ours, d)
	}
	return ours, err
}
