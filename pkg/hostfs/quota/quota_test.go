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
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestFakeContract(t *testing.T) {
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

func TestKernelContract(t *testing.T) {
	testenv.NeedRoot(t)
	for _, fs := range filesystems() {
		t.Run(fs.name, func(t *testing.T) {
			mounted := fs.mount(t)
			quotatest.Contract(t, func(t *testing.T) quotatest.Subject { return fs.subject(t, mounted) })
		})
	}
}

// A filesystem can limit directories.
type filesystem struct {
	name     string
	mount    func(t testing.TB) string
	byDevice bool // with quotactl(2), as on old kernels
}

// filesystems returns those that can be tested here: btrfs everywhere, and in the virtual
// machine of `make test-kernel` XFS and ext4 with project quotas.
func filesystems() []filesystem {
	all := []filesystem{{name: "btrfs", mount: func(t testing.TB) string { return btrfs(t, enable) }}}
	for kind, path := range mountedByTheMachine() {
		mounted := func(testing.TB) string { return path }
		all = append(all, filesystem{name: kind, mount: mounted},
			filesystem{name: kind + " by device", mount: mounted, byDevice: true})
	}
	return all
}

// mountedByTheMachine returns the mount points of XFS and ext4 with project quotas.
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
	root := open(t, below(t, mounted))
	facility, err := quota.Detect(root)
	must.Succeed(t, err)
	if fs.byDevice {
		facility = quota.ByDevice(facility)
	}
	return quotatest.Subject{
		Facility: facility,
		Root:     root,
		Create:   create,
		Settle:   func(t *testing.T) { must.Succeed(t, unix.Syncfs(root.Fd())) },
	}
}

// below makes a directory on a filesystem. At the end of the test it is removed, and with it the limits that were set in
// it: the disks of the machine are also those of other tests, whose drivers would remove them.
func below(t testing.TB, mounted string) string {
	t.Helper()
	path := filepath.Join(mounted, rand.Text())
	must.Succeed(t, os.Mkdir(path, 0o755))
	t.Cleanup(func() {
		must.Succeed(t, os.RemoveAll(path))
		root, err := dir.Open(mounted)
		must.Succeed(t, err)
		defer func() { must.Succeed(t, root.Close()) }()
		facility, err := quota.Detect(root)
		must.Succeed(t, err)
		must.Succeed(t, unix.Syncfs(root.Fd()))
		_, err = facility.ReleaseUnused(root, func(quota.ID) bool { return false })
		must.Succeed(t, err)
	})
	return path
}

// A file is written without CAP_SYS_RESOURCE, which is exempt from limits on ext4.
type file struct {
	*os.File
	in   *dir.Dir
	name string
}

func create(d *dir.Dir, name string) (_ quotatest.File, err error) {
	f := file{in: d, name: name}
	err = without(unix.CAP_SYS_RESOURCE, func() (err error) {
		f.File, err = os.OpenFile(filepath.Join(d.HandlePath(), name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (f file) Write(bytes int64) (written int64, err error) {
	err = without(unix.CAP_SYS_RESOURCE, func() error {
		n, err := f.File.Write(make([]byte, bytes))
		written = int64(n)
		return err
	})
	return written, err
}

func (f file) Close() error { return errors.Join(f.Sync(), f.File.Close()) }

func (f file) Remove() error { return f.in.Remove(f.name) }

// without runs f on a thread without a capability.
func without(capability int, f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
		if err := drop(capability); err != nil {
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

func drop(capability int) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return err
	}
	sets[0].Effective &^= 1 << capability
	return unix.Capset(&header, &sets[0])
}

// Commands of BTRFS_IOC_QUOTA_CTL (linux/btrfs.h; the second is of Linux 6.7).
const (
	enable       = 1
	enableSimple = 4
)

func btrfs(t testing.TB, command uint64) string {
	t.Helper()
	// The kernel cleans up subvolumes when it commits.
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

func TestNestedSubvolume(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "btrfs")
	root := open(t, btrfs(t, enable))
	facility, err := quota.Detect(root)
	must.Succeed(t, err)
	d, err := facility.Make(root, "volume")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	wantOutside(t, facility, d, 0)
	must.Succeed(t, os.Mkdir(d.String()+"/directory", 0o755))
	run(t, "btrfs", "-q", "subvolume", "create", d.String()+"/directory/nested")
	run(t, "btrfs", "-q", "subvolume", "create", d.String()+"/nested")
	wantOutside(t, facility, d, 2)
	directory := open(t, d.String()+"/directory")
	wantOutside(t, facility, directory, 0)
}

func wantOutside(t *testing.T, facility quota.Facility, d *dir.Dir, want int) {
	t.Helper()
	if got, err := facility.Outside(d); got != want || err != nil {
		t.Errorf("%d subvolumes are outside the limit of %s, %v; want %d", got, d, err, want)
	}
}

// The kernel cleans up removed subvolumes while Release destroys their qgroups: destroying
// one too early would make the accounting inconsistent.
func TestRelease_duringCleanupKeepsAccounting(t *testing.T) {
	testenv.NeedRoot(t)
	root := open(t, btrfs(t, enable))
	facility, err := quota.Detect(root)
	must.Succeed(t, err)
	left := make(map[quota.ID]bool)
	for i := range 50 {
		d, err := facility.Make(root, strconv.Itoa(i))
		must.Succeed(t, err)
		id, err := facility.IDOf(d)
		must.Succeed(t, err)
		left[id] = true
		must.Succeed(t, d.Close())
	}
	must.Succeed(t, root.Sync()) // each has a usage now
	for i := range 50 {
		must.Succeed(t, root.RemoveDir(strconv.Itoa(i)))
	}
	for deadline := time.Now().Add(time.Minute); len(left) > 0; {
		for id := range left {
			must.Succeed(t, facility.Release(root, id))
			usage, err := facility.Usage(root, id)
			must.Succeed(t, err)
			if usage.Bytes == 0 {
				delete(left, id)
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d subvolumes are not cleaned up within a minute", len(left))
		}
	}
	_, err = quota.Detect(root)
	must.Succeed(t, err)
}

func TestDetect_errorSaysWhatToDo(t *testing.T) {
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
			// If commands suffice, the message ends with them.
			if _, command, ok := strings.Cut(err.Error(), ": run "); ok {
				run(t, "sh", "-c", command)
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
		{"tmpfs", func(t *testing.T) string { return testenv.Tmpfs(t, 1<<20) }, []string{"tmpfs", "xfs, ext4 and btrfs are"}},
		{"xfs without prjquota", loop("xfs", 300<<20), []string{"prjquota"}},
		{"ext4 without the features", loop("ext4", 64<<20), []string{"tune2fs -O project,quota /dev/loop", "prjquota"}},
		{"btrfs without quotas", loop("btrfs", 128<<20), []string{"run btrfs quota enable /"}},
		{"btrfs with inconsistent accounting", lostCount, []string{"run btrfs quota rescan /"}},
	}
	if !testenv.Guest() { // whose kernel is older
		cases = append(cases, refusal{"btrfs with simple quotas", simplyCounted, []string{"has simple quotas", "only ordinary ones", "run btrfs quota disable /", "&& btrfs quota enable /"}})
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
		refusal{"xfs without prjquota, kernel supports it", loop("xfs", 300<<20), []string{"xfs is mounted without prjquota", "rootflags=prjquota"}},
		refusal{"xfs with accounting only", loop("xfs", 300<<20, "pqnoenforce"), []string{"pqnoenforce", "prjquota"}},
		refusal{"ext4 with accounting only", func(t *testing.T) string { d := image(t, "ext4"); return d.mount(t) }, []string{"ext4 is mounted without prjquota"}},
	)
}

// simplyCounted makes a btrfs with simple quotas.
func simplyCounted(t *testing.T) string {
	t.Helper()
	if _, err := os.Stat("/sys/fs/btrfs/features/simple_quota"); err != nil {
		testenv.Missing(t, "simple quotas of btrfs, Linux 6.7 or newer")
	}
	return btrfs(t, enableSimple)
}

// lostCount makes a btrfs with inconsistent accounting, by changing qgroup relations.
func lostCount(t *testing.T) string {
	t.Helper()
	testenv.NeedPrograms(t, "btrfs")
	path := btrfs(t, enable)
	run(t, "btrfs", "-q", "subvolume", "create", path+"/a")
	run(t, "btrfs", "-q", "subvolume", "create", path+"/b")
	must.Succeed(t, os.WriteFile(path+"/a/file", make([]byte, 1<<20), 0o600))
	share(t, path+"/a/file", path+"/b/file")
	must.Succeed(t, unix.Syncfs(open(t, path).Fd()))
	run(t, "btrfs", "qgroup", "create", "1/100", path)
	run(t, "btrfs", "qgroup", "assign", "--no-rescan", "0/256", "1/100", path)
	return path
}

func share(t *testing.T, from, to string) {
	t.Helper()
	source, err := os.Open(from)
	must.Succeed(t, err)
	defer source.Close()
	target, err := os.Create(to)
	must.Succeed(t, err)
	defer target.Close()
	must.Succeed(t, unix.IoctlFileClone(int(target.Fd()), int(source.Fd())))
}

// projectDirectory makes a directory with a project id of its own.
func projectDirectory(t *testing.T, mounted string) string {
	t.Helper()
	testenv.NeedPrograms(t, "chattr")
	path := filepath.Join(mounted, rand.Text())
	must.Succeed(t, os.Mkdir(path, 0o755))
	run(t, "chattr", "-p", "42", "+P", path)
	t.Cleanup(func() { must.Succeed(t, os.Remove(path)) })
	return path
}

// XFS and ext4 refuse to move a directory into one of another project. Project quotas are
// available only in the virtual machine.
func TestRemoveTree_otherProjects(t *testing.T) {
	testenv.NeedRoot(t)
	mounted := mountedByTheMachine()
	if len(mounted) == 0 {
		t.Skip("the virtual machine of make test-kernel has such filesystems")
	}
	for kind, path := range mounted {
		t.Run(kind, func(t *testing.T) {
			root := projectDirectory(t, path)
			inner := filepath.Join(root, "volume", "a")
			must.Succeed(t, os.MkdirAll(inner, 0o755))
			run(t, "chattr", "-p", "43", inner)
			must.Succeed(t, os.MkdirAll(inner+strings.Repeat("/d", 100), 0o755))
			must.Succeed(t, dir.RemoveTree(t.Context(), open(t, root), "volume", func(ctx context.Context) error { return ctx.Err() }))
		})
	}
}

// Kubelet and container runtimes give what is theirs projects of their own.
func TestBeside_otherProjects(t *testing.T) {
	testenv.NeedRoot(t)
	mounted := mountedByTheMachine()
	if len(mounted) == 0 {
		t.Skip("the virtual machine of make test-kernel has such filesystems")
	}
	const bytes = 8 << 20
	for kind, path := range mounted {
		t.Run(kind, func(t *testing.T) {
			s := (&filesystem{name: kind}).subject(t, path)
			beside := func() int64 {
				must.Succeed(t, unix.Syncfs(s.Root.Fd()))
				return must.Value(s.Beside(s.Root))(t).Alone()
			}
			root := projectDirectory(t, path)
			before := beside()
			inner := filepath.Join(root, "of others")
			must.Succeed(t, os.WriteFile(inner, make([]byte, bytes), 0o600))
			for _, project := range []string{"42", "1213202431", "1216348160", "4294967290"} {
				run(t, "chattr", "-p", project, inner)
				if more := beside() - before; more < bytes || more > bytes+1<<20 {
					t.Errorf("%d bytes more are beside the volumes once project %s has %d", more, project, bytes)
				}
			}
			run(t, "chattr", "-p", "1213202432", inner)
			if more := beside() - before; more > 1<<20 {
				t.Errorf("%d bytes of a volume are counted as beside the volumes", more)
			}
			run(t, "chattr", "-p", "42", inner)
			must.Succeed(t, os.Remove(inner))
		})
	}
}

// XFS keeps what it has stored of a project when no file is in it any more, and passes all of that to find the next one.
func TestBeside_tooManyProjects(t *testing.T) {
	testenv.NeedRoot(t)
	mounted := mountedByTheMachine()
	if len(mounted) == 0 {
		t.Skip("the virtual machine of make test-kernel has such filesystems")
	}
	const most = 50
	for kind, path := range mounted {
		t.Run(kind, func(t *testing.T) {
			root := projectDirectory(t, path)
			one := filepath.Join(root, "one")
			must.Succeed(t, os.WriteFile(one, []byte("x"), 0o600), os.Chown(one, 1000, 1000))
			for n := range 60 {
				run(t, "chattr", "-p", strconv.Itoa(2_000_000_000+1000*n), one)
			}
			must.Succeed(t, os.Remove(one))
			d := open(t, below(t, path))
			few := quota.AskingFew(must.Value(quota.Detect(d))(t), most)
			_, err := few.Beside(d)
			_, releaseErr := few.ReleaseUnused(d, func(quota.ID) bool { return true })
			if many := kind == "xfs"; errors.Is(err, quota.ErrTooMany) != many || errors.Is(releaseErr, quota.ErrTooMany) != many {
				t.Errorf("after a file was in 60 projects: %v, %v", err, releaseErr)
			}
		})
	}
}

// On XFS an administrator can set limits for all projects that have none.
func TestLimit_defaultOfProjects(t *testing.T) {
	testenv.NeedRoot(t)
	path := mountedByTheMachine()["xfs"]
	if path == "" {
		t.Skip("the virtual machine of make test-kernel has such a filesystem")
	}
	s := (&filesystem{name: "xfs"}).subject(t, path)
	must.Succeed(t, quota.SetDefaultLimit(s.Root, quota.Limit{Bytes: 1 << 20, Inodes: 10}))
	t.Cleanup(func() { must.Succeed(t, quota.SetDefaultLimit(s.Root, quota.Limit{})) })
	d, err := s.Make(s.Root, "a")
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	id, err := s.NewID(s.Root, 0, func(quota.ID) bool { return false })
	must.Succeed(t, err)
	want := quota.Limit{Bytes: 64 << 20}
	must.Succeed(t, s.Limit(d, id, want))
	for i := range 20 {
		must.Succeed(t, os.WriteFile(filepath.Join(d.HandlePath(), strconv.Itoa(i)), make([]byte, 1<<20), 0o600))
	}
	must.Succeed(t, unix.Syncfs(s.Root.Fd()))
	if usage, err := s.Usage(d, id); usage.Limit != want || err != nil {
		t.Errorf("the volume has %+v, %v; want the limit %+v", usage, err, want)
	}
	must.Succeed(t, s.Limit(d, id, quota.Limit{}))
	must.Succeed(t, os.WriteFile(filepath.Join(d.HandlePath(), "more"), make([]byte, 8<<20), 0o600))
	if usage, err := s.Usage(d, id); usage.Limit != (quota.Limit{}) || err != nil {
		t.Errorf("without a limit it has %+v, %v", usage, err)
	}
	must.Succeed(t, dir.RemoveTree(t.Context(), s.Root, "a", func(ctx context.Context) error { return ctx.Err() }))
	must.Succeed(t, d.Close())
	d, err = s.Make(s.Root, "b")
	must.Succeed(t, err)
	deadline := time.Now().Add(10 * time.Second)
	for {
		must.Succeed(t, s.Release(s.Root, id))
		again, err := s.NewID(s.Root, id, func(quota.ID) bool { return false })
		must.Succeed(t, err)
		if again == id {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the id %d of a removed volume is not given again, but %d", id, again)
		}
	}
}

func open(t testing.TB, path string) *dir.Dir {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	t.Cleanup(func() { _ = d.Close() })
	return d
}
