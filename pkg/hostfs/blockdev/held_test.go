package blockdev_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/blockdev"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

func TestDeviceIsHeldOnce(t *testing.T) {
	testenv.NeedRoot(t)
	image := filepath.Join(t.TempDir(), "disk")
	must.Succeed(t, os.WriteFile(image, make([]byte, 8*mib), 0o600))
	loop, err := loopfs.Attach(image)
	must.Succeed(t, err)
	defer loop.Close()

	device, err := blockdev.Hold(loop.Name())
	must.Succeed(t, err)
	if _, err := blockdev.Hold(loop.Name()); !errors.Is(err, blockdev.ErrBusy) {
		t.Errorf("opened twice: %v, want ErrBusy", err)
	}
	at, err := blockdev.At(loop.Name())
	must.Succeed(t, err)
	facts, err := blockdev.Inspect(at)
	must.Succeed(t, err)
	if at != device.Number() || facts.SizeBytes != 8*mib || facts.ReadOnly || facts.IsPartition() || facts.Identity != "" || facts.Alike != "backing_file="+image {
		t.Errorf("facts %+v of %s", facts, device)
	}
	if bytes, err := device.Size(); err != nil || bytes != 8*mib {
		t.Errorf("size %d, %v", bytes, err)
	}
	must.Succeed(t, device.Close())
	again, err := blockdev.Hold(loop.Name())
	must.Succeed(t, err)
	must.Succeed(t, again.Close())
}

// A node may have a hundred disks.
func TestLookAtDeviceTakesLittleMemory(t *testing.T) {
	testenv.NeedRoot(t)
	image := filepath.Join(t.TempDir(), "disk")
	must.Succeed(t, os.WriteFile(image, nil, 0o600), os.Truncate(image, 32*mib))
	loop, err := loopfs.Attach(image)
	must.Succeed(t, err)
	defer loop.Close()
	device, err := blockdev.Hold(loop.Name())
	must.Succeed(t, err)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	must.Succeed(t, device.ReadEnds())
	if zero, err := device.Zeroes(t.Context(), 0, 32*mib); err != nil || !zero {
		t.Errorf("it reads as zeroes: %t, %v", zero, err)
	}
	runtime.ReadMemStats(&after)
	must.Succeed(t, device.Close())
	if took := after.TotalAlloc - before.TotalAlloc; took > mib {
		t.Errorf("it took %d bytes", took)
	}
}

func TestOverwrite(t *testing.T) {
	testenv.NeedRoot(t)
	for name, overwrite := range map[string]func(d *blockdev.Writer) error{
		"zero":       func(d *blockdev.Writer) error { return d.Zero(mib, mib) },
		"deallocate": func(d *blockdev.Writer) error { return d.Deallocate(mib, mib) },
	} {
		t.Run(name, func(t *testing.T) {
			image := filepath.Join(t.TempDir(), "disk")
			content := make([]byte, 4*mib)
			for at := range content {
				content[at] = 'x'
			}
			must.Succeed(t, os.WriteFile(image, content, 0o600))
			loop, err := loopfs.Attach(image)
			must.Succeed(t, err)
			defer loop.Close()
			device, err := blockdev.Hold(loop.Name())
			must.Succeed(t, err)
			writer, err := device.ForWriting()
			must.Succeed(t, err)
			err = overwrite(writer)
			if errors.Is(err, errors.ErrUnsupported) && name == "deallocate" {
				must.Succeed(t, writer.Close(), device.Close())
				return // a loop device that earlier users have made ignore discards
			}
			must.Succeed(t, errors.Join(err, writer.Sync(), writer.Close(), device.Close()))
			got := make([]byte, len(content))
			_, err = loop.ReadAt(got, 0)
			must.Succeed(t, err)
			for at := range got {
				if zero := at >= mib && at < 2*mib; zero != (got[at] == 0) {
					t.Fatalf("byte %d is %d", at, got[at])
				}
			}
		})
	}
}

func TestOtherFilesAreRefused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	for path, want := range map[string]error{file: blockdev.ErrNotBlock, "/dev/null": blockdev.ErrNotBlock, file + "-none": blockdev.ErrGone} {
		if _, err := blockdev.Hold(path); !errors.Is(err, want) {
			t.Errorf("Hold(%s) = %v, want %v", path, err, want)
		}
		if _, err := blockdev.At(path); !errors.Is(err, want) {
			t.Errorf("At(%s) = %v, want %v", path, err, want)
		}
	}
	if _, err := blockdev.Inspect(blockdev.Number{Major: 1000, Minor: 1}); !errors.Is(err, blockdev.ErrGone) {
		t.Errorf("facts of no device: %v", err)
	}
}
