package quota_test

import (
	"context"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota/quotatest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestFakeKeepsTheContract(t *testing.T) {
	for _, kind := range []quota.Kind{quota.XFS, quota.Ext4, quota.Btrfs} {
		t.Run(string(kind), func(t *testing.T) {
			quotatest.Contract(t, func(t *testing.T) quotatest.Subject {
				fake := &quotatest.Fake{As: kind}
				return quotatest.Subject{
					Facility: fake,
					Root:     open(t, t.TempDir()),
					Create:   func(d *dir.Dir, _ string) (quotatest.File, error) { return fake.Create(d) },
					Removed:  fake.Removed,
					Settle:   func(*testing.T) {},
				}
			})
		})
	}
}

func TestKernelKeepsTheContract(t *testing.T) {
	testenv.NeedRoot(t)
	for _, fs := range filesystems() {
		t.Run(fs.name, func(t *testing.T) {
			mounted := fs.mount(t)
			quotatest.Contract(t, func(t *testing.T) quotatest.Subject { return fs.subject(t, mounted) })
		})
	}
}

// A filesystem is one that can limit directories.
type filesystem struct {
	name     string
	mount    func(t testing.TB) string
	byDevice bool // with quotactl(2), as on old kernels
}

// filesystems are those that this kernel has: btrfs everywhere, and where the machine
// of `make test-kernel` says that they are mounted, XFS and ext4 with project quota.
func filesystems() []filesystem {
	all := []filesystem{{name: "btrfs", mount: func(t testing.TB) string { return btrfs(t, enable) }}}
	if _, err := os.Stat("/sys/fs/btrfs/features/simple_quota"); err == nil {
		all = append(all, filesystem{name: "btrfs with simple quotas", mount: func(t testing.TB) string { return btrfs(t, enableSimple) }})
	}
	for kind, path := range mountedByTheMachine() {
		mounted := func(testing.TB) string { return path }
		all = append(all, filesystem{name: kind, mount: mounted},
			filesystem{name: kind + " by device", mount: mounted, byDevice: true})
	}
	return all
}

// mountedByTheMachine are mount points of XFS and ext4 with project quota.
func mountedByTheMachine() map[string]string {
	mounted := make(map[string]string)
	for kind, variable := range map[string]string{"xfs": "HOSTPATH_KERNEL_XFS", "ext4": "HOSTPATH_KERNEL_EXT4"} {
		if path := os.Getenv(variable); path != "" {
			mounted[kind] = path
		}
	}
	return mounted
}

// subject is the facility on a new directory below a mount point.
func (fs filesystem) subject(t testing.TB, mounted string) quotatest.Subject {
	t.Helper()
	path := filepath.Join(mounted, rand.Text())
	must(t, os.Mkdir(path, 0o755))
	t.Cleanup(func() { must(t, os.RemoveAll(path)) })
	root := open(t, path)
	facility, err := quota.Detect(root)
	must(t, err)
	if fs.byDevice {
		facility = quota.ByDevice(facility)
	}
	return quotatest.Subject{
		Facility: facility,
		Root:     root,
		Create:   create,
		Settle:   func(t *testing.T) { must(t, unix.Syncfs(root.Fd())) },
	}
}

// A file is written without CAP_SYS_RESOURCE, which knows no limits on ext4.
type file struct {
	*os.File
	in   *dir.Dir
	name string
}

func create(d *dir.Dir, name string) (_ quotatest.File, err error) {
	f := file{in: d, name: name}
	err = unprivileged(func() (err error) {
		f.File, err = os.OpenFile(filepath.Join(d.HandlePath(), name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (f file) Write(bytes int64) (written int64, err error) {
	err = unprivileged(func() error {
		n, err := f.File.Write(make([]byte, bytes))
		written = int64(n)
		return err
	})
	return written, err
}

func (f file) Close() error { return errors.Join(f.Sync(), f.File.Close()) }

func (f file) Remove() error { return f.in.Remove(f.name) }

// unprivileged runs f on a thread that gave up CAP_SYS_RESOURCE.
func unprivileged(f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := dropResource(); err != nil {
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

func dropResource() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return err
	}
	sets[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	return unix.Capset(&header, &sets[0])
}

// Commands of BTRFS_IOC_QUOTA_CTL (linux/btrfs.h; the second is of Linux 6.7).
const (
	enable       = 1
	enableSimple = 4
)

func btrfs(t testing.TB, command uint64) string {
	t.Helper()
	// The kernel clears subvolumes away when it commits.
	path := testenv.LoopFS(t, "btrfs", 256<<20, "commit=1")
	enableQuotas(t, open(t, path), command)
	return path
}

func enableQuotas(t testing.TB, d *dir.Dir, command uint64) {
	t.Helper()
	args := [2]uint64{command}
	quota.Ioctl(t, d, 3<<30|16<<16|0x94<<8|40, &args) // BTRFS_IOC_QUOTA_CTL
	if command == enable {
		quota.Ioctl[int](t, d, 0x94<<8|46, nil) // BTRFS_IOC_QUOTA_RESCAN_WAIT
	}
}

// The kernel clears removed subvolumes away while Release asks for their qgroups: if
// one went too early, btrfs would lose count of all.
func TestReleasingAtAnyTimeLosesNoCount(t *testing.T) {
	testenv.NeedRoot(t)
	root := open(t, btrfs(t, enable))
	facility, err := quota.Detect(root)
	must(t, err)
	left := make(map[quota.ID]bool)
	for i := range 50 {
		d, err := facility.Make(root, strconv.Itoa(i))
		must(t, err)
		id, err := facility.IDOf(d)
		must(t, err)
		left[id] = true
		must(t, d.Close())
	}
	must(t, root.Sync()) // each has a use now
	for i := range 50 {
		must(t, root.RemoveDir(strconv.Itoa(i)))
	}
	for deadline := time.Now().Add(time.Minute); len(left) > 0; {
		for id := range left {
			must(t, facility.Release(root, id))
			usage, err := facility.Usage(root, id)
			must(t, err)
			if usage.Bytes == 0 {
				delete(left, id)
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d subvolumes are not cleared away within a minute", len(left))
		}
	}
	_, err = quota.Detect(root)
	must(t, err)
}

func TestDetectSaysWhatToDo(t *testing.T) {
	testenv.NeedRoot(t)
	for _, c := range refused() {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, c.mount(t))
			facility, err := quota.Detect(d)
			if !errors.Is(err, quota.ErrNone) || facility != nil {
				t.Fatalf("Detect: %v, %v; want ErrNone", facility, err)
			}
			for _, words := range c.words {
				if !strings.Contains(err.Error(), words) {
					t.Errorf("%q does not say %q", err, words)
				}
			}
			// Where one command is all that is needed, the words end in it.
			if _, command, ok := strings.Cut(err.Error(), ": run "); ok {
				run(t, strings.Fields(command)...)
				if _, err := quota.Detect(d); err != nil {
					t.Errorf("after %s: %v", command, err)
				}
			}
		})
	}
}

type refusal struct {
	name  string
	mount func(t *testing.T) string
	words []string
}

func refused() []refusal {
	loop := func(kind string, bytes int64, options ...string) func(*testing.T) string {
		return func(t *testing.T) string { return testenv.LoopFS(t, kind, bytes, options...) }
	}
	cases := []refusal{
		{"tmpfs", func(t *testing.T) string { return testenv.Tmpfs(t, 1<<20) }, []string{"tmpfs", "xfs, ext4 and btrfs have"}},
		{"xfs without prjquota", loop("xfs", 300<<20), []string{"prjquota"}},
		{"ext4 without the features", loop("ext4", 64<<20), []string{"tune2fs -O project,quota /dev/loop", "prjquota"}},
		{"btrfs without quotas", loop("btrfs", 128<<20), []string{"run btrfs quota enable /"}},
		{"btrfs that lost count", lostCount, []string{"run btrfs quota rescan /"}},
	}
	mounted := mountedByTheMachine()
	for kind, path := range mounted {
		cases = append(cases, refusal{kind + " in a directory of a project", func(t *testing.T) string { return projectDirectory(t, path) },
			[]string{"project 42", "chattr -p 0 -P "}})
	}
	if len(mounted) == 0 {
		return cases
	}
	return append(cases,
		refusal{"xfs without prjquota, by a kernel that has it", loop("xfs", 300<<20), []string{"xfs is mounted without prjquota", "rootflags=prjquota"}},
		refusal{"xfs that only counts", loop("xfs", 300<<20, "pqnoenforce"), []string{"pqnoenforce", "prjquota"}},
		refusal{"ext4 that only counts", func(t *testing.T) string { d := image(t, "ext4"); return d.mount(t) }, []string{"ext4 is mounted without prjquota"}},
	)
}

// lostCount makes a btrfs that stopped counting, because groups of qgroups changed.
func lostCount(t *testing.T) string {
	t.Helper()
	testenv.NeedPrograms(t, "btrfs")
	path := btrfs(t, enable)
	run(t, "btrfs", "-q", "subvolume", "create", path+"/a")
	run(t, "btrfs", "-q", "subvolume", "create", path+"/b")
	must(t, os.WriteFile(path+"/a/file", make([]byte, 1<<20), 0o600))
	share(t, path+"/a/file", path+"/b/file")
	must(t, unix.Syncfs(open(t, path).Fd()))
	run(t, "btrfs", "qgroup", "create", "1/100", path)
	run(t, "btrfs", "qgroup", "assign", "--no-rescan", "0/256", "1/100", path)
	return path
}

func share(t *testing.T, from, to string) {
	t.Helper()
	source, err := os.Open(from)
	must(t, err)
	defer source.Close()
	target, err := os.Create(to)
	must(t, err)
	defer target.Close()
	must(t, unix.IoctlFileClone(int(target.Fd()), int(source.Fd())))
}

// projectDirectory makes a directory that an administrator limits as a whole.
func projectDirectory(t *testing.T, mounted string) string {
	t.Helper()
	testenv.NeedPrograms(t, "chattr")
	path := filepath.Join(mounted, rand.Text())
	must(t, os.Mkdir(path, 0o755))
	run(t, "chattr", "-p", "42", "+P", path)
	t.Cleanup(func() { must(t, os.Remove(path)) })
	return path
}

// XFS refuses to move a directory up to one of another project; ext4 does too, and can have
// projects in the virtual machine alone.
func TestATreeIsRemovedThatAUserGaveToOtherProjects(t *testing.T) {
	testenv.NeedRoot(t)
	mounted := mountedByTheMachine()
	if len(mounted) == 0 {
		t.Skip("the virtual machine of make test-kernel has such filesystems")
	}
	for kind, path := range mounted {
		t.Run(kind, func(t *testing.T) {
			root := projectDirectory(t, path)
			inner := filepath.Join(root, "volume", "a")
			must(t, os.MkdirAll(inner, 0o755))
			run(t, "chattr", "-p", "43", inner)
			must(t, os.MkdirAll(inner+strings.Repeat("/d", 100), 0o755))
			must(t, open(t, root).RemoveTree(t.Context(), "volume", func(ctx context.Context) error { return ctx.Err() }))
		})
	}
}

func BenchmarkFacility(b *testing.B) {
	testenv.NeedRoot(b)
	for _, fs := range filesystems() {
		b.Run(fs.name, func(b *testing.B) { benchmark(b, fs.subject(b, fs.mount(b))) })
	}
}

func benchmark(b *testing.B, s quotatest.Subject) {
	d, err := s.Make(s.Root, "a")
	must(b, err)
	defer func() { must(b, d.Close()) }()
	id, err := s.NewID(d, 0, func(quota.ID) bool { return false })
	must(b, err)
	must(b, s.Limit(d, id, quota.Limit{Bytes: 1 << 20}))
	id, err = s.IDOf(d)
	must(b, err)
	for name, call := range map[string]func(i int) error{
		"Usage": func(int) error { _, err := s.Usage(d, id); return err },
		"Limit": func(i int) error { return s.Limit(d, id, quota.Limit{Bytes: int64(i%100) << 20}) },
		"IDOf":  func(int) error { _, err := s.IDOf(d); return err },
		"NewID": func(int) error {
			_, err := s.NewID(d, 0, func(id quota.ID) bool { return id < quota.FirstID+10_000 })
			return err
		},
	} {
		b.Run(name, func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				must(b, call(i))
			}
		})
	}
}

func open(t testing.TB, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
