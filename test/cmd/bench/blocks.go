package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// The least that a device may do of what its file does, and of what a device does that
// losetup has attached to such a file. The kernel hands each request to another thread
// and the answer back. Many at once hide that; of one at a time it is a matter of the
// machine, from 10 µs to as much as a fast disk takes, and so only the other has a
// budget there.
const (
	smallBudget = 0.6
	largeBudget = 0.8
	plainBudget = 0.8
)

// A load is IO as fio has it. It is direct: what is measured is the way to the disk,
// and not to the page cache.
type load struct {
	name  string
	rw    string // fio's word
	block int
	depth int // how many are on their way at once
}

// One at a time shows what the device adds to each, and many how much it can do.
var loads = []load{
	{"4 KiB random read, 1 at a time", "randread", 4 << 10, 1},
	{"4 KiB random write, 1 at a time", "randwrite", 4 << 10, 1},
	{"4 KiB random read, 32", "randread", 4 << 10, 32},
	{"4 KiB random write, 32", "randwrite", 4 << 10, 32},
	{"1 MiB sequential read, 4", "read", 1 << 20, 4},
	{"1 MiB sequential write, 4", "write", 1 << 20, 4},
}

// A driveFunc does IO to a path for a while and returns what it did, in bytes each
// second.
type driveFunc func(ctx context.Context, l load, path string, size int64, duration time.Duration) (float64, error)

// prepareBlocks compares the device of a block volume with the file that backs it, and
// with one that only the kernel made.
func prepareBlocks(ctx context.Context, s *scene) ([]comparison, error) {
	a, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	device, file, err := s.makeDisk(ctx, a, "pvc-disk")
	if err != nil {
		return nil, err
	}
	plain, err := s.makePlainDisk(ctx, a, device)
	if err != nil {
		return nil, err
	}
	var all []comparison
	for _, l := range loads {
		c := comparison{name: l.name, unit: "MiB/s", limit: "its file", budget: budget{AtLeast: largeBudget}}
		of := float64(1 << 20)
		if l.block < 1<<20 {
			c.unit, c.budget.AtLeast, of = "IO/s", smallBudget, float64(l.block)
		}
		on := func(path string) measureFunc {
			return func(ctx context.Context) (float64, error) {
				rate, err := s.drive(ctx, l, path, s.order.disk, s.order.duration)
				return rate / of, err
			}
		}
		c.ours, c.bare = on(device), on(file)
		if l.depth > 1 {
			all = append(all, c)
			continue
		}
		c.budget = budget{}
		all = append(all, c)
		c.limit, c.budget, c.bare = "a device of losetup on such a file", budget{AtLeast: plainBudget}, on(plain)
		all = append(all, c)
	}
	return all, nil
}

// makeDisk makes a block volume and publishes it, and answers its device and its file.
func (s *scene) makeDisk(ctx context.Context, a *actor, id string) (device, file string, err error) {
	disk := drivertest.Volume{ID: id, Pool: poolName, Block: true, Bytes: s.order.disk}
	if _, err := a.Create(ctx, disk); err != nil {
		return "", "", err
	}
	if err := a.Publish(ctx, disk, id); err != nil {
		return "", "", err
	}
	device = a.Target(id)
	// All of it is to be allocated and initialised.
	return device, filepath.Join(a.pool(), id, diskFile), writeDisk(device, s.order.disk)
}

// diskFile is the file of a block volume in its directory.
const diskFile = "disk.img"

// makePlainDisk attaches a file as the driver makes them without it, with direct IO and
// the logical block of a device of the driver's. The device goes when the scene is struck.
func (s *scene) makePlainDisk(ctx context.Context, a *actor, as string) (device string, err error) {
	const id = "pvc-plain"
	if _, err := a.Create(ctx, drivertest.Volume{ID: id, Pool: poolName, Block: true, Bytes: s.order.disk}); err != nil {
		return "", err
	}
	block, err := logicalBlock(as)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "losetup", "--find", "--show", "--direct-io=on", "--sector-size", strconv.Itoa(block),
		filepath.Join(a.pool(), id, diskFile))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(stderr.Bytes()))
	}
	device = string(bytes.TrimSpace(output))
	return device, writeDisk(device, s.order.disk)
}

// logicalBlock is the least that a device reads or writes, in bytes.
func logicalBlock(device string) (int, error) {
	f, err := os.Open(device)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return unix.IoctlGetInt(int(f.Fd()), unix.BLKSSZGET)
}

func writeDisk(path string, bytes int64) error {
	disk, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	content := make([]byte, 1<<20)
	for i := range content {
		content[i] = byte(i * 7)
	}
	for at := int64(0); at < bytes && err == nil; at += int64(len(content)) {
		_, err = disk.WriteAt(content, at)
	}
	return errors.Join(err, disk.Sync(), disk.Close())
}

// fio is the usual program for it.
func fio(ctx context.Context, l load, path string, size int64, duration time.Duration) (float64, error) {
	cmd := exec.CommandContext(ctx, "fio", "--name=load", "--output-format=json", "--ioengine=libaio", "--direct=1", "--thread",
		"--time_based", "--randrepeat=1", "--invalidate=0", "--norandommap",
		"--filename="+path, "--size="+strconv.FormatInt(size, 10), "--rw="+l.rw, "--bs="+strconv.Itoa(l.block),
		"--iodepth="+strconv.Itoa(l.depth), "--runtime="+strconv.Itoa(int(duration.Seconds())))
	// The death signal is tied to the thread that forks.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	output, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return readFio(output)
}

// readFio takes the rate of the one job from fio's output, in bytes each second.
func readFio(output []byte) (float64, error) {
	type direction struct {
		Bytes float64 `json:"bw_bytes"`
	}
	var read struct {
		Jobs []struct {
			Error int       `json:"error"`
			Read  direction `json:"read"`
			Write direction `json:"write"`
		} `json:"jobs"`
	}
	// Notes of fio's come first.
	if at := bytes.IndexByte(output, '{'); at > 0 {
		output = output[at:]
	}
	if err := json.Unmarshal(output, &read); err != nil {
		return 0, fmt.Errorf("read the output of fio: %w", err)
	}
	if len(read.Jobs) != 1 || read.Jobs[0].Error != 0 {
		return 0, fmt.Errorf("fio reported %+v, want one job without an error", read.Jobs)
	}
	return read.Jobs[0].Read.Bytes + read.Jobs[0].Write.Bytes, nil
}
