package quota_test

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// The owner of a file can change its project, with quotas and without.
func TestStrays(t *testing.T) {
	testenv.NeedPrograms(t, "chattr")
	t.Run("xfs", func(t *testing.T) { testStrays(t, testenv.LoopFS(t, "xfs", 512<<20)) })
	// ext4 has projects only where the kernel has quotas.
	for kind, path := range mountedByTheMachine() {
		t.Run(kind+" with quotas", func(t *testing.T) { testStrays(t, below(t, path)) })
	}
}

func testStrays(t *testing.T, root string) {
	t.Helper()
	in := func(name string) string { return root + "/volume/" + name }
	must.Succeed(t, os.Mkdir(root+"/volume", 0o755))
	run(t, "chattr", "-p", "1213202432", "+P", root+"/volume")
	must.Succeed(t, os.MkdirAll(in("a/b"), 0o755))
	for _, name := range []string{"kept", "a/gone", "a/b/moved"} {
		must.Succeed(t, os.WriteFile(in(name), []byte("data"), 0o600))
	}
	must.Succeed(t, os.Symlink("/etc/passwd", in("link")))
	must.Succeed(t, unix.Mkfifo(in("fifo"), 0o600))
	// A device that would be opened gives ENXIO.
	must.Succeed(t, unix.Mknod(in("device"), unix.S_IFCHR|0o600, int(unix.Mkdev(240, 77))))
	want := func(want, steps int) {
		t.Helper()
		taken := 0
		got, err := quota.StraysOf(open(t, root+"/volume"), 1213202432, func() error { taken++; return nil })
		if got != (quota.Strays{Outside: want}) || err != nil || taken != steps {
			t.Errorf("%d left the project, %v, of %d; want %d of %d", got, err, taken, want, steps)
		}
	}
	want(0, 8)
	run(t, "chattr", "-p", "0", in("a/gone"))
	run(t, "chattr", "-p", "1213202433", in("a/b/moved"))
	want(2, 8)
	run(t, "chattr", "-p", "0", in("a/b"))
	must.Succeed(t, os.WriteFile(in("a/b/later"), []byte("data"), 0o600)) // by its parent
	must.Succeed(t, os.Remove(in("kept")))
	want(4, 8)

	stop := errors.New("stop")
	if _, err := quota.StraysOf(open(t, root+"/volume"), 1213202432, func() error { return stop }); !errors.Is(err, stop) {
		t.Errorf("the search ends with %v, want what its step gave", err)
	}
}

// A process with a write lease of a file keeps the search from opening it, and does not hide that.
func TestStraysBehindLeases(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chattr")
	root := testenv.LoopFS(t, "xfs", 512<<20)
	must.Succeed(t, os.Mkdir(root+"/volume", 0o755))
	run(t, "chattr", "-p", "1213202432", "+P", root+"/volume")
	for _, name := range []string{"leased", "other"} {
		must.Succeed(t, os.WriteFile(root+"/volume/"+name, []byte("data"), 0o600))
		run(t, "chattr", "-p", "0", root+"/volume/"+name)
	}
	leased, err := os.OpenFile(root+"/volume/leased", os.O_RDWR, 0)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, leased.Close()) }()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGIO) // which else ends the process
	defer signal.Stop(signals)
	if _, err := unix.FcntlInt(leased.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	got, err := quota.StraysOf(open(t, root+"/volume"), 1213202432, func() error { return nil })
	if want := (quota.Strays{Outside: 1, Unseen: 1}); got != want || err != nil {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

// A user can encrypt files and take the key away: they cannot be opened, and do not hide what else has left.
func TestStraysBehindEncryption(t *testing.T) {
	testenv.NeedRoot(t)
	root := testenv.MadeFS(t, "ext4", 64<<20, "-O", "encrypt")
	must.Succeed(t, os.MkdirAll(root+"/volume/encrypted", 0o755))
	takeKey := testenv.Encrypt(t, root+"/volume/encrypted")
	for _, name := range []string{"encrypted/a", "encrypted/b", "other"} {
		must.Succeed(t, os.WriteFile(root+"/volume/"+name, []byte("data"), 0o600))
	}
	takeKey()
	got, err := quota.StraysOf(open(t, root+"/volume"), 1213202432, func() error { return nil })
	if want := (quota.Strays{Outside: 2, Unseen: 2}); got != want || err != nil {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

// The owner of a file in a user namespace, as of a pod with hostUsers: false, cannot change its project.
func TestOwnerInUserNamespaceKeepsProject(t *testing.T) {
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "chattr")
	root := testenv.LoopFS(t, "xfs", 512<<20)
	must.Succeed(t, os.Mkdir(root+"/volume", 0o755))
	run(t, "chattr", "-p", "1213202432", "+P", root+"/volume")
	must.Succeed(t, os.WriteFile(root+"/volume/file", []byte("data"), 0o600))
	const owner = 100000
	must.Succeed(t, os.Chown(root+"/volume/file", owner, owner))
	t.Chdir(root + "/volume") // the owner may not come by the directories above
	as := func(attr *syscall.SysProcAttr, flags ...string) error {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "chattr", append(flags, "file")...)
		cmd.SysProcAttr = attr
		out, err := cmd.CombinedOutput()
		t.Logf("chattr %s: %s %v", flags, out, err)
		return err
	}
	mapped := []syscall.SysProcIDMap{{HostID: owner, Size: 1}}
	inside := &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER, UidMappings: mapped, GidMappings: mapped,
		Credential: &syscall.Credential{NoSetGroups: true}, // root of the namespace
	}
	must.Succeed(t, as(inside, "+d"))
	if err := as(inside, "-p", "0"); err == nil {
		t.Error("the owner has changed the project from a user namespace")
	}
	wantStrays(t, root, 0)
	must.Succeed(t, as(&syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner, Gid: owner}}, "-p", "0"))
	wantStrays(t, root, 1)
}

func wantStrays(t *testing.T, root string, want int) {
	t.Helper()
	got, err := quota.StraysOf(open(t, root+"/volume"), 1213202432, func() error { return nil })
	if got != (quota.Strays{Outside: want}) || err != nil {
		t.Errorf("%+v, %v; want %d outside", got, err, want)
	}
}
