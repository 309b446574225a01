package pool_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/label"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/strace"
)

// What one publication and its end may take of system calls. One is for the directory above the target's parent, with which
// the mount begins here: each more between the two takes one more. Their times differ from machine to machine, and are for
// make bench. These numbers do not. Before a call is added, see whether what it finds out is known.
const (
	callsToPublish   = 21
	callsToUnpublish = 20
)

// times is how often it is done: the shortest list of calls counts.
const times = 10

func TestSystemCallsOfPublication(t *testing.T) {
	testenv.NeedRoot(t)
	if root := strace.Traced(); root != "" {
		publishTraced(t, root)
		return
	}
	needNumberedMounts(t)
	root := testenv.LoopFS(t, "ext4", 64<<20)
	calls := strace.Calls(t, root)
	for phase, most := range map[string]int{"publish": callsToPublish, "unpublish": callsToUnpublish} {
		all, table := fewest(calls[phase])
		if len(calls[phase]) != times {
			t.Fatalf("%d times to %s were traced, want %d", len(calls[phase]), phase, times)
		}
		if n := len(all); n > most {
			t.Errorf("to %s takes %d system calls, at most %d are expected:\n%s", phase, n, most, strings.Join(all, "\n"))
		}
		if table {
			t.Errorf("to %s reads the mount table, which grows with the pods of the node:\n%s", phase, strings.Join(all, "\n"))
		}
	}
}

// Of a snapshot the calls are what it waits for, and what is asked of each device of the node. The limit of make bench makes
// the same: the copy, its directory, the record, and the two directories that they are put into are synced.
func TestSystemCallsOfDiskSnapshot(t *testing.T) {
	testenv.NeedRoot(t)
	if root := strace.Traced(); root != "" {
		snapshotTraced(t, root)
		return
	}
	lists := strace.Calls(t, testenv.LoopFS(t, "xfs", 512<<20))["snapshot"]
	if len(lists) != times {
		t.Fatalf("%d snapshots were traced, want %d", len(lists), times)
	}
	all, _ := fewest(lists)
	for what, c := range map[string]struct {
		call *regexp.Regexp
		most int
	}{
		"syncs":                 {regexp.MustCompile(`^(fsync|fdatasync|syncfs)\(`), 5},
		"shares blocks":         {regexp.MustCompile(`^ioctl\(.*FICLONE`), 1},
		"makes unnamed files":   {regexp.MustCompile(`O_TMPFILE`), 0},
		"lists all the devices": {regexp.MustCompile(`^openat2?\(.*"(/sys/block|block)"`), 2}, // is it used, and was it used meanwhile
	} {
		n := 0
		for _, call := range all {
			if c.call.MatchString(call) {
				n++
			}
		}
		if n > c.most {
			t.Errorf("a snapshot %s %d times, at most %d are expected:\n%s", what, n, c.most, strings.Join(all, "\n"))
		}
	}
}

// fewest is the shortest of some lists of calls: what a check of the pool does meanwhile is in others.
func fewest(lists [][]string) (calls []string, table bool) {
	for _, list := range lists {
		if calls == nil || len(list) < len(calls) {
			calls = list
		}
	}
	return calls, strings.Contains(strings.Join(calls, "\n"), "/mountinfo>")
}

// needNumberedMounts needs a kernel that says by which mount a directory is reached so that no other mount is meant by
// it. Without that the mount table is read.
func needNumberedMounts(t *testing.T) {
	t.Helper()
	const unique = 0x4000 // STATX_MNT_ID_UNIQUE
	var st unix.Statx_t
	must.Succeed(t, unix.Statx(unix.AT_FDCWD, "/", 0, unique, &st))
	if st.Mask&unique == 0 {
		testenv.Missing(t, "Linux 6.8")
	}
}

// publishTraced publishes a volume again and again.
func publishTraced(t *testing.T, root string) {
	must.Succeed(t, os.Mkdir(root+"/pods", 0o755))
	pools := servedByKernel(t, root+"/pool")
	id, err := volume.ParseID("pvc-traced")
	must.Succeed(t, err)
	_, err = pools.Create(t.Context(), pool.Request{ID: id, Range: volume.Range{Required: mib}})
	must.Succeed(t, err)
	target, err := bind.ParseTarget(root + "/pods/target")
	must.Succeed(t, err)
	for range times {
		strace.Mark("publish")
		must.Succeed(t, pools.Publish(t.Context(), pool.Publication{ID: id, Target: target}))
		strace.Mark("")
		strace.Mark("unpublish")
		must.Succeed(t, pools.Unpublish(t.Context(), id, target))
		strace.Mark("")
	}
	must.Succeed(t, pools.Delete(t.Context(), id))
}

// snapshotTraced makes snapshots of a block volume that is not published.
func snapshotTraced(t *testing.T, root string) {
	pools := servedByKernel(t, root+"/pool")
	source, err := volume.ParseID("pvc-traced")
	must.Succeed(t, err)
	_, err = pools.Create(t.Context(), pool.Request{ID: source, Mode: volume.ModeBlock, Range: volume.Range{Required: mib}})
	must.Succeed(t, err)
	for i := range times {
		id, err := volume.ParseSnapshot(fmt.Sprintf("cut-%d", i))
		must.Succeed(t, err)
		strace.Mark("snapshot")
		_, err = pools.Snapshot(t.Context(), pool.SnapshotRequest{ID: id, Source: source})
		strace.Mark("")
		must.Succeed(t, err)
	}
}

// servedByKernel serves a pool as the driver does.
func servedByKernel(t *testing.T, path string) *pool.Set {
	t.Helper()
	mounts, err := bind.NewKernel()
	must.Succeed(t, err)
	dev, err := dir.Open("/dev")
	must.Succeed(t, err)
	node, err := volume.ParseNodeID("node-1")
	must.Succeed(t, err)
	configs, err := poolconfig.Parse(`[{"name":"local","path":"`+path+`"}]`, "/")
	must.Succeed(t, err)
	pools := pool.Start(configs, pool.Options{
		Node: node, Mounts: mounts, Labels: label.Kernel{}, Devices: loop.NewKernel(dev), Dev: dev, Log: logr.Discard(),
	})
	t.Cleanup(func() {
		must.Succeed(t, errors.Join(pools.Close(context.WithoutCancel(t.Context())), mounts.Close(), dev.Close()))
	})
	must.Succeed(t, pools.Wait(t.Context()))
	return pools
}
