package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/loopfs"
)

// patient is what callers wait for calls on a pool that hangs. Sidecars wait longer.
const patient = 3 * time.Second

// A disk that does not answer holds the calls on its pool, and no other.
func TestHangingDisk(t *testing.T) {
	unlessShort(t)
	driver := drivertest.Built(t)
	// On XFS and ext4, where the check asks the disk itself: see dir.AskDisk.
	for _, fs := range filesystems()[:2] {
		t.Run(fs.kind, func(t *testing.T) { testADiskThatHangs(t, driver, fs) })
	}
}

func testADiskThatHangs(t *testing.T, driver string, fs filesystem) {
	m, d := newFaultyMount(t, fs)
	h := newHarness(t, driver, m)
	others := h.others()
	h.Process.Hanging()
	d.Hang()
	hanging := h.begin(late)
	d.AwaitHanging()
	// At once, before the driver can have noticed.
	for _, v := range others {
		h.inTime("unpublish in another pool", func() error { return h.Unpublish(h.Context(), v.ID, v.ID) })
	}
	h.wantAlive("hanging")
	h.WantCode("create in a pool that hangs", <-hanging, codes.DeadlineExceeded)
	// The call goes on, and so does its lock.
	h.WantCode("the same call again", h.create(late), codes.Aborted)
	h.wantNoticed()
	d.Heal()
	h.awaitServing(true)
	h.Must(drivertest.Repeat(h.Context(), func() error { return h.create(late) })) // once the call that hung has ended
	for _, v := range others {
		h.Must(h.Delete(h.Context(), v.ID))
	}
	h.end()
}

// A call that is past the opening of its pool keeps its volume until the disk answers. What
// kubelet tries again meanwhile gets that answer at once, before the driver can have noticed and
// after.
func TestRetriesOnHangingDisk(t *testing.T) {
	unlessShort(t)
	driver := drivertest.Built(t)
	m, d := newFaultyMount(t, filesystems()[0])
	h := newHarness(t, driver, m)
	h.Process.Hanging()
	d.Hang()
	hanging := h.inBackground(func(ctx context.Context) error {
		v := tree
		v.Bytes = grown
		_, err := h.Expand(ctx, v, v.ID)
		return err
	})
	d.AwaitHanging()
	h.wantBusy("hanging", tree)
	h.WantCode("expand in a pool that hangs", <-hanging, codes.DeadlineExceeded)
	h.wantBusy("given up by its caller", tree)
	h.awaitServing(false)
	h.wantBusy("noticed", tree)
	d.Heal()
	h.awaitServing(true)
	h.Must(drivertest.Repeat(h.Context(), func() error { return h.expand(tree) })) // once the call that hung has ended
	h.end()
}

// wantBusy expects all calls on a volume to fail at once because another is at work on it.
func (h *harness) wantBusy(when string, v drivertest.Volume) {
	h.Helper()
	for name, call := range map[string]func(drivertest.Volume) error{
		"create": h.create, "publish": h.publish, "expand": h.expand, "unpublish": h.unpublish, "delete": h.delete,
	} {
		began := time.Now()
		err := call(v)
		h.WantCode(when+": "+name, err, codes.Aborted)
		if took := time.Since(began); took > patient || !strings.Contains(status.Convert(err).Message(), "another call is in progress") {
			h.Errorf("%s: %s: %v after %v, want the error for the other call within %v", when, name, err, took, patient)
		}
	}
}

// wantNoticed expects the driver to notice by itself that the pool hangs, and to answer
// calls on it at once from then on.
func (h *harness) wantNoticed() {
	h.Helper()
	h.awaitServing(false)
	h.wantAlive("noticed")
	h.wantListed("noticed", all)
	for _, c := range calls {
		want, ok := away[c.name]
		if !ok || c.name == "create" {
			continue // that of the volume which hangs
		}
		h.wantAnswer("noticed", c, want)
	}
}

// A driver that is asked to end does so while a pool hangs: it accepts no new calls, and is
// gone as soon as the kernel lets it go.
func TestStopWithHangingDisk(t *testing.T) {
	unlessShort(t)
	driver := drivertest.Built(t)
	m, d := newFaultyMount(t, filesystems()[0])
	h := newHarness(t, driver, m)
	h.Process.Hanging()
	d.Hang()
	hanging := h.begin(late)
	d.AwaitHanging()
	h.WantCode("create in a pool that hangs", <-hanging, codes.DeadlineExceeded)
	ended := make(chan error, 1)
	go func() { ended <- h.Process.Stop() }()
	h.Eventually("the socket to be closed", func() bool {
		conn, err := net.Dial("unix", strings.TrimPrefix(h.Process.Endpoint(), "unix://"))
		if err == nil {
			err = conn.Close()
			h.Must(err)
			return false
		}
		return true
	})
	h.Eventually("the driver has given up what hangs", func() bool { return strings.Contains(h.Process.Log(), "are abandoned") })
	// A process that waits for a disk cannot be ended by anybody, and by nothing but that.
	d.Heal()
	h.Must(<-ended)
	h.Must(h.Process.Restart(h.Context()))
	h.AwaitServing()
	h.Must(h.create(late))
	h.end()
}

// A filesystem that answers nothing at all, not even what is read from memory elsewhere,
// holds only its own pool: not before that was noticed, and not the driver's end.
func TestHangingFilesystem(t *testing.T) {
	if testenv.Guest() {
		unlessShort(t) // what hangs is of no kind: the host has it
	}
	driver := drivertest.Built(t)
	m := newMount(t, filesystems()[0])
	h := newHarness(t, driver, m)
	hanging := filepath.Join(t.TempDir(), "hanging")
	testenv.Hang(t, hanging)
	others := h.others()
	h.Process.Hanging()
	h.Must(unix.Mount(hanging, m.at, "", unix.MS_BIND, ""))
	for _, v := range others {
		h.inTime("unpublish in another pool", func() error { return h.Unpublish(h.Context(), v.ID, v.ID) })
	}
	h.wantAlive("hanging")
	for _, c := range calls {
		h.wantAnswer("hanging", c, away[c.name])
	}
	h.awaitServing(false)
	h.wantListed("noticed", all)
	h.wantAlive("noticed")
	for _, v := range others {
		h.Must(h.Delete(h.Context(), v.ID))
	}

	began := time.Now()
	h.Must(h.Process.Stop()) // within what Kubernetes allows
	t.Logf("it ended within %v", time.Since(began).Round(time.Millisecond))
	h.Must(loopfs.Unmount(m.at))
	h.Must(h.Process.Restart(h.Context()))
	h.end()
}

// begin begins to make a volume, and returns the answer that a caller gets who waits.
func (h *harness) begin(v drivertest.Volume) <-chan error {
	return h.inBackground(func(ctx context.Context) error {
		_, err := h.Create(ctx, v)
		return err
	})
}

// inBackground makes a call, and returns the answer that a caller gets who waits.
func (h *harness) inBackground(call func(context.Context) error) <-chan error {
	reported := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(h.Context(), patient)
		defer cancel()
		reported <- call(ctx)
	}()
	return reported
}

// others are published volumes of the other pool.
func (h *harness) others() []drivertest.Volume {
	h.Helper()
	volumes := []drivertest.Volume{
		{ID: "pvc-beside", Pool: "other", Bytes: small},
		{ID: "pvc-beside-disk", Pool: "other", Bytes: small, Block: true},
	}
	for _, v := range volumes {
		_, err := h.Create(h.Context(), v)
		h.Must(err)
		h.Must(h.Publish(h.Context(), v, v.ID))
	}
	return volumes
}

// inTime expects a call to succeed within the bound.
func (h *harness) inTime(what string, call func() error) {
	h.Helper()
	began := time.Now()
	err := call()
	took := time.Since(began)
	if err != nil || took > bound() {
		h.Errorf("%s: %v after %v, want success within %v", what, err, took, bound())
	}
	h.Logf("%s took %v", what, took.Round(time.Millisecond))
}

// Comparing snapshots ends although what it reads does not come. All but the content of the file
// is in memory, so that it is the comparison that hangs.
func TestCompareOnHangingDisk(t *testing.T) {
	unlessShort(t)
	program := drivertest.Built(t)
	m, d := newFaultyMount(t, filesystems()[1])
	pools := []drivertest.PoolConfig{{Name: "local", Path: filepath.Join(m.at, "pool")}}
	driver := drivertest.Start(t, drivertest.Config{Binary: program, Pools: pools})
	_, err := driver.Create(t.Context(), drivertest.Volume{ID: "pvc-1", Pool: "local", Bytes: 16 * mib})
	driver.Must(err)
	file := filepath.Join(pools[0].Path, "pvc-1", "file")
	driver.Must(os.WriteFile(file, bytes.Repeat([]byte{1}, mib), 0o644))
	_, err = driver.Snapshot(t.Context(), "monday", "pvc-1", "")
	driver.Must(err)
	compare := func() (output string, exit int) {
		datadir, err := json.Marshal(pools)
		driver.Must(err)
		cmd := exec.CommandContext(t.Context(), program, "inspect", "--diff", "monday", "--datadir", string(datadir))
		out, err := cmd.CombinedOutput()
		if cmd.ProcessState == nil {
			driver.Must(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	if output, exit := compare(); exit != 0 || output != "" {
		t.Fatalf("before it hangs comparing ends with %d, and prints %q", exit, output)
	}
	f, err := os.Open(file)
	driver.Must(err)
	driver.Must(errors.Join(f.Sync(), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED), f.Close()))
	d.Hang()
	if output, exit := compare(); exit != 1 || !strings.Contains(output, `pool "local": no answer for 5s`) {
		t.Errorf("comparing ends with %d, and prints %q", exit, output)
	}
	d.AwaitHanging()
	d.Heal()
}
