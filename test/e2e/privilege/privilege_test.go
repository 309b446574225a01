// Package privilege tests that the driver needs what docs/security.md says, and no
// more. The real program runs in a container that is made of the mounts of deploy/csi,
// with only those capabilities and devices, and does all that it is for. Then one of
// them after the other is taken away, and something has to fail. In the guest of
// test/cmd/kernel the same is done with quotas of XFS and ext4, and with SELinux.
package privilege

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv(writerVariable) != "" {
		os.Exit(writeTooMuch())
	}
	if encoded := os.Getenv(containerVariable); encoded != "" {
		fmt.Fprintln(os.Stderr, "start the driver in a container:", become(encoded))
		os.Exit(1)
	}
	testenv.Main(m)
}

// program is the driver, built once. The directory goes with this process.
var program = sync.OnceValues(func() (string, error) {
	return drivertest.StaticBinary(context.Background(), os.TempDir())
})

// A place is what a pool is on.
type place struct {
	name     string
	mount    func(t *testing.T) string
	enforced bool // the kernel enforces sizes
	asks     step // that needs to ask for quotas first, and CAP_SYS_ADMIN for that
	selinux  bool
	// without names what nothing on it needs.
	without map[string]bool
}

// places are those that this kernel has.
func places() []place {
	if !testenv.Guest() {
		noSELinux := map[string]bool{"mounts below sys-fs": true}
		return []place{
			{name: "tmpfs", mount: func(t *testing.T) string { return testenv.Tmpfs(t, 256*mib) }, without: noSELinux},
			{name: "btrfs", mount: func(t *testing.T) string { return testenv.CountingBtrfs(t, 1<<30) }, enforced: true, asks: serve, without: noSELinux},
		}
	}
	disk := testenv.GuestDisk
	return []place{
		{name: "xfs", mount: disk("HOSTPATH_KERNEL_XFS"), enforced: true, asks: create, selinux: true},
		{name: "ext4", mount: disk("HOSTPATH_KERNEL_EXT4"), enforced: true, asks: create, selinux: true},
	}
}

// A lack is what a container does not have of what is written down.
type lack struct {
	name string
	// takeAway changes a container that has all.
	takeAway func(c *container)
	// capability is the one that is taken away, 0 for none.
	capability privilege.Capability
	// fails is the step at which a work then fails, "" for none.
	fails func(p place, w work) string
}

// lacks are all that can be taken away, and nothing as the first. Without the other
// mounts no driver starts: there is no socket, no pool, no directory of devices.
func lacks() []lack {
	all := []lack{{
		name:     "nothing",
		takeAway: func(*container) {},
		fails:    func(place, work) string { return "" },
	}}
	for _, c := range slices.Concat(privilege.Needed, privilege.ForErasing) {
		all = append(all, withoutCapability(c))
	}
	all = append(all, lack{
		name:     "mounts below sys-fs",
		takeAway: func(c *container) { c.mount("sys-fs").Alone = true },
		fails: func(_ place, w work) string {
			if w.labels {
				return "check the label"
			}
			return ""
		},
	})
	if testenv.Guest() {
		return all // the others are the same on all filesystems
	}
	return append(all, lack{
		name:     "the host's /dev", // as under the upstream operator, where it is a tmpfs of the container
		takeAway: func(c *container) { c.mount("dev").Host = "/dev/shm" },
		fails:    ofDevices(create),
	}, lack{
		name:     "/dev/loop-control",
		takeAway: func(c *container) { c.Devices = slices.DeleteFunc(c.Devices, is(loopControl)) },
		fails:    ofDevices(create),
	}, lack{
		name:     "/dev/loop*",
		takeAway: func(c *container) { c.Devices = slices.DeleteFunc(c.Devices, is(loopDevices)) },
		fails:    ofDevices(publish),
	}, lack{
		name:     "propagation of kubelet-devices",
		takeAway: func(c *container) { c.mount("kubelet-devices").Propagation = none },
		fails:    ofDevices(see),
	}, lack{
		name:     "propagation of kubelet-pods",
		takeAway: func(c *container) { c.mount("kubelet-pods").Propagation = none },
		fails: func(_ place, w work) string {
			if w.published && !w.block {
				return see.name
			}
			return ""
		},
	})
}

// ofDevices says that block volumes fail at a step, and others not.
func ofDevices(s step) func(place, work) string {
	return func(_ place, w work) string {
		if w.block {
			return s.name
		}
		return ""
	}
}

func withoutCapability(c privilege.Capability) lack {
	return lack{
		name:       c.String(),
		capability: c,
		takeAway:   func(in *container) { in.Capabilities = slices.DeleteFunc(in.Capabilities, is(c)) },
		fails: func(p place, w work) string {
			if asks := p.asks; c == privilege.SysAdmin && slices.ContainsFunc(w.steps, func(s step) bool { return s.name == asks.name }) {
				return asks.name
			}
			return w.without[c]
		},
	}
}

func is[T comparable](unwanted T) func(T) bool {
	return func(v T) bool { return v == unwanted }
}

func TestRequiredPrivileges(t *testing.T) {
	testenv.NeedRoot(t)
	driver := must.Value(program())(t)
	for _, p := range places() {
		t.Run(p.name, func(t *testing.T) {
			mounted := p.mount(t)
			for _, l := range lacks() {
				t.Run("without "+l.name, func(t *testing.T) { run(t, driver, p, mounted, l) })
			}
		})
	}
}

// run does all works in one container, and expects of each what the lack says.
func run(t *testing.T, driver string, p place, mounted string, l lack) {
	h := newHost(t, driver, p, mounted, l)
	if c := l.capability; slices.Contains(privilege.Needed, c) && !h.log("Missing capabilities", c.String()) {
		t.Errorf("the driver does not report that %s is missing", c)
	}
	noticed := l.name == "nothing"
	for _, w := range works {
		if w.only != nil && !w.only(p) {
			continue
		}
		failed, err := h.do(w)
		want := l.fails(p, w)
		if failed != want {
			t.Errorf("%s fails at %q (%v), want %q", w.name, failed, err, want)
		}
		noticed = noticed || want != ""
		if want != "" {
			t.Logf("%s fails at %q: %v", w.name, failed, err)
		}
		if failed == see.name {
			h.Must(h.unpublish(w.volume()))
		}
	}
	if !noticed && !p.without[l.name] {
		t.Errorf("nothing on %s needs it", p.name)
	}
}

// The modes that docs/security.md names, whatever the umask.
func TestFileModes(t *testing.T) {
	testenv.NeedRoot(t)
	driver := must.Value(program())(t)
	defer syscall.Umask(syscall.Umask(0))
	pool := testenv.Tmpfs(t, 64*mib)
	d := drivertest.Start(t, drivertest.Config{Binary: driver, Pools: []drivertest.PoolConfig{{Name: "local", Path: pool}}})
	for _, v := range []drivertest.Volume{{ID: "directory", Bytes: mib}, {ID: "device", Bytes: mib, Block: true}} {
		d.Must(must.Err(d.Create(t.Context(), v)))
	}
	own := filepath.Join(pool, ".hostpath-provisioner")
	d.Must(filepath.WalkDir(pool, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		want := os.FileMode(0o600)
		switch {
		case path == pool:
			want = os.ModeDir | 0o750
		case path == filepath.Join(pool, "directory"):
			want = os.ModeDir | 0o777
		case entry.IsDir():
			want = os.ModeDir | 0o700
		}
		info, err := entry.Info()
		if err == nil && info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), want)
		}
		return err
	}))
	for _, path := range []string{own + "/volumes/directory.json", own + "/format", pool + "/device/disk.img"} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}
