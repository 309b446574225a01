// demo shows the driver at work: it makes a pool, starts the real program on a
// socket and takes volumes through their lives as kubelet and the sidecars would.
// All of it happens in a private mount namespace, and nothing of it stays.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

func main() {
	status, err := start()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		status = max(status, 1)
	}
	os.Exit(status)
}

func start() (status int, err error) {
	if os.Geteuid() != 0 {
		return 1, errors.New("mounting volumes needs root: run it with sudo")
	}
	if !mountns.Inside() {
		// Should this outer run be killed, the inner one still cleans up.
		return mountns.Rerun(syscall.SIGTERM)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err = run(ctx, os.Stdout)
	// The outer run, which made it, may have been killed.
	_ = os.Remove(os.TempDir())
	return 0, err
}

const poolBytes = 8 << 30

// A demo is one driver with one pool.
type demo struct {
	drivertest.Client
	ctx       context.Context
	dir, pool string
	// enforced reports whether the kernel enforces the sizes of volumes.
	enforced bool
}

// run makes the pool, starts the driver, takes each step, and cleans up.
func run(ctx context.Context, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "demo-")
	if err != nil {
		return err
	}
	d := &demo{ctx: ctx, dir: dir, pool: filepath.Join(dir, "pool"), Client: drivertest.Client{Targets: filepath.Join(dir, "pods")}}
	defer func() {
		if err = errors.Join(err, d.close()); err == nil {
			fmt.Fprintln(out, "\nNothing was left behind.")
		}
	}()
	if err := must.Try(func() { d.start(out) }); err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	for _, s := range d.steps() {
		begin, answer := time.Now(), s.answer
		err := must.Try(func() {
			if got := s.run(); got != "" {
				answer = got
			}
		})
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s (%s): %w\nLog of the driver:\n%s", s.what, s.call, err, d.Process.Log())
		}
		fmt.Fprintf(out, "%-33s  %-19s  %-36s  %7.2f ms\n", s.what, s.call, answer, time.Since(begin).Seconds()*1e3)
	}
	return nil
}

// start starts the driver on a pool on btrfs, which enforces sizes, or in a directory where there is none.
func (d *demo) start(out io.Writer) {
	binary := must.Get(drivertest.Binary(d.ctx, d.dir))
	must.Go(os.Mkdir(d.pool, 0o750))
	if err := loopfs.Mount(d.ctx, d.pool, "btrfs", poolBytes); errors.Is(err, loopfs.ErrMissing) {
		fmt.Fprintf(out, "One pool in a directory. Sizes are not enforced: %v.\n\n", err)
	} else {
		must.Go(err)
		must.Go(loopfs.SwitchQuotasOn(d.ctx, d.pool))
		d.enforced = true
		fmt.Fprintf(out, "One pool on btrfs with quotas, in a loop file of %s.\n\n", size(poolBytes))
	}
	d.Process = must.Get(drivertest.StartProcess(d.ctx, drivertest.Config{
		Binary: binary, Name: "demo-node", Version: "demo", Pools: []drivertest.PoolConfig{{Name: "local", Path: d.pool}},
	}))
}

// close stops the driver and removes all that there is, whatever step failed, and checks that nothing is left.
func (d *demo) close() error {
	var problems []error
	if d.Process != nil {
		problems = append(problems, d.Process.Close())
	}
	mounts, err := mountns.Below(d.dir)
	problems = append(problems, err)
	for _, mount := range slices.Backward(mounts) {
		// The devices of its files would keep a filesystem busy.
		problems = append(problems, loopfs.Detach(mount), loopfs.Unmount(mount))
	}
	left, err := loopfs.Left(d.dir)
	if len(left) > 0 {
		err = fmt.Errorf("still attached: %q", left)
	}
	return errors.Join(append(problems, err, os.RemoveAll(d.dir))...)
}

// A step is one row: what happens, the CSI call or system call by which it does, and its answer, unless run has another one.
type step struct {
	what, call, answer string
	run                func() string
}

// data is what a pod writes: 4 MiB in which no two pages are alike.
func data() []byte {
	var b bytes.Buffer
	for page := 0; b.Len() < 4<<20; page++ {
		fmt.Fprintf(&b, "page %-4090d\n", page)
	}
	return b.Bytes()
}

func (d *demo) steps() []step {
	large, small := drivertest.Volume{ID: "pvc-large", Bytes: 1 << 30}, drivertest.Volume{ID: "pvc-small", Bytes: 64 << 20}
	disk, restored := drivertest.Volume{ID: "pvc-disk", Bytes: 128 << 20, Block: true}, drivertest.Volume{ID: "pvc-restored", Bytes: 1 << 30}
	snapshot := ""
	capacity := func() string { return size(must.Get(d.Capacity(d.ctx, ""))) }
	create := func(v drivertest.Volume) step {
		return step{call: "CreateVolume", answer: v.ID, run: func() string {
			return promised(v.Bytes, must.Get(d.Create(d.ctx, v)).GetVolume().GetCapacityBytes())
		}}
	}
	publish := func(v drivertest.Volume) step {
		return does("NodePublishVolume", "mounted", func() { must.Go(d.Publish(d.ctx, v, filepath.Base(v.ID))) })
	}
	unpublish := func(v drivertest.Volume) step {
		return does("NodeUnpublishVolume", "unmounted", func() { must.Go(d.Unpublish(d.ctx, v.ID, v.ID)) })
	}
	// The directory is gone when the call is answered.
	remove := func(v drivertest.Volume) step {
		return does("DeleteVolume", "gone", func() {
			must.Go(d.Delete(d.ctx, v.ID))
			if _, err := os.Lstat(filepath.Join(d.pool, v.ID)); !errors.Is(err, os.ErrNotExist) {
				must.Go(fmt.Errorf("its directory is still in the pool (%w)", err))
			}
		})
	}
	grow := func(v drivertest.Volume) step {
		v.Bytes *= 2
		return step{call: "NodeExpandVolume", answer: size(v.Bytes), run: func() string {
			return promised(v.Bytes, must.Get(d.Expand(d.ctx, v, v.ID)).GetCapacityBytes())
		}}
	}
	write := func(v drivertest.Volume) step {
		return does("write, sync", "written", func() {
			file := d.open(v)
			defer file.Close()
			must.Get(file.Write(data()))
			// btrfs counts what was written when it is on the disk.
			must.Go(unix.Syncfs(int(file.Fd())))
		})
	}
	read := func(v drivertest.Volume) step {
		return does("read", "as it was", func() {
			if !bytes.Equal(must.Get(os.ReadFile(filepath.Join(d.Target(v.ID), "data"))), data()) {
				must.Go(errors.New("what was read is not what was written"))
			}
		})
	}
	return []step{
		{"How much can be promised?", "GetCapacity", "", capacity},
		create(large).named("Create a volume of 1 GiB"),
		{"How much is left?", "GetCapacity", "", capacity},
		publish(large).named("Publish it for a pod"),
		write(large).named("The pod writes 4 MiB"),
		create(small).named("Create a volume of 64 MiB"),
		publish(small).named("Publish it for a pod"),
		{"The pod writes until it is full", "write", "", func() string { return d.fill(small) }},
		grow(small).named("Grow it to 128 MiB, in use"),
		write(small).named("The pod writes 4 MiB more"),
		create(disk).named("Create a block volume of 128 MiB"),
		publish(disk).named("Publish it for a virtual machine"),
		{"The machine writes past its end", "write", "", func() string { return d.writePastEnd(disk) }},
		grow(disk).named("Grow it to 256 MiB, in use"),
		publish(drivertest.Volume{ID: "../../etc"}).refused(codes.InvalidArgument).named("Publish the volume ../../etc"),
		create(drivertest.Volume{ID: "pvc-too-large", Bytes: 2 * poolBytes}).refused(codes.ResourceExhausted).named("Create one larger than the pool"),
		remove(large).refused(codes.FailedPrecondition).named("Delete a volume in use"),
		does("SIGKILL", "serves again", func() { must.Go(d.Process.Kill(), d.Process.Restart(d.ctx)) }).named("Kill the driver, and start it"),
		read(large).named("The pod reads its 4 MiB"),
		unpublish(large).named("End the pod"),
		does("CreateSnapshot", "ready to use", func() {
			made := must.Get(d.Snapshot(d.ctx, "snapshot-demo", large.ID, ""))
			if snapshot = made.GetSnapshotId(); !made.GetReadyToUse() {
				must.Go(errors.New("the snapshot is not ready to use"))
			}
		}).named("Take a snapshot of its volume"),
		remove(large).named("Delete its volume"),
		does("CreateVolume", restored.ID, func() { must.Get(d.Restore(d.ctx, restored, snapshot)) }).named("Restore the snapshot"),
		publish(restored).named("Publish the restored volume"),
		read(restored).named("A pod reads the 4 MiB in it"),
		unpublish(restored).named("End this pod"),
		remove(restored).named("Delete its volume"),
		does("DeleteSnapshot", "gone", func() { must.Go(d.DeleteSnapshot(d.ctx, snapshot)) }).named("Delete the snapshot"),
		unpublish(small).named("End the pod of the small volume"),
		remove(small).named("Delete it"),
		unpublish(disk).named("End the virtual machine"),
		remove(disk).named("Delete its volume"),
		{"How much can be promised now?", "GetCapacity", "", capacity},
	}
}

func does(call, answer string, do func()) step {
	return step{call: call, answer: answer, run: func() string { do(); return "" }}
}

func (s step) named(what string) step {
	s.what = what
	return s
}

// refused expects the driver to refuse the call of a step with a code.
func (s step) refused(want codes.Code) step {
	call := s.run
	return does(s.call, "refused: "+want.String(), func() {
		if err := must.Try(func() { call() }); status.Code(err) != want {
			must.Go(fmt.Errorf("got %v, want %v", err, want))
		}
	})
}

// promised expects the driver to promise the size asked for.
func promised(want, got int64) string {
	if got != want {
		must.Go(fmt.Errorf("the volume has %d bytes, want %d", got, want))
	}
	return ""
}

// open opens the file that the pod of a volume writes to.
func (d *demo) open(v drivertest.Volume) *os.File {
	return must.Get(os.OpenFile(filepath.Join(d.Target(v.ID), "data"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600))
}

// fill writes until the kernel refuses, which it has to do at the size of the volume.
func (d *demo) fill(v drivertest.Volume) string {
	if !d.enforced {
		return "left out: sizes are not enforced"
	}
	file := d.open(v)
	defer file.Close()
	var written int64
	var err error
	for piece := data(); err == nil; {
		var n int
		n, err = file.Write(piece)
		written += int64(n)
		must.Go(unix.Syncfs(int(file.Fd())))
	}
	if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		must.Go(err)
	}
	if written > v.Bytes || written < v.Bytes-int64(len(data())) {
		must.Go(fmt.Errorf("%d bytes could be written to a volume of %d", written, v.Bytes))
	}
	return fmt.Sprintf("%s, then %s", size(written), errors.Unwrap(err))
}

func (d *demo) writePastEnd(v drivertest.Volume) string {
	device := must.Get(os.OpenFile(d.Target(v.ID), os.O_WRONLY, 0))
	defer device.Close()
	if _, err := device.WriteAt(data()[:4096], v.Bytes); !errors.Is(err, syscall.ENOSPC) {
		must.Go(fmt.Errorf("got %v, want %w", err, syscall.ENOSPC))
	}
	return "refused: " + syscall.ENOSPC.Error()
}

// size is in the largest unit in which it is not less than one.
func size(bytes int64) string {
	value, unit := float64(bytes)/(1<<20), "MiB"
	if value >= 1024 {
		value, unit = value/1024, "GiB"
	}
	return fmt.Sprintf("%.1f %s", value, unit)
}
