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

func (h *harness) setLabel(path, label string) {
	h.Helper()
	h.Must(unix.Lsetxattr(path, "security.selinux", []byte(label), 0))
}

func (h *harness) wantLabel(path, want string) {
	h.Helper()
	buffer := make([]byte, 256)
	n, err := unix.Lgetxattr(path, "security.selinux", buffer)
	h.Must(err)
	if got := strings.TrimRight(string(buffer[:n]), "\x00"); got != want {
		h.Errorf("the label of %s is %s, want %s", path, got, want)
	}
}

// An act is a shell's command, and whether it is "allowed" or "denied".
type act struct{ command, result string }

// wantActs runs commands one after another as a container whose root is a directory.
// The container is root: nothing but SELinux is in its way.
func (h *harness) wantActs(dir, level string, acts ...act) {
	h.Helper()
	var script strings.Builder
	for _, a := range acts {
		fmt.Fprintf(&script, "{ %s; } >/dev/null 2>&1 && echo allowed || echo denied\n", a.command)
	}
	cmd := exec.CommandContext(h.Context(), "runcon", "-t", "container_t", "-l", level, "sh", "-c", script.String())
	cmd.Dir = dir
	output, err := cmd.CombinedOutput()
	results := strings.Fields(string(output))
	if err != nil || len(results) != len(acts) {
		h.Fatalf("run as a container: %v: %s", err, output)
	}
	for i, a := range acts {
		if results[i] != a.result {
			h.Errorf("a container with %s, in %s: %q was %s, want %s", level, dir, a.command, results[i], a.result)
		}
	}
}

// relabelPool stops the driver, labels an empty pool as a host's directory, and
// starts it again with the pool option relabel.
func (h *harness) relabelPool(relabel string) {
	h.Helper()
	h.Must(h.Process.Close())
	h.Must(os.RemoveAll(filepath.Join(h.pool, ".hostpath-provisioner")))
	h.setLabel(h.pool, variables)
	h.Run(h.config(relabel))
}

func containersAreConfined(h *harness) {
	const level = "s0:c1,c2"
	h.relabelPool("root")
	h.create("own", 64*mib)
	h.wantLabel(filepath.Join(h.pool, "own"), container)
	own := h.publish("own", "pod")
	h.wantLabel(own, container)
	h.wantActs(own, level,
		act{"echo content >file", "allowed"},
		act{"mkdir -p sub/sub", "allowed"},
		act{"echo >sub/sub/file", "allowed"},
		act{"echo >" + own + "/by-path", "allowed"},
		act{"echo >" + h.pool + "/file", "denied"},
		act{"mkdir " + h.pool + "/directory", "denied"},
		act{"mv " + h.pool + "/own " + h.pool + "/moved", "denied"},
		act{"ls " + h.pool, "denied"},
	)
	drivers := filepath.Join(h.pool, ".hostpath-provisioner")
	record := filepath.Join(drivers, "volumes", "own.json")
	if _, err := os.Stat(record); err != nil {
		h.Error(err)
	}
	h.wantActs(own, level,
		act{"echo >" + drivers + "/file", "denied"},
		act{"echo >" + drivers + "/volumes/file", "denied"},
		act{"echo >>" + record, "denied"},
		act{"cat " + record, "denied"},
		act{"rm " + record, "denied"},
	)
	narrow := strings.TrimSuffix(container, "s0") + level
	for _, made := range []string{"file", "sub", "sub/sub", "sub/sub/file", "by-path"} {
		h.wantLabel(filepath.Join(own, made), narrow)
	}
	h.wantActs(own, "s0:c3,c4", act{"cat file", "denied"}, act{"echo >>file", "denied"}, act{"echo >theirs", "allowed"})
	h.MustUnpublish("own", "pod")
}

// podsOfOnePool are two pods with labels of their own, each with a volume. The container runtime gives all of a volume the
// label of its pod, because the CSIDriver has seLinuxMount false: a mount with that label, as by the feature SELinuxMount of
// Kubernetes, would be one of the whole pool.
func podsOfOnePool(h *harness) {
	levels := map[string]string{"one": "s0:c1,c2", "other": "s0:c3,c4"}
	targets := make(map[string]string)
	for name := range levels {
		h.create(name, 64*mib)
		targets[name] = h.publish(name, name)
		h.Must(os.WriteFile(filepath.Join(targets[name], "file"), []byte("content\n"), 0o666))
	}
	// Nothing but labels keeps pods apart here.
	h.wantActs(targets["one"], levels["one"], act{"cat " + targets["other"] + "/file", "allowed"})
	for name, target := range targets {
		label := strings.TrimSuffix(container, "s0") + levels[name]
		h.Must(filepath.WalkDir(target, func(path string, _ fs.DirEntry, err error) error {
			h.setLabel(path, label)
			return err
		}))
	}
	for name, theirs := range map[string]string{"one": targets["other"], "other": targets["one"]} {
		h.wantActs(targets[name], levels[name],
			act{"cat file", "allowed"}, act{"echo >>file", "allowed"}, act{"echo >new", "allowed"},
			act{"cat " + theirs + "/file", "denied"}, act{"echo >>" + theirs + "/file", "denied"}, act{"echo >" + theirs + "/new", "denied"}, act{"ls " + theirs, "denied"})
	}

	// As kubelet would with seLinuxMount true.
	option := `context="` + strings.TrimSuffix(container, "s0") + levels["one"] + `"`
	capability := volume("one", 0).Capability()
	capability.GetMount().MountFlags = []string{option}
	_, err := h.Kubelet().NodePublishVolume(h.Context(), &csi.NodePublishVolumeRequest{VolumeId: "one", TargetPath: h.Target("labelled"), VolumeCapability: capability})
	h.WantCode("publish with "+option, err, codes.InvalidArgument)
	h.Must(h.mountAgain(""))
	drivertest.WantErrno(h, "mount the pool's filesystem once more with "+option, h.mountAgain(option), unix.EINVAL)
	for name := range levels {
		h.MustUnpublish(name, name)
	}
}

// mountAgain mounts the pool's filesystem at another place, for an instant.
func (h *harness) mountAgain(option string) error {
	h.Helper()
	table, err := mountinfo.Own()
	h.Must(err)
	i := slices.IndexFunc(table, func(m *mountinfo.Mount) bool { return m.Mountpoint == h.mounted })
	if i < 0 {
		h.Fatalf("nothing is mounted at %s", h.mounted)
	}
	path := h.TempDir()
	if err := unix.Mount(table[i].Source, path, table[i].Type, 0, option); err != nil {
		return err
	}
	return unix.Unmount(path, 0)
}

func migratedIsRelabelled(h *harness) {
	for relabel, want := range map[string]struct{ root, content string }{
		"root":      {"allowed", "denied"},
		"recursive": {"allowed", "allowed"},
		"none":      {"denied", "denied"},
	} {
		for kind, old := range map[string]string{"var": variables, "unlabeled": unlabeled} {
			name := kind + "-" + relabel
			h.relabelPool(relabel)
			path := h.migrate(name, old)
			target := h.publish(name, name)
			labels := map[string]string{"allowed": container, "denied": old}
			h.wantLabel(path, labels[want.root])
			for _, below := range []string{"file", "sub", "sub/file"} {
				h.wantLabel(filepath.Join(path, below), labels[want.content])
			}
			h.wantActs(target, "s0:c1,c2",
				act{"echo >new", want.root}, act{"cat file", want.content}, act{"echo >>sub/file", want.content})

			// Only once: what happens to the content later is its owner's business.
			h.setLabel(filepath.Join(path, "sub/file"), old)
			h.publish(name, name+"-again")
			h.wantLabel(filepath.Join(path, "sub/file"), old)
			h.wantTold(relabel, strings.Count(h.Process.Log(), "Relabelled a volume"))
			h.MustUnpublish(name, name+"-again")
			h.MustUnpublish(name, name)
			h.Must(h.delete(name))
			h.AwaitNoTrash(h.pool)
		}
	}
}

func (h *harness) wantTold(relabel string, times int) {
	h.Helper()
	if want := map[bool]int{true: 0, false: 1}[relabel == "none"]; times != want {
		h.Errorf("relabel %s: the driver reports %d times that it has, want %d", relabel, times, want)
	}
}

// migrate puts a directory with content into the pool, as an administrator would,
// all of one label.
func (h *harness) migrate(name, label string) string {
	h.Helper()
	path := filepath.Join(h.pool, name)
	h.Must(os.MkdirAll(filepath.Join(path, "sub"), 0o755))
	for _, file := range []string{"file", "sub/file"} {
		h.Must(os.WriteFile(filepath.Join(path, file), []byte("content\n"), 0o666))
		h.setLabel(filepath.Join(path, file), label)
	}
	h.setLabel(filepath.Join(path, "sub"), label)
	h.setLabel(path, label)
	return path
}
