package loop_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

// named is a device among some.
func named(devices []loop.Device, name string) (d loop.Device) {
	if i := slices.IndexFunc(devices, func(d loop.Device) bool { return d.Name == name }); i >= 0 {
		d = devices[i]
	}
	return d
}

// The server of the filesystem below a device answers what it likes when it is asked for the file.
func TestRefusedDevice_hidesNoOthers(t *testing.T) {
	k := kernel(t)
	refusing, name := ofAnother(t)
	for _, errno := range []unix.Errno{unix.EACCES, unix.EPERM, unix.EINVAL, unix.ENOENT, unix.EIO, unix.ESTALE} {
		refusing.FailWith(errno, disk.Stat)
		f := file(t, open(t, testenv.Tmpfs(t, 64*mib)), "disk", mib)
		d := attach(t, k, f, loop.Options{})
		all, err := k.Attached("disk")
		must.Succeed(t, err)
		refused := named(all, name)
		if !named(all, d.Name).Ours || refused.Ours || refused.Backing == d.Backing {
			t.Errorf("%v: attached are %+v, want %s, and %s as one of which nothing is known", errno, all, d.Name, name)
		}
		// What may be the caller's own is not detached by what was known of it before.
		if refused.Silent {
			must.ErrorIs(t, k.Detach(t.Context(), loop.Device{Name: name, Backing: d.Backing}), loop.ErrSilent)
		}
	}
}

// The kernel does not say the path of a file that is longer than a page.
func TestDeviceOfLongPath_hidesNoOthers(t *testing.T) {
	k := kernel(t)
	in := open(t, testenv.Tmpfs(t, 64*mib))
	deleted := attach(t, k, file(t, in, "disk", mib), loop.Options{})
	must.Succeed(t, os.Remove(filepath.Join(in.String(), "disk")))
	deep := in
	for range 20 {
		below, err := deep.Make(strings.Repeat("d", 250))
		must.Succeed(t, err)
		t.Cleanup(func() { _ = below.Close() })
		deep = below
	}
	long := foreign(t, file(t, deep, "disk", mib), true)
	_, err := os.ReadFile("/sys/block/" + long.Name + "/loop/backing_file")
	must.ErrorIs(t, err, unix.ENAMETOOLONG)

	orphans, err := k.OnDeleted("disk")
	must.Succeed(t, err)
	all, err := k.Attached("disk")
	must.Succeed(t, err)
	if !named(orphans, deleted.Name).Ours || !named(all, deleted.Name).Ours || named(all, long.Name).Backing != long.Backing {
		t.Errorf("on deleted files are %+v, and attached %+v; want %s and %s", orphans, all, deleted.Name, long.Name)
	}
	at, err := k.FilePath(long.Name)
	if at != "" || err != nil {
		t.Errorf("its path is %q, %v", at, err)
	}
	attach(t, k, file(t, in, "disk", mib), loop.Options{})
}

// A device whose file is not called like any that is looked for is not asked.
func TestAttached_asksOnlyWhatMayBeMeant(t *testing.T) {
	k := kernel(t)
	hanging, name := ofAnother(t)
	hanging.Hang()
	d := attach(t, k, file(t, open(t, testenv.Tmpfs(t, 64*mib)), "disk.img", mib), loop.Options{})
	all, err := k.Attached("disk.img")
	must.Succeed(t, err)
	if !named(all, d.Name).Ours || named(all, name).Name != "" || hang.Abandoned() != 0 {
		t.Errorf("attached are %+v, and %d calls hang; want %s, and that %s is not asked", all, hang.Abandoned(), d.Name, name)
	}
}

// Each takes a little less than the limit. Together they take not much more.
func TestSlowDevices_areAskedTogether(t *testing.T) {
	for _, slow := range []int{1, 30, 1000} {
		synctest.Test(t, func(t *testing.T) {
			var names []string
			for i := range slow {
				names = append(names, fmt.Sprint("loop", i))
			}
			begun := time.Now()
			all, err := loop.AskAll(append(names, "quick"), func(name string) (loop.Device, error) {
				if name != "quick" {
					time.Sleep(900 * time.Millisecond)
				}
				return loop.Device{Name: name}, nil
			})
			must.Succeed(t, err)
			if len(all) != slow+1 || all[slow].Name != "quick" {
				t.Errorf("%d answered, want all of %d in their order", len(all), slow+1)
			}
			if took := time.Since(begun); took > 2*time.Second {
				t.Errorf("%d devices took %v", slow, took)
			}
		})
	}
}

// What holds the device, and what ends it, would wait as long as the filesystem of its file hangs.
func TestDetach_silentDeviceIsAnError(t *testing.T) {
	k := kernel(t)
	image := filepath.Join(t.TempDir(), "image")
	must.Succeed(t, os.WriteFile(image, make([]byte, mib), 0o600))
	hanging := disk.New(t, image, t.TempDir())
	f, err := loop.Open(open(t, filepath.Dir(hanging.Path)), filepath.Base(hanging.Path))
	must.Succeed(t, err)
	d, err := k.Attach(f, loop.Options{ReadOnly: true, BlockBytes: 4096})
	must.Succeed(t, err, f.Close())
	t.Cleanup(func() {
		hanging.Heal()
		awaitAnswer(t, k, d.Name)
		err := k.Detach(t.Context(), d)
		// Each look that was given up has the device open until it has its answer.
		for began := time.Now(); errors.Is(err, loop.ErrBusy) && time.Since(began) < time.Minute; {
			err = k.Detach(t.Context(), d)
		}
		must.Succeed(t, err)
	})
	hanging.Hang()
	for what, do := range map[string]func() error{
		"detach":  func() error { return k.Detach(t.Context(), d) },
		"grow":    func() error { _, err := k.Grow(d); return err },
		"restore": func() error { _, err := k.Restore(d); return err },
	} {
		ended := make(chan error, 1)
		go func() { ended <- do() }()
		select {
		case err := <-ended:
			must.ErrorIs(t, err, loop.ErrSilent)
		case <-time.After(time.Minute):
			t.Fatalf("%s hangs with the filesystem", what)
		}
	}
}
