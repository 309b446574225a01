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

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// The least that a device may do of what its file does. The kernel hands each request
// to another thread, some 10 µs that a small one cannot hide on a disk that needs no
// more than 40 µs for it; on a slower disk both are alike.
const (
	smallBudget = 0.6
	largeBudget = 0.8
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

// prepareBlocks compares the device of a block volume with the file that backs it.
func prepareBlocks(ctx context.Context, s *scene) ([]comparison, error) {
	const id = "pvc-disk"
	a, err := s.enter(ctx, nil)
	if err != nil {
		return nil, err
	}
	disk := drivertest.Volume{ID: id, Pool: poolName, Block: true, Bytes: s.order.disk}
	if _, err := a.Create(ctx, disk); err != nil {
		return nil, err
	}
	if err := a.Publish(ctx, disk, id); err != nil {
		return nil, err
	}
	device, file := a.Target(id), filepath.Join(a.pool(), id, "disk.img")
	// All of it is to be allocated and initialised.
	if err := writeDisk(device, s.order.disk); err != nil {
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
		all = append(all, c)
	}
	return all, nil
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
	var told bytes.Buffer
	cmd.Stderr = &told
	output, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("%s: %w: %s", cmd, err, bytes.TrimSpace(told.Bytes()))
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
		return 0, fmt.Errorf("read what fio told: %w", err)
	}
	if len(read.Jobs) != 1 || read.Jobs[0].Error != 0 {
		return 0, fmt.Errorf("fio told of %+v, want one job without an error", read.Jobs)
	}
	return read.Jobs[0].Read.Bytes + read.Jobs[0].Write.Bytes, nil
}
