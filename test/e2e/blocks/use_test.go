package blocks

import (
	"fmt"
	"os"
	"os/exec"
	"strings"

	"google.golang.org/grpc/codes"
)

func staysWhileUsed(b *bench) {
	const size = 4 * mib
	b.create("disk", size)
	path := b.publish("disk", "pod")
	d := open(b, path, os.O_RDWR)
	d.write(0, size, 1)
	b.WantCode("deleting a disk that is published", b.delete("disk"), codes.FailedPrecondition)
	b.WantCode("unpublishing a disk that the pod has open", b.tryUnpublish("disk", "pod"), codes.FailedPrecondition)
	d.want(0, size, 1)
	d.close()

	// A process of the node has the device open, by its own name.
	holder := open(b, b.wantDevices(1)[0], os.O_RDONLY)
	b.WantCode("unpublishing a disk that a process has open", b.tryUnpublish("disk", "pod"), codes.FailedPrecondition)
	b.WantCode("deleting a disk that a process has open", b.delete("disk"), codes.FailedPrecondition)
	b.Crash()
	b.wantDevices(1)
	b.WantCode("deleting it after a crash", b.delete("disk"), codes.FailedPrecondition)
	holder.want(0, size, 1)
	holder.close()
	b.unpublish("disk", "pod")
	b.wantDevices(0)
}

func countsForeignDevices(b *bench) {
	const size = 4 * mib
	b.create("disk", size)
	device := b.losetup(b.image("disk"))
	b.WantCode("deleting a disk that another program attached", b.delete("disk"), codes.FailedPrecondition)
	b.WantCode("publishing a disk that another program attached", b.tryPublish("disk", "pod"), codes.FailedPrecondition)
	b.Restart()
	if left := b.wantDevices(1); len(left) == 1 && left[0] != device {
		b.Errorf("%s is attached in place of %s", left[0], device)
	}
	b.WantCode("deleting it after a restart", b.delete("disk"), codes.FailedPrecondition)
	b.run("losetup", "--detach", device)
	b.wantDevices(0)
}

// losetup attaches a file as an administrator would.
func (b *bench) losetup(file string) string {
	b.Helper()
	return b.run("losetup", "--find", "--show", file)
}

func (b *bench) run(args ...string) string {
	b.Helper()
	output, err := exec.CommandContext(b.Context(), args[0], args[1:]...).CombinedOutput()
	if err != nil {
		b.Fatalf("%s: %v: %s", args, err, output)
	}
	return strings.TrimSpace(string(output))
}

// manyDisks are more than the eight devices that a kernel begins with.
func manyDisks(b *bench) {
	const count, size = 20, 2 * mib
	var names []string
	generation := make(map[string]uint64)
	for i := range count {
		name := fmt.Sprintf("disk-%02d", i)
		b.create(name, size)
		names = append(names, name)
		generation[name] = uint64(i + 1)
	}
	b.Together(names, func(name string) error { return b.tryPublish(name, name) })
	devices := make(map[uint64]bool)
	for _, name := range names {
		d := open(b, b.Target(name), os.O_RDWR)
		d.write(0, size, generation[name])
		d.close()
		devices[number(b, b.Target(name))] = true
	}
	if len(devices) != count {
		b.Errorf("%d disks have %d devices", count, len(devices))
	}
	b.wantDevices(count)
	b.Crash()
	b.Together(names, func(name string) error { return b.tryPublish(name, name) })
	b.wantDevices(count)
	for _, name := range names {
		d := open(b, b.Target(name), os.O_RDWR)
		d.want(0, size, generation[name])
		d.close()
	}
	b.Together(names, func(name string) error { return b.tryUnpublish(name, name) })
	b.wantDevices(0)
}
