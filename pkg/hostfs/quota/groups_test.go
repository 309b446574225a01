package quota_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// makeSubvolumeIn makes a subvolume that is in these groups, and in no others (BTRFS_SUBVOL_QGROUP_INHERIT). A user who can write to a
// directory needs no privilege for that.
func makeSubvolumeIn(t *testing.T, in, name string, groups ...quota.ID) string {
	t.Helper()
	return subvolumeOf(t, in, name, 1<<2, groups...)
}

// makeSubvolume makes a subvolume as most users do, who choose no groups.
func makeSubvolume(t *testing.T, in, name string) {
	t.Helper()
	subvolumeOf(t, in, name, 0)
}

func subvolumeOf(t *testing.T, in, name string, flags uint64, groups ...quota.ID) string {
	t.Helper()
	inherit := struct {
		_      uint64 // struct btrfs_qgroup_inherit of linux/btrfs.h
		Count  uint64
		_      [7]uint64
		Groups [2]quota.ID
	}{Count: uint64(len(groups))}
	copy(inherit.Groups[:], groups)
	args := struct {
		_, _, Flags uint64 // struct btrfs_ioctl_vol_args_v2
		Size        uint64
		Inherit     unsafe.Pointer
		_           [2]uint64
		Name        [4040]byte
	}{Flags: flags, Size: uint64(9+len(groups)) * 8, Inherit: unsafe.Pointer(&inherit)}
	copy(args.Name[:], name)
	quota.Ioctl(t, open(t, in), 1<<30|4096<<16|0x94<<8|24, &args) // BTRFS_IOC_SUBVOL_CREATE_V2
	return filepath.Join(in, name)
}

// simple is a btrfs with simple quotas.
func simple(t *testing.T) (*dir.Dir, quota.Facility) {
	t.Helper()
	testenv.NeedRoot(t)
	if testenv.Guest() {
		t.Skip("the guest is there for XFS and ext4: its kernel is Debian's, which has no simple quotas; the host has")
	}
	root := open(t, testenv.SimpleBtrfs(t, 512<<20))
	return root, must.Value(quota.Detect(root))(t)
}

// A user of a volume chooses the groups of a subvolume that is made in it: none, so that no limit counts it, or that of another volume,
// which then could not write what it was promised. Setting the limit again takes such subvolumes into it.
func TestSubvolumeInGroupsOfItsUser(t *testing.T) {
	testenv.NeedPrograms(t, "btrfs")
	root, facility := simple(t)
	limited := func(name string) (*dir.Dir, quota.ID) {
		d, err := facility.Make(root, name)
		must.Succeed(t, err)
		t.Cleanup(func() { must.Succeed(t, d.Close()) })
		must.Succeed(t, facility.Limit(d, 0, quota.Limit{Bytes: 16 << 20}))
		id, err := facility.IDOf(d)
		must.Succeed(t, err)
		return d, 1<<48 | 0x4850<<32 | id
	}
	content := make([]byte, 12<<20)
	other, groupOfOther := limited("other")
	for name, nestedIn := range map[string]func(volume string, own quota.ID) string{
		"in none": func(volume string, _ quota.ID) string { return makeSubvolumeIn(t, volume, "nested") },
		"in none, below one that is": func(volume string, own quota.ID) string {
			return makeSubvolumeIn(t, makeSubvolumeIn(t, volume, strings.Repeat("n", 200), own), "nested")
		},
		"in that of another": func(volume string, _ quota.ID) string { return makeSubvolumeIn(t, volume, "nested", groupOfOther) },
		"in its own and in another's": func(volume string, own quota.ID) string {
			return makeSubvolumeIn(t, volume, "nested", own, groupOfOther)
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, own := limited(strings.ReplaceAll(name, " ", "-"))
			nested := nestedIn(d.String(), own)
			must.Succeed(t, os.WriteFile(nested+"/file", content, 0o600), unix.Syncfs(root.Fd()))
			wantOutside(t, facility, d, 1)
			must.Succeed(t, facility.Limit(d, 0, quota.Limit{Bytes: 16 << 20}))
			wantOutside(t, facility, d, 0)
			if usage, err := facility.Usage(d, 0); err != nil || usage.Bytes < 12<<20 {
				t.Errorf("the volume has %+v, %v; want what is in the subvolume, 12 MiB", usage, err)
			}
			if usage, err := facility.Usage(other, 0); err != nil || usage.Bytes >= 1<<20 {
				t.Errorf("another volume has %+v, %v; it is empty", usage, err)
			}
		})
	}
}

// A volume is in no group of the subvolume that it is made in, as with ordinary quotas: the limit of such a group would be below what the
// volume was promised. What its user makes in it is in its group.
func TestVolumeIsInNoGroupOfItsPool(t *testing.T) {
	testenv.NeedPrograms(t, "btrfs")
	root, facility := simple(t)
	pool, err := facility.Make(root, "pool")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, pool.Close()) }()
	id, err := facility.IDOf(pool)
	must.Succeed(t, err)
	for _, arguments := range [][]string{{"create", "1/100"}, {"limit", "4M", "1/100"}, {"assign", "--no-rescan", fmt.Sprint("0/", id), "1/100"}} {
		if out, err := exec.Command("btrfs", slices.Concat([]string{"qgroup"}, arguments, []string{root.String()})...).CombinedOutput(); err != nil {
			t.Fatalf("btrfs qgroup %v: %v\n%s", arguments, err, out)
		}
	}
	volume, err := facility.Make(pool, "volume")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, volume.Close()) }()
	must.Succeed(t, facility.Limit(volume, 0, quota.Limit{Bytes: 16 << 20}))
	must.Succeed(t, os.WriteFile(volume.String()+"/file", make([]byte, 8<<20), 0o600), unix.Syncfs(root.Fd()))
	makeSubvolume(t, volume.String(), "nested")
	wantOutside(t, facility, volume, 0)
}

// Of very many subvolumes not all are asked for their groups.
func TestVeryManySubvolumesAreOutside(t *testing.T) {
	root, facility := simple(t)
	d, err := facility.Make(root, "volume")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	must.Succeed(t, facility.Limit(d, 0, quota.Limit{Bytes: 64 << 20}))
	for n := range 255 {
		makeSubvolume(t, d.String(), fmt.Sprint(n))
	}
	wantOutside(t, facility, d, 0)
	makeSubvolumeIn(t, d.String(), "last")
	wantOutside(t, facility, d, 1)
}

// A group counts what its users put into it. What does not lie in the volume is known, and the next limit takes it out, also if it has no name
// any more; what lies in the volume stays.
func TestLimitTakesOutWhatLiesElsewhere(t *testing.T) {
	testenv.NeedPrograms(t, "btrfs", "cp")
	root, facility := simple(t)
	content := make([]byte, 4<<20)
	made := make(map[string]*dir.Dir)
	groups := make(map[string]quota.ID)
	for _, name := range []string{"one", "other"} {
		made[name] = must.Value(facility.Make(root, name))(t)
		t.Cleanup(func() { must.Succeed(t, made[name].Close()) })
		must.Succeed(t, facility.Limit(made[name], 0, quota.Limit{Bytes: 64 << 20}))
		groups[name] = 1<<48 | 0x4850<<32 | must.Value(facility.IDOf(made[name]))(t)
	}
	wantUsage := func(when string, bytes, intruded int64) {
		t.Helper()
		must.Succeed(t, unix.Syncfs(root.Fd()))
		got := must.Value(facility.Usage(made["one"], 0))(t)
		if off := got.Bytes - bytes<<20; off < 0 || off > 1<<20 {
			t.Errorf("%s %d bytes are counted, want %d MiB", when, got.Bytes, bytes)
		}
		if off := got.Intruded - intruded<<20; off < 0 || off > 1<<20 || intruded == 0 && off != 0 {
			t.Errorf("%s %d of them are of others, want %d MiB", when, got.Intruded, intruded)
		}
	}
	below := makeSubvolumeIn(t, makeSubvolumeIn(t, made["one"].String(), "nested", groups["one"]), "below", groups["one"])
	must.Succeed(t, os.WriteFile(below+"/file", content, 0o600))
	wantUsage("with its own subvolume", 4, 0)
	for _, name := range []string{"stays", "goes"} {
		nested := makeSubvolumeIn(t, made["other"].String(), name, groups["one"])
		must.Succeed(t, os.WriteFile(nested+"/file", content, 0o600))
	}
	for _, args := range [][]string{
		{"cp", "--reflink=always", made["other"].String() + "/goes/file", made["other"].String() + "/file"},
		{"btrfs", "subvolume", "delete", made["other"].String() + "/goes"},
		{"btrfs", "subvolume", "sync", root.String()},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	wantUsage("with two of another", 12, 8)
	must.Succeed(t, facility.Limit(made["one"], 0, quota.Limit{Bytes: 64 << 20}))
	wantUsage("after the limit was set again", 4, 0)
}
