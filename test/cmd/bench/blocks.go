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

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// A load is IO as fio has it. It is direct: what is measured is the way to the disk,
// and not to the page cache.
type load struct {
	name  string
	rw    string // fio's word
	block int
	depth int // how many are on their way at once
	// least is the least that a device may do of what its file does. The kernel hands each request to another
	// thread and the answer back. Many at once hide that; of one at a time it is a matter of the machine, from 10 µs
	// to as much as a fast disk takes.
	least float64
}

// One at a time shows what the device adds to each, and many how much it can do.
var loads = []load{
	{"4 KiB random read, 1 at a time", "randread", 4 << 10, 1, 0},
	{"4 KiB random write, 1 at a time", "randwrite", 4 << 10, 1, 0},
	{"4 KiB random read, 32", "randread", 4 << 10, 32, 0.6},
	{"4 KiB random write, 32", "randwrite", 4 << 10, 32, 0.6},
	{"1 MiB sequential read, 4", "read", 1 << 20, 4, 0.8},
	{"1 MiB sequential write, 4", "write", 1 << 20, 4, 0.8},
}

// blockRows compare the device of a block volume with the file that backs it.
func blockRows(ctx context.Context, s *scene) ([]comparison, error) {
	a, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	disk := drivertest.Volume{ID: "pvc-disk", Pool: poolName, Block: true, Bytes: s.order.disk}
	if _, err := a.Create(ctx, disk); err != nil {
		return nil, err
	}
	device := a.Target(disk.ID)
	// All of it is to be allocated and initialised.
	if err := errors.Join(a.Publish(ctx, disk, disk.ID), writeDisk(device, disk.Bytes)); err != nil {
		return nil, err
	}
	var rows []comparison
	for _, l := range loads {
		on := func(path string) measureFunc {
			return func(ctx context.Context) (float64, error) {
				rate, err := s.order.io(ctx, l, path, s.order)
				return rate / float64(l.block), err
			}
		}
		c := comparison{
			name: l.name, unit: "IO/s", budget: budget{atLeast: l.least},
			ours: on(device), limit: on(filepath.Join(a.pool(), disk.ID, diskFile)),
		}
		if l.block == 1<<20 {
			c.unit = "MiB/s"
		}
		rows = append(rows, c)
	}
	return rows, nil
}

// diskFile is the file of a block volume in its directory.
const diskFile = "disk.img"

func writeDisk(path string, size int64) error {
	disk, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	content := bytes.Repeat([]byte("bench"), 1<<20)[:1<<20]
	for at := int64(0); at < size && err == nil; at += int64(len(content)) {
		_, err = disk.WriteAt(content, at)
	}
	return errors.Join(err, disk.Sync(), disk.Close())
}

// fio is the usual program for it.
func fio(ctx context.Context, l load, path string, o order) (float64, error) {
	cmd := exec.CommandContext(ctx, "fio", "--name=load", "--output-format=json", "--ioengine=libaio", "--direct=1", "--thread",
		"--time_based", "--randrepeat=1", "--invalidate=0", "--norandommap",
		"--filename="+path, "--size="+strconv.FormatInt(o.disk, 10), "--rw="+l.rw, "--bs="+strconv.Itoa(l.block),
		"--iodepth="+strconv.Itoa(l.depth), "--runtime="+strconv.Itoa(int(o.duration.Seconds())))
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
