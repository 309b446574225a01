package mapper

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// A namespace of NVMe is formatted, mounted by its name, and grows with what it is made of, while the mounter runs.
func TestNVMe(t *testing.T) {
	mounter, at := program(t), target(t)
	file := sparse(t, 400*mib)
	backing := attach(t, file)
	namespace := export(t, backing)
	device := connect(t)
	flags := []string{"--target", at, "--device", claimOf(t, device), "--check-interval", "100ms"}
	first := start(t, mounter, append([]string{"mount"}, flags...)...)
	first.says(t, "bytes=419430400")
	wantMount(t, at, device, "xfs", 400*mib)
	must.Succeed(t, os.WriteFile(filepath.Join(at, "file"), []byte("data"), 0o600))

	must.Succeed(t, os.Truncate(file, 600*mib))
	must.Succeed(t, loopfs.Resized(backing))
	write(t, filepath.Join(namespace, "revalidate_size"), "1")
	first.says(t, "bytes=629145600")
	wantMount(t, at, device, "xfs", 600*mib)
	first.end(t)
	run(t, "", mounter, append([]string{"unmount", "--patience", "10s"}, flags[:4]...)...)
	until(t, "Keeping the pool mounted", mounter, append([]string{"mount"}, flags...)...)
	wantContent(t, filepath.Join(at, "file"), "data")
	run(t, "", mounter, append([]string{"unmount", "--patience", "10s"}, flags[:4]...)...)
}

const nqn = "nqn.2014-08.org.nvmexpress:pool"

// export serves a device as a namespace of NVMe on the loopback, until the test ends, and returns its directory in configfs.
// https://docs.kernel.org/filesystems/configfs.html
func export(t *testing.T, device string) (namespace string) {
	t.Helper()
	run(t, "", "modprobe", "-a", "nvmet_tcp", "nvme_tcp")
	config := t.TempDir()
	must.Succeed(t, unix.Mount("configfs", config, "configfs", 0, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(config, 0)) })
	subsystem, port := filepath.Join(config, "nvmet/subsystems", nqn), filepath.Join(config, "nvmet/ports/1")
	namespace = filepath.Join(subsystem, "namespaces/1")
	for _, dir := range []string{subsystem, namespace, port} {
		must.Succeed(t, os.Mkdir(dir, 0o755))
		t.Cleanup(func() { must.Succeed(t, os.Remove(dir)) })
	}
	write(t, filepath.Join(subsystem, "attr_allow_any_host"), "1")
	write(t, filepath.Join(namespace, "device_path"), device)
	write(t, filepath.Join(namespace, "enable"), "1")
	for attribute, value := range map[string]string{"trtype": "tcp", "adrfam": "ipv4", "traddr": "127.0.0.1", "trsvcid": "4420"} {
		write(t, filepath.Join(port, "addr_"+attribute), value)
	}
	link := filepath.Join(port, "subsystems", nqn)
	must.Succeed(t, os.Symlink(subsystem, link))
	t.Cleanup(func() { must.Succeed(t, os.Remove(link)) })
	return namespace
}

// connect returns the device of the namespace, which is there until the test ends.
func connect(t *testing.T) (device string) {
	t.Helper()
	write(t, "/dev/nvme-fabrics", "transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn="+nqn)
	t.Cleanup(func() {
		controllers, err := filepath.Glob("/sys/class/nvme/nvme*/delete_controller")
		must.Succeed(t, err)
		for _, controller := range controllers {
			write(t, controller, "1")
		}
	})
	eventually(t, "the namespace to be there", func() bool {
		found, err := filepath.Glob("/dev/nvme*n1")
		must.Succeed(t, err)
		if len(found) == 1 {
			device = found[0]
		}
		return device != ""
	})
	return device
}

func write(t *testing.T, file, text string) {
	t.Helper()
	must.Succeed(t, os.WriteFile(file, []byte(text), 0))
}

// eventually waits for something that the kernel does in a moment.
func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for tick := time.NewTicker(50 * time.Millisecond); !done(); {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal("waited in vain for", what)
		}
	}
}
