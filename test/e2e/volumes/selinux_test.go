package volumes

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// Labels without categories. The second is that of what a host has in /var.
const (
	container = "system_u:object_r:container_file_t:s0"
	variables = "system_u:object_r:var_t:s0"
	unlabeled = "system_u:object_r:unlabeled_t:s0"
)

func (b *bench) setLabel(path, label string) {
	b.Helper()
	b.Must(unix.Lsetxattr(path, "security.selinux", []byte(label), 0))
}

func (b *bench) wantLabel(path, want string) {
	b.Helper()
	buffer := make([]byte, 256)
	n, err := unix.Lgetxattr(path, "security.selinux", buffer)
	b.Must(err)
	if got := strings.TrimRight(string(buffer[:n]), "\x00"); got != want {
		b.Errorf("the label of %s is %s, want %s", path, got, want)
	}
}

// An act is a shell's command, and whether it is "allowed" or "denied".
type act struct{ command, result string }

// wantActs runs commands one after another as a container whose root is a directory.
// The container is root: nothing but SELinux is in its way.
func (b *bench) wantActs(dir, level string, acts ...act) {
	b.Helper()
	var script strings.Builder
	for _, a := range acts {
		fmt.Fprintf(&script, "{ %s; } >/dev/null 2>&1 && echo allowed || echo denied\n", a.command)
	}
	cmd := exec.CommandContext(b.Context(), "runcon", "-t", "container_t", "-l", level, "sh", "-c", script.String())
	cmd.Dir = dir
	output, err := cmd.CombinedOutput()
	results := strings.Fields(string(output))
	if err != nil || len(results) != len(acts) {
		b.Fatalf("run as a container: %v: %s", err, output)
	}
	for i, a := range acts {
		if results[i] != a.result {
			b.Errorf("a container with %s, in %s: %q was %s, want %s", level, dir, a.command, results[i], a.result)
		}
	}
}

// relabelPool stops the driver, labels an empty pool as a host's directory, and
// starts it again with the pool option relabel.
func (b *bench) relabelPool(relabel string) {
	b.Helper()
	b.Must(b.Process.Close())
	b.Must(os.RemoveAll(filepath.Join(b.pool, ".hostpath-provisioner")))
	b.setLabel(b.pool, variables)
	b.Run(b.config(relabel))
}

func containersAreConfined(b *bench) {
	const level = "s0:c1,c2"
	b.relabelPool("root")
	b.create("own", 64*mib)
	b.wantLabel(filepath.Join(b.pool, "own"), container)
	own := b.publish("own", "pod")
	b.wantLabel(own, container)
	b.wantActs(own, level,
		act{"echo content >file", "allowed"},
		act{"mkdir -p sub/sub", "allowed"},
		act{"echo >sub/sub/file", "allowed"},
		act{"echo >" + own + "/by-path", "allowed"},
		act{"echo >" + b.pool + "/file", "denied"},
		act{"mkdir " + b.pool + "/directory", "denied"},
		act{"mv " + b.pool + "/own " + b.pool + "/moved", "denied"},
		act{"ls " + b.pool, "denied"},
	)
	drivers := filepath.Join(b.pool, ".hostpath-provisioner")
	record := filepath.Join(drivers, "volumes", "own.json")
	if _, err := os.Stat(record); err != nil {
		b.Error(err)
	}
	b.wantActs(own, level,
		act{"echo >" + drivers + "/file", "denied"},
		act{"echo >" + drivers + "/volumes/file", "denied"},
		act{"echo >>" + record, "denied"},
		act{"cat " + record, "denied"},
		act{"rm " + record, "denied"},
	)
	narrow := strings.TrimSuffix(container, "s0") + level
	for _, made := range []string{"file", "sub", "sub/sub", "sub/sub/file", "by-path"} {
		b.wantLabel(filepath.Join(own, made), narrow)
	}
	b.wantActs(own, "s0:c3,c4", act{"cat file", "denied"}, act{"echo >>file", "denied"}, act{"echo >theirs", "allowed"})
	b.unpublish("own", "pod")
}

// podsOfOnePool are two pods with labels of their own, each with a volume. The container runtime gives all of a volume the
// label of its pod, because the CSIDriver has seLinuxMount false: a mount with that label, as by the feature SELinuxMount of
// Kubernetes, would be one of the whole pool.
func podsOfOnePool(b *bench) {
	levels := map[string]string{"one": "s0:c1,c2", "other": "s0:c3,c4"}
	targets := make(map[string]string)
	for name := range levels {
		b.create(name, 64*mib)
		targets[name] = b.publish(name, name)
		b.Must(os.WriteFile(filepath.Join(targets[name], "file"), []byte("content\n"), 0o666))
	}
	// Nothing but labels keeps pods apart here.
	b.wantActs(targets["one"], levels["one"], act{"cat " + targets["other"] + "/file", "allowed"})
	for name, target := range targets {
		label := strings.TrimSuffix(container, "s0") + levels[name]
		b.Must(filepath.WalkDir(target, func(path string, _ fs.DirEntry, err error) error {
			b.setLabel(path, label)
			return err
		}))
	}
	for name, theirs := range map[string]string{"one": targets["other"], "other": targets["one"]} {
		b.wantActs(targets[name], levels[name],
			act{"cat file", "allowed"}, act{"echo >>file", "allowed"}, act{"echo >new", "allowed"},
			act{"cat " + theirs + "/file", "denied"}, act{"echo >>" + theirs + "/file", "denied"}, act{"echo >" + theirs + "/new", "denied"}, act{"ls " + theirs, "denied"})
	}

	// As kubelet would with seLinuxMount true.
	option := `context="` + strings.TrimSuffix(container, "s0") + levels["one"] + `"`
	capability := volume("one", 0).Capability()
	capability.GetMount().MountFlags = []string{option}
	_, err := b.Kubelet().NodePublishVolume(b.Context(), &csi.NodePublishVolumeRequest{VolumeId: "one", TargetPath: b.Target("labelled"), VolumeCapability: capability})
	b.WantCode("publish with "+option, err, codes.InvalidArgument)
	b.Must(b.mountAgain(""))
	drivertest.WantErrno(b, "mount the pool's filesystem once more with "+option, b.mountAgain(option), unix.EINVAL)
	for name := range levels {
		b.unpublish(name, name)
	}
}

// mountAgain mounts the pool's filesystem at another place, for an instant.
func (b *bench) mountAgain(option string) error {
	b.Helper()
	table, err := mountinfo.Own()
	b.Must(err)
	i := slices.IndexFunc(table, func(m *mountinfo.Mount) bool { return m.Mountpoint == b.mounted })
	if i < 0 {
		b.Fatalf("nothing is mounted at %s", b.mounted)
	}
	path := b.TempDir()
	if err := unix.Mount(table[i].Source, path, table[i].Type, 0, option); err != nil {
		return err
	}
	return unix.Unmount(path, 0)
}

func migratedIsRelabelled(b *bench) {
	for relabel, want := range map[string]struct{ root, content string }{
		"root":      {"allowed", "denied"},
		"recursive": {"allowed", "allowed"},
		"none":      {"denied", "denied"},
	} {
		for kind, old := range map[string]string{"var": variables, "unlabeled": unlabeled} {
			name := kind + "-" + relabel
			b.relabelPool(relabel)
			path := b.migrate(name, old)
			target := b.publish(name, name)
			labels := map[string]string{"allowed": container, "denied": old}
			b.wantLabel(path, labels[want.root])
			for _, below := range []string{"file", "sub", "sub/file"} {
				b.wantLabel(filepath.Join(path, below), labels[want.content])
			}
			b.wantActs(target, "s0:c1,c2",
				act{"echo >new", want.root}, act{"cat file", want.content}, act{"echo >>sub/file", want.content})

			// Only once: what happens to the content later is its owner's business.
			b.setLabel(filepath.Join(path, "sub/file"), old)
			b.publish(name, name+"-again")
			b.wantLabel(filepath.Join(path, "sub/file"), old)
			b.wantTold(relabel, strings.Count(b.Process.Log(), "Relabelled a volume"))
			b.unpublish(name, name+"-again")
			b.unpublish(name, name)
			b.Must(b.delete(name))
			b.AwaitNoTrash(b.pool)
		}
	}
}

func (b *bench) wantTold(relabel string, times int) {
	b.Helper()
	if want := map[bool]int{true: 0, false: 1}[relabel == "none"]; times != want {
		b.Errorf("relabel %s: the driver reports %d times that it has, want %d", relabel, times, want)
	}
}

// migrate puts a directory with content into the pool, as an administrator would,
// all of one label.
func (b *bench) migrate(name, label string) string {
	b.Helper()
	path := filepath.Join(b.pool, name)
	b.Must(os.MkdirAll(filepath.Join(path, "sub"), 0o755))
	for _, file := range []string{"file", "sub/file"} {
		b.Must(os.WriteFile(filepath.Join(path, file), []byte("content\n"), 0o666))
		b.setLabel(filepath.Join(path, file), label)
	}
	b.setLabel(filepath.Join(path, "sub"), label)
	b.setLabel(path, label)
	return path
}
