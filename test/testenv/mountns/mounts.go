package mountns

import (
	"fmt"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
)

// Below lists the mount points at and below dir in the order in which they were
// mounted. A place with several mounts is listed as often.
func Below(dir string) ([]string, error) {
	mounts, err := mountinfo.Own()
	if err != nil {
		return nil, fmt.Errorf("list the mounts below %s: %w", dir, err)
	}
	var points []string
	for _, mount := range mounts {
		if mount.Mountpoint == dir || strings.HasPrefix(mount.Mountpoint, strings.TrimSuffix(dir, "/")+"/") {
			points = append(points, mount.Mountpoint)
		}
	}
	return points, nil
}
