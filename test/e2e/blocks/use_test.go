package blocks

import (
	"fmt"
	"os"
	"os/exec"
	"strings"

	"google.golang.org/grpc/codes"
)

func staysWhileUsed(h *harness) {
	const size = 4 * mib
	h.create("disk", size)
	path := h.publish("disk", "pod")
	d := open(h, path, os.O_RDWR)
	d.write(0, size, 1)
	h.WantCode("deleting a disk that is published", h.delete("disk"), codes.FailedPrecondition)
	h.WantCode("unpublishing a disk that the pod has open", h.tryUnpublish("disk", "pod"), codes.FailedPrecondition)
	d.want(0, size, 1)
	d.close()

	// A process of the node has the device open, by its own name.
	holder := open(h, h.wantDevices(1)[0], os.O_RDONLY)
	h.WantCode("unpublishing a disk that a process has open", h.tryUnpublish("disk", "pod"), codes.FailedPrecondition)
	h.WantCode("deleting a disk that a process has open", h.delete("disk"), codes.FailedPrecondition)
	h.Crash()
	h.wantDevices(1)
	h.WantCode("deleting it after a crash", h.delete("disk"), codes.FailedPrecondition)
	holder.want(0, size, 1)
	holder.close()
	h.MustUnpublish("disk", "pod")
	h.wantDevices(0)
}

func countsForeignDevices(h *harness) {
	const size = 4 * mib
	h.create("disk", size)
	device := h.losetup(h.image("disk"))
	h.WantCode("deleting a disk that another program attached", h.delete("disk"), codes.FailedPrecondition)
	h.WantCode("publishing a disk that another program attached", h.tryPublish("disk", "pod"), codes.FailedPrecondition)
	h.Restart()
	if left := h.wantDevices(1); len(left) == 1 && left[0] != device {
		h.Errorf("%s is attached in place of %s", left[0], device)
	}
	h.WantCode("deleting it after a restart", h.delete("disk"), codes.FailedPrecondition)
	h.run("losetup", "--detach", device)
	h.wantDevices(0)
}

// losetup attaches a file as an administrator would.
func (h *harness) losetup(file string) string {
	h.Helper()
	return h.run("losetup", "--find", "--show", file)
}

func (h *harness) run(args ...string) string {
	h.Helper()
	output, err := exec.CommandContext(h.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		h.Fatalf("%s: %v: %s", args, err, output)
	}
	return strings.TrimSpace(string(output))
}

// manyDisks are more than the eight devices that a kernel begins with.
func manyDisks(h *harness) {
	const count, size = 20, 2 * mib
	var names []string
	generation := make(map[string]uint64)
	for i := range count {
		name := fmt.Sprintf("disk-%02d", i)
		h.create(name, size)
		names = append(names, name)
		generation[name] = uint64(i + 1)
	}
	h.Together(names, func(name string) error { return h.tryPublish(name, name) })
	devices := make(map[uint64]bool)
	for _, name := range names {
		d := open(h, h.Target(name), os.O_RDWR)
		d.write(0, size, generation[name])
		d.close()
		devices[number(h, h.Target(name))] = true
	}
	if len(devices) != count {
		h.Errorf("%d disks have %d devices", count, len(devices))
	}
	h.wantDevices(count)
	h.Crash()
	h.Together(names, func(name string) error { return h.tryPublish(name, name) })
	h.wantDevices(count)
	for _, name := range names {
		d := open(h, h.Target(name), os.O_RDWR)
		d.want(0, size, generation[name])
		d.close()
	}
	h.Together(names, func(name string) error { return h.tryUnpublish(name, name) })
	h.wantDevices(0)
}
