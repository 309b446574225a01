package mounter_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mounts"
	"kubevirt.io/hostpath-provisioner/pkg/mounter"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// record is the file in which a mounter has what it has mounted.
func record(m *mounter.Mounter) string {
	return filepath.Join(filepath.Dir(m.Target), ".pool-mounter.mounted")
}

// mountByHand is what an administrator does. It is gone when the test ends.
func mountByHand(t *testing.T, at string) {
	t.Helper()
	must.Succeed(t, unix.Mount("by-hand", at, "tmpfs", 0, "size=1m"))
	must.Succeed(t, os.WriteFile(filepath.Join(at, "by-hand"), nil, 0o600))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(at, 0)) })
}

func hasMountByHand(t *testing.T, at string) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(at, "by-hand")); err != nil {
		t.Errorf("the administrator's mount is gone: %v", err)
	}
}

// What an administrator has mounted at the path of a pool stays, whether the pool was mounted there before or never was.
func TestUnmountKeepsMountOfAdministrator(t *testing.T) {
	for name, before := range map[string]func(t *testing.T, m *mounter.Mounter){
		"in the place of the pool": func(t *testing.T, m *mounter.Mounter) {
			must.Succeed(t, m.Mount(t.Context()))
			must.Succeed(t, unix.Unmount(m.Target, 0))
			m.Claim = nil
		},
		"and the pool never was there": func(*testing.T, *mounter.Mounter) {},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := newMounter(t)
			before(t, m)
			mountByHand(t, m.Target)
			must.Succeed(t, m.Unmount(t.Context()))
			hasMountByHand(t, m.Target)
		})
	}
}

// Before the mounter ends it is looked whether volumes of the pool are published, mounted as it is, or unmounted by an administrator. What an
// administrator has mounted in its place does not count.
func TestLook(t *testing.T) {
	m, volume := poolOn(t, "tmpfs")
	must.Succeed(t, m.Look(t.Context()))
	published := unmountPublished(t, m, volume)
	must.ErrorIs(t, m.Look(t.Context()), mounter.ErrInUse)
	must.Succeed(t, m.Mount(t.Context()))
	claim := m.Claim
	m.Claim = nil
	must.ErrorIs(t, m.Look(t.Context()), mounter.ErrInUse)
	must.Succeed(t, unix.Unmount(published, 0), m.Look(t.Context()))
	m.Claim = claim
	must.Succeed(t, m.Check(), unix.Unmount(m.Target, 0))
	mountByHand(t, m.Target)
	must.Succeed(t, m.Look(t.Context()))
}

// The mounter does not end under users that something else mounted hides, nor where Unmount would refuse that, and not where only the claim, which
// Look does not have, shows that it is the pool.
func TestLookUnderMountOfAdministrator(t *testing.T) {
	for name, tt := range map[string]struct {
		hide   func(t *testing.T, m *mounter.Mounter)
		unused error
	}{
		"over the pool":          {func(t *testing.T, m *mounter.Mounter) { mountByHand(t, m.Target) }, mounter.ErrOccupied},
		"over the one above":     {func(t *testing.T, m *mounter.Mounter) { mountByHand(t, filepath.Dir(m.Target)) }, mounter.ErrOccupied},
		"of an upstream mounter": {func(t *testing.T, m *mounter.Mounter) { must.Succeed(t, os.Remove(record(m))) }, nil},
		"over that of an upstream mounter": {func(t *testing.T, m *mounter.Mounter) {
			must.Succeed(t, os.Remove(record(m)))
			mountByHand(t, m.Target)
		}, nil},
		"with the record of an earlier boot": {func(t *testing.T, m *mounter.Mounter) {
			must.Succeed(t, os.WriteFile(record(m), []byte(`{"boot":"another"}`), 0o600))
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := newMounter(t)
			must.Succeed(t, m.Mount(t.Context()))
			t.Cleanup(func() { must.Succeed(t, unix.Unmount(m.Target, 0)) })
			volume, published := filepath.Join(m.Target, "pvc-1"), t.TempDir()
			must.Succeed(t, os.Mkdir(volume, 0o755), unix.Mount(volume, published, "", unix.MS_BIND, ""))
			t.Cleanup(func() { _ = unix.Unmount(published, 0) }) // it is not mounted any more unless the test failed
			m.Claim = nil
			tt.hide(t, m)
			must.ErrorIs(t, m.Look(t.Context()), mounter.ErrInUse)
			must.Succeed(t, unix.Unmount(published, 0))
			if err := m.Look(t.Context()); !errors.Is(err, tt.unused) {
				t.Errorf("without users it says %v, want %v", err, tt.unused)
			}
		})
	}
}

// A pool that something is mounted over is not unmounted, and neither is that.
func TestUnmountUnderMountOfAdministrator(t *testing.T) {
	m, _ := newMounter(t)
	must.Succeed(t, m.Mount(t.Context()))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(m.Target, 0)) })
	mountByHand(t, m.Target)
	m.Claim = nil
	must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrOccupied)
	hasMountByHand(t, m.Target)
}

// Also over the directory of the pool, from where it cannot be reached. It may have writes in memory, and its claim is detached next.
func TestUnmountUnderMountOverTheDirectoryOfThePool(t *testing.T) {
	m, _ := newMounter(t)
	must.Succeed(t, m.Mount(t.Context()))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(m.Target, 0)) })
	above := filepath.Dir(m.Target)
	mountByHand(t, above)
	must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrOccupied)
	hasMountByHand(t, above)
}

// unmountPublished publishes a volume of a pool and unmounts the pool, as an administrator may.
func unmountPublished(t *testing.T, m *mounter.Mounter, volume string) (published string) {
	t.Helper()
	published = t.TempDir()
	must.Succeed(t, unix.Mount(volume, published, "", unix.MS_BIND, ""), unix.Unmount(m.Target, 0))
	t.Cleanup(func() { _ = unix.Unmount(published, 0) }) // it is not mounted any more unless the test failed
	return published
}

// An administrator has unmounted the pool, and perhaps mounted something else in its place, and its volumes are still mounted elsewhere: the claim is
// in use as before. What says so is the record alone, whatever the filesystem, or the claim alone.
func TestUsersOfPoolThatIsGone(t *testing.T) {
	for _, kind := range []string{"tmpfs", "ext4", "xfs", "btrfs"} {
		for name, replace := range map[string]func(t *testing.T, at string){"unmounted": func(*testing.T, string) {}, "replaced": mountByHand} {
			t.Run(name+" "+kind, func(t *testing.T) {
				m, volume := poolOn(t, kind)
				published := unmountPublished(t, m, volume)
				replace(t, m.Target)
				recorded := *m
				recorded.Claim = nil
				must.ErrorIs(t, recorded.Look(t.Context()), mounter.ErrInUse)
				must.ErrorIs(t, recorded.Unmount(t.Context()), mounter.ErrInUse)
				must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrInUse)
				must.Succeed(t, os.Remove(record(m)))
				must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrInUse)
				must.Succeed(t, unix.Unmount(published, 0), m.Unmount(t.Context()))
			})
		}
	}
}

// spoiled are the records that say less than they could: none, as of the upstream mounter, one of an earlier boot, and one of a mounter that was killed
// before the pool was in the mount table.
var spoiled = map[string]func(t *testing.T, file string){
	"none": func(t *testing.T, file string) { must.Succeed(t, os.Remove(file)) },
	"of an earlier boot": func(t *testing.T, file string) {
		must.Succeed(t, os.WriteFile(file, []byte(`{"boot":"another"}`), 0o600))
	},
	"of a mounter that was killed": func(t *testing.T, file string) {
		content, err := os.ReadFile(file)
		begin, _, found := strings.Cut(string(content), `,"device":`)
		if must.Succeed(t, err, os.WriteFile(file, []byte(begin+"}"), 0o600)); !found {
			t.Fatalf("the record is %s", content)
		}
	},
}

// The pool that something is mounted over may be below it, and its claim must not be detached.
func TestUnmountUnderMountOfAdministratorWithoutRecord(t *testing.T) {
	for name, spoil := range spoiled {
		t.Run(name, func(t *testing.T) {
			m, _ := newMounter(t)
			must.Succeed(t, m.Mount(t.Context()))
			t.Cleanup(func() { must.Succeed(t, unix.Unmount(m.Target, 0)) })
			spoil(t, record(m))
			without := *m
			without.Claim = nil
			mountByHand(t, m.Target)
			must.ErrorIs(t, m.Unmount(t.Context()), mounter.ErrOccupied)
			must.ErrorIs(t, without.Unmount(t.Context()), mounter.ErrOccupied)
			hasMountByHand(t, m.Target)
		})
	}
}

// Whatever the record says, and whatever is mounted where, the claim does not go while a volume is published.
func TestClaimStaysWithPublishedVolumes(t *testing.T) {
	for said, spoil := range spoiled {
		for pool, unmounted := range map[string]bool{"mounted": false, "unmounted": true} {
			for over, hide := range map[string]func(t *testing.T, m *mounter.Mounter){
				"nothing":             func(*testing.T, *mounter.Mounter) {},
				"a mount on the pool": func(t *testing.T, m *mounter.Mounter) { mountByHand(t, m.Target) },
				"a mount above":       func(t *testing.T, m *mounter.Mounter) { mountByHand(t, filepath.Dir(m.Target)) },
			} {
				t.Run(fmt.Sprintf("record %s, pool %s, over it %s", said, pool, over), func(t *testing.T) {
					m, volume := poolOn(t, "tmpfs")
					published := t.TempDir()
					must.Succeed(t, unix.Mount(volume, published, "", unix.MS_BIND, ""))
					t.Cleanup(func() { must.Succeed(t, unix.Unmount(published, 0)) })
					spoil(t, record(m))
					if unmounted {
						must.Succeed(t, unix.Unmount(m.Target, 0))
					} else {
						t.Cleanup(func() { must.Succeed(t, unix.Unmount(m.Target, 0)) })
					}
					hide(t, m)
					if err := m.Unmount(t.Context()); !errors.Is(err, mounter.ErrInUse) && !errors.Is(err, mounter.ErrOccupied) {
						t.Errorf("unmount: %v", err)
					}
				})
			}
		}
	}
}

// The record of an earlier boot does not say whose it is that is mounted at the pool's path in this one.
func TestUnmountWithRecordOfEarlierBoot(t *testing.T) {
	m, _ := newMounter(t)
	must.Succeed(t, m.Mount(t.Context()), os.WriteFile(record(m), []byte(`{"boot":"another"}`), 0o600))
	without := *m
	without.Claim = nil
	must.ErrorIs(t, without.Unmount(t.Context()), mounter.ErrOccupied)
	must.Succeed(t, m.Check(), m.Unmount(t.Context()))
	must.ErrorIs(t, m.Check(), mounter.ErrNotMounted)
}

// A mount that no record tells of, as of the upstream mounter, is unmounted if it is one of the claim. Without the claim it is
// not known whose it is.
func TestUnmountWithoutRecord(t *testing.T) {
	m, claim := newMounter(t)
	must.Succeed(t, unix.Mount(claim, m.Target, "", unix.MS_BIND, ""))
	without := *m
	without.Claim = nil
	must.ErrorIs(t, without.Unmount(t.Context()), mounter.ErrOccupied)
	must.Succeed(t, m.Check())
	must.Succeed(t, m.Unmount(t.Context()))
	must.ErrorIs(t, m.Check(), mounter.ErrNotMounted)
}

// A mounter takes over what it finds of its claim, and then what it recorded is enough.
func TestUnmountOfMountThatWasTakenOver(t *testing.T) {
	m, claim := newMounter(t)
	must.Succeed(t, unix.Mount(claim, m.Target, "", unix.MS_BIND, ""))
	must.Succeed(t, m.Mount(t.Context()))
	claimed := m.Claim
	m.Claim = nil
	must.Succeed(t, m.Unmount(t.Context()))
	m.Claim = claimed
	must.ErrorIs(t, m.Check(), mounter.ErrNotMounted)
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(m.Target), ".pool-mounter.mounted*")); err != nil || len(left) > 0 {
		t.Errorf("left over are %v, %v", left, err)
	}
}

// A container that has the root directory of the host may have a copy of the pool's mount, in a namespace of its own: the filesystem outlives the
// unmount, and the disk is detached. What pods wrote is on it by then.
func TestUnmountLeavesNothingInMemory(t *testing.T) {
	m, _ := newMounter(t)
	volume := testenv.LoopFS(t, "ext4", 16*mib)
	table, err := mountinfo.Own()
	must.Succeed(t, err)
	at := slices.IndexFunc(table, func(m *mountinfo.Mount) bool { return m.Mountpoint == volume })
	m.Claim = mounter.Volume{Path: volume}
	must.Succeed(t, m.Mount(t.Context()))
	written := []byte(rand.Text() + rand.Text())
	must.Succeed(t, os.WriteFile(filepath.Join(m.Target, "data"), written, 0o600))
	must.Succeed(t, m.Unmount(t.Context()))
	disk, err := os.ReadFile(table[at].Source)
	if must.Succeed(t, err); !bytes.Contains(disk, written) {
		t.Errorf("what was written is not on %s", table[at].Source)
	}
}

// The disk of a claim that only one pod may have is detached between two mounters, or between a mounter and the clean-up of its pool, while it
// is mounted. What pods wrote before is on it by then.
func TestWritesAreOnTheDiskWhenAMounterEnds(t *testing.T) {
	testenv.NeedRoot(t)
	m, _ := newMounter(t)
	claim := testenv.LoopFS(t, "xfs", 300*mib)
	keeps, ended := make(chan struct{}), make(chan error)
	log := funcr.New(func(_, said string) {
		if strings.Contains(said, "Keeping the pool mounted") {
			close(keeps)
		}
	}, funcr.Options{})
	m.Claim, m.Interval, m.Log = mounter.Volume{Path: claim}, time.Minute, log
	ctx, end := context.WithCancel(t.Context())
	go func() { ended <- m.Run(ctx) }()
	<-keeps
	must.Succeed(t, os.WriteFile(filepath.Join(m.Target, "written"), []byte("before"), 0o600))
	end()
	must.Succeed(t, <-ended)

	table, err := mounts.ReadTable()
	must.Succeed(t, err)
	i := slices.IndexFunc(table, func(m *mountinfo.Mount) bool { return m.Mountpoint == claim })
	disk, err := os.Open(table[i].Source) // a loop device goes when it is not used
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, disk.Close()) })
	testenv.ShutDown(t, claim)
	must.Succeed(t, unix.Unmount(m.Target, 0), unix.Unmount(claim, 0))
	must.Succeed(t, unix.Mount(disk.Name(), claim, "xfs", 0, ""))
	if has, err := os.ReadFile(filepath.Join(claim, "written")); err != nil || string(has) != "before" {
		t.Errorf("the disk has %q, %v", has, err)
	}
}
