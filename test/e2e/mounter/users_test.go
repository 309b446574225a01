package mounter

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// container is one that has a directory of the host, with what is mounted below it now, until the function that is returned ends it. Script runs
// there, with the directory as $1, and its output is returned.
func (h *host) container(propagation, script string) (said string, end func()) {
	h.t.Helper()
	cmd := exec.CommandContext(h.t.Context(), "unshare", "--mount", "--propagation", propagation, "sh", "-ec", script+"\necho; read x || true", "container", h.Target)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must.Succeed(h.t, err)
	out, err := cmd.StdoutPipe()
	must.Succeed(h.t, err, cmd.Start())
	buffer := make([]byte, 128)
	n, err := out.Read(buffer)
	must.Succeed(h.t, err)
	return strings.TrimSpace(string(buffer[:n])), func() {
		must.Succeed(h.t, in.Close())
		_, err := io.Copy(io.Discard, out)
		must.Succeed(h.t, err, cmd.Wait())
	}
}

// The container of the driver that has published a block volume has ended, as for an upgrade. The /dev of the mounter's pod lacks the loop device.
func TestUnmountUnderBlockVolume(t *testing.T) {
	p := newConfined(t, "")
	started, _ := p.mount()
	started.stop(syscall.SIGTERM)
	file := filepath.Join(p.Target, "disk.img")
	must.Succeed(t, os.WriteFile(file, nil, 0o600), os.Truncate(file, mib))
	device, end := p.container("slave", `losetup --find --show "$1/disk.img"`)
	t.Cleanup(func() { _ = exec.Command("losetup", "--detach", device).Run() }) // it is detached unless the test failed
	end()
	for _, command := range [][]string{{"look"}, {"unmount", "--device", "/dev/pool"}} {
		if status, said := p.run(p.setup, append(command, "--patience", "0")...); status != 1 || !contains(said, device+" (/disk.img)") {
			t.Errorf("%s: status %d, %s", command, status, said)
		}
	}
	p.wantMounted("ext4")
	tool(t, "losetup", "--detach", device)
	if status, said := p.run(p.setup, "unmount", "--device", "/dev/pool", "--patience", "0"); status != 0 {
		t.Errorf("unmount: status %d, %s", status, said)
	}
}

// A container has a mount of the pool that is its own alone. The claim keeps the pod of the clean-up until that is gone.
func TestUnmountWaitsForTheDevice(t *testing.T) {
	h, d := newHost(t), newDisk(t, 64*mib)
	p := h.start("", "mount", "--device", d.Path, "--fs-type", "ext4")
	p.says(mounted, 1)
	p.stop(syscall.SIGTERM)
	_, end := h.container("private", "")
	unmount := func() (int, string) { return h.run("", "unmount", "--device", d.Path, "--patience", "0") }
	for range 2 { // the second finds nothing mounted
		if status, said := unmount(); status != 1 || !contains(said, "the claim is used") {
			t.Errorf("unmount with the device in use: status %d, %s", status, said)
		}
		h.wantUnmounted()
	}
	end()
	if status, said := unmount(); status != 0 {
		t.Errorf("unmount after that: status %d, %s", status, said)
	}
	disk, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
	must.Succeed(t, err, disk.Close())
}
