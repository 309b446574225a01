package quota

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// Room is how much trees can take of the disks of a btrfs, in bytes of one copy, where their profile is one for several disks and data has
// another: disks of different sizes, or of which one has more data, hold less. In the zero value it is not bounded.
type Room struct {
	Bounded bool
	// Left is what they can take beside all that is there.
	Left int64
	// All is what they could take of empty disks; 0 if that says nothing of used ones. Each byte of others takes no more than Loss of it.
	All, Loss int64
}

// room is how much trees can take of these devices.
func (s *spaces) room(devices []device) Room {
	profiles, data := s.profiles()
	r := Room{Bounded: true, Loss: data.loss()}
	var whole, unused []int64
	for _, d := range devices {
		whole = append(whole, d.free(0))
		unused = append(unused, d.free(d.Used))
	}
	for i, trees := range profiles {
		left, all := trees.most(unused), trees.most(whole)
		if !trees.mirrored() {
			all = 0 // a byte on one disk may take much of it
		}
		if i == 0 || left < r.Left {
			r.Left = left
		}
		if i == 0 || all < r.All {
			r.All = all
		}
	}
	for _, space := range s.found() {
		if space.Flags&(isReserve|isData) == 0 && space.Flags&isMetadata != 0 {
			r.Left += int64(space.Bytes - space.Used)
		}
	}
	return r
}

// bounded reports whether the room of the trees depends on the disks: not if they are where data is, or are on one disk at a time.
func (s *spaces) bounded() bool {
	trees, data := s.profiles()
	return slices.ContainsFunc(trees, func(p profile) bool { return p&^isDup != 0 && (p != data || len(trees) > 1) })
}

// profiles are those of the trees, of which there are several while they are converted, and one of the data.
func (s *spaces) profiles() (trees []profile, data profile) {
	for _, space := range s.found() {
		of := profile(space.Flags & allProfiles)
		switch {
		case space.Flags&isReserve != 0:
		case space.Flags&isData != 0:
			data = of
		case space.Flags&isMetadata != 0 && !slices.Contains(trees, of):
			trees = append(trees, of)
		}
	}
	return trees, data
}

// A profile says how chunks are spread over devices; 0 is single.
type profile uint64

// most is how much can be stored in chunks of a profile, in bytes, if so many are free on each device. See btrfs_raid_array in
// fs/btrfs/volumes.c.
func (p profile) most(free []int64) int64 {
	free = slices.Clone(free)
	slices.Sort(free)
	slices.Reverse(free)
	switch {
	case p&isRaid1C4 != 0:
		return onEachOf(free, 4)
	case p&isRaid1C3 != 0:
		return onEachOf(free, 3)
	case p&isRaid1 != 0:
		return onEachOf(free, 2)
	case p&isRaid10 != 0:
		return striped(free, 4, 2, 0) / 2
	case p&isRaid6 != 0:
		return striped(free, 3, 1, 2)
	case p&isRaid5 != 0:
		return striped(free, 2, 1, 1)
	case p&isRaid0 != 0:
		return striped(free, 2, 1, 0)
	}
	var sum int64
	for _, bytes := range free {
		sum += bytes
	}
	if p&isDup != 0 {
		return sum / 2
	}
	return sum
}

// mirrored reports whether a byte that one device has less is no more than one less in chunks of the profile.
func (p profile) mirrored() bool { return p&(isRaid10|isRaid6|isRaid5|isRaid0) == 0 }

// loss is how many bytes of the devices one takes in chunks of the profile, as statfs(2) counts it, at most.
func (p profile) loss() int64 {
	switch {
	case p&isRaid6 != 0:
		return 3
	case p&isRaid5 != 0:
		return 2
	}
	return chunks{Flags: uint64(p)}.copies()
}

// onEachOf is how much there is room for, so many times on as many devices. They are in order, the largest first.
func onEachOf(free []int64, copies int) int64 {
	if len(free) < copies {
		return 0
	}
	var rest int64
	for _, bytes := range free {
		rest += bytes
	}
	most := rest / int64(copies)
	for i := 1; i < copies; i++ { // the largest devices have a copy of all
		rest -= free[i-1]
		most = min(most, rest/int64(copies-i))
	}
	return most
}

// striped is how much there is room for in stripes over as many devices as have any, a multiple of step, and no fewer than least. The
// kernel may find more, since it takes the devices in turn.
func striped(free []int64, least, step, parity int) (sum int64) {
	for {
		slices.Sort(free)
		slices.Reverse(free)
		wide := len(free)
		if none := slices.Index(free, 0); none >= 0 {
			wide = none
		}
		if wide -= wide % step; wide < least {
			return sum
		}
		stripe := free[wide-1]
		for i := range wide {
			free[i] -= stripe
		}
		sum += stripe * int64(wide-parity)
	}
}

// device is struct btrfs_ioctl_dev_info_args of linux/btrfs.h.
type device struct {
	ID          uint64
	_           [16]byte
	Used, Total uint64
	_           [3032]byte
	Path        [1024]byte
}

// free is what chunks can take of the device beside so many bytes. It has none in the first MiB, and none if it is missing.
func (d *device) free(used uint64) int64 {
	const first = 1 << 20
	if d.Path[0] == 0 {
		return 0
	}
	return max(0, int64(d.Total)-int64(used)-first)
}

// devicesOf are those of the filesystem of d.
func devicesOf(d *dir.Dir) (all []device, err error) {
	var fs ioctl.Filesystem
	if err := ioctl.Do(d, ioctl.GetFilesystem, &fs); err != nil {
		return nil, fmt.Errorf("ask for the devices of %s: %w", d, err)
	}
	for id := uint64(1); id <= fs.MaxID && uint64(len(all)) < fs.Devices; id++ {
		found := device{ID: id}
		err := ioctl.Do(d, getDevice, &found)
		if errors.Is(err, unix.ENODEV) { // it was removed
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("ask for device %d of %s: %w", id, d, err)
		}
		all = append(all, found)
	}
	return all, nil
}

const getDevice = ioctl.Read | ioctl.Write | unsafe.Sizeof(device{})<<ioctl.Size | ioctl.Btrfs | 30 // BTRFS_IOC_DEV_INFO

var _ [4096]byte = [unsafe.Sizeof(device{})]byte{} // another size would not compile
