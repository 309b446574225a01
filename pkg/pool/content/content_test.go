package content_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/go-logr/logr/testr"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind/bindtest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label/labeltest"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop/looptest"
	"kubevirt.io/hostpath-provisioner/pkg/pool/content"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const mib = 1 << 20

// A node has the stand-ins of a host, and the directory of one volume.
type node struct {
	t      *testing.T
	host   content.Host
	mounts *bindtest.Fake
	path   string // of the volume
	dir    *dir.Dir
	id     volume.ID
}

func newNode(t *testing.T) *node {
	t.Helper()
	n := &node{t: t, mounts: &bindtest.Fake{}, path: t.TempDir()}
	n.dir = n.open(n.path)
	dev := n.open(t.TempDir())
	devices := looptest.NewFake(dev)
	t.Cleanup(func() { must.Succeed(t, errors.Join(devices.Close(), n.mounts.Close())) })
	n.host = content.Host{Mounts: n.mounts, Labels: &labeltest.Fake{}, Devices: devices, Dev: dev, Log: testr.New(t)}
	var err error
	n.id, err = volume.ParseID("pvc-1")
	must.Succeed(t, err)
	return n
}

func (n *node) open(path string) *dir.Dir {
	n.t.Helper()
	d := must.Value(dir.Open(path))(n.t)
	n.t.Cleanup(func() { must.Succeed(n.t, d.Close()) })
	return d
}

func (n *node) target(name string) content.Target {
	n.t.Helper()
	target := must.Value(bind.ParseTarget(filepath.Join(n.t.TempDir(), name)))(n.t)
	return content.Target{Path: target}
}

// disk makes the content of a block volume.
func (n *node) disk(bytes int64) *content.Disk {
	n.t.Helper()
	c := &content.Disk{Host: n.host, ID: n.id, Bytes: bytes, Thin: true}
	must.Succeed(n.t, c.Make(n.t.Context(), n.dir))
	return c
}

// devices are those of the disk, and how often they are published.
func (n *node) devices() (attached, published int) {
	n.t.Helper()
	of := must.Value(n.host.DevicesOf(n.file()))(n.t)
	return len(of.Attached), len(of.Publications())
}

func (n *node) file() content.VolumeFile {
	n.t.Helper()
	return must.Value(content.FileOf(n.id, n.dir))(n.t)
}

func (n *node) wantDevices(attached, published int) {
	n.t.Helper()
	if a, p := n.devices(); a != attached || p != published {
		n.t.Errorf("%d devices, published %d times; want %d and %d", a, p, attached, published)
	}
}

func TestDirectoryMode(t *testing.T) {
	n := newNode(t)
	c := content.Directory{Host: n.host, ID: n.id, Relabel: label.Root}
	must.Succeed(t, c.Make(t.Context(), n.dir))
	if mode, err := n.dir.Mode(); err != nil || mode&0o777 != 0o777 {
		t.Errorf("mode %#o, %v", mode, err)
	}
	at := n.target("directory")
	at.ReadOnly = true
	must.Succeed(t, c.Publish(t.Context(), n.dir, at))
	if err := c.Publish(t.Context(), n.dir, content.Target{Path: at.Path}); !errors.Is(err, volume.ErrExists) {
		t.Errorf("published writable where it is read-only: %v, want ErrExists", err)
	}
	must.Succeed(t, n.mounts.Unpublish(at.Path, nil))
}

func TestDiskIsPublishedAsOneDevice(t *testing.T) {
	n := newNode(t)
	c := n.disk(mib)
	must.Succeed(t, c.Check(n.dir))
	first, second := n.target("first"), n.target("second")
	for range 2 { // a repeated call changes nothing
		must.Succeed(t, c.Publish(t.Context(), n.dir, first))
		n.wantDevices(1, 1)
	}
	must.Succeed(t, c.Publish(t.Context(), n.dir, second))
	n.wantDevices(1, 2)
	must.Succeed(t, n.mounts.Unpublish(first.Path, nil))
	must.Succeed(t, n.host.DetachUnpublished(t.Context(), n.file()))
	n.wantDevices(1, 1)
	must.Succeed(t, n.mounts.Unpublish(second.Path, nil))
	must.Succeed(t, n.host.DetachUnpublished(t.Context(), n.file()))
	n.wantDevices(0, 0)
}

func TestFailedDiskPublishDetaches(t *testing.T) {
	n := newNode(t)
	c := n.disk(mib)
	at := n.target("directory")
	must.Succeed(t, os.MkdirAll(filepath.Join(at.Path.String(), "data"), 0o755))
	if err := c.Publish(t.Context(), n.dir, at); err == nil {
		t.Error("published on a directory")
	}
	n.wantDevices(0, 0)
}

func TestLostDisk(t *testing.T) {
	for name, lose := range map[string]func(file string) error{
		"missing":   os.Remove,
		"truncated": func(file string) error { return os.Truncate(file, mib-512) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			c := n.disk(mib)
			must.Succeed(t, lose(filepath.Join(n.path, content.FileName)))
			if err := c.Check(n.dir); !errors.Is(err, volume.ErrLost) {
				t.Errorf("checked: %v, want ErrLost", err)
			}
			if err := c.Publish(t.Context(), n.dir, n.target("disk")); !errors.Is(err, volume.ErrLost) {
				t.Errorf("published: %v, want ErrLost", err)
			}
			var facts health.Facts
			space := c.Measure(n.dir, dir.Space{}, dir.Space{}, &facts)
			if space.SizeBytes != mib || !facts.Short && facts.IO == nil {
				t.Errorf("measured %+v, %+v", space, facts)
			}
		})
	}
}

func TestDiskGrows(t *testing.T) {
	n := newNode(t)
	c := n.disk(mib)
	must.Succeed(t, c.Publish(t.Context(), n.dir, n.target("disk")))
	must.Succeed(t, c.Grow(t.Context(), n.dir, 3*mib))
	must.Succeed(t, c.Cut(n.dir, 2*mib)) // of a growth that was not recorded
	if bytes, err := content.FileBytes(n.id, n.dir); err != nil || bytes != 2*mib {
		t.Errorf("the file has %d bytes, %v", bytes, err)
	}
	must.Succeed(t, must.Value(n.host.DevicesOf(n.file()))(t).Grow(2*mib))
	if bytes := must.Value(n.host.DevicesOf(n.file()))(t).Attached[0].SizeBytes; bytes != 2*mib {
		t.Errorf("its device has %d bytes", bytes)
	}
	c.Bytes = 2 * mib
	must.Succeed(t, c.Cut(n.dir, mib)) // recorded: it stays
	must.Succeed(t, c.Check(n.dir))
}
