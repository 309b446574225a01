package errorcount_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/errorcount"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/rotten"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const mib = 1 << 20

// wantCount waits until at least that many errors are counted: ext4 counts in a worker thread.
func wantCount(t *testing.T, path string, want int64) {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for {
		got, err := errorcount.Of(d)
		must.Succeed(t, err)
		if got >= want {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("%d errors counted, want %d", got, want)
		}
	}
}

// wantNone fails the test if errors are counted.
func wantNone(t *testing.T, path string) {
	t.Helper()
	d, err := dir.Open(path)
	must.Succeed(t, err)
	defer func() { must.Succeed(t, d.Close()) }()
	if got, err := errorcount.Of(d); got != 0 || err != nil {
		t.Errorf("%d errors counted (%v), want none", got, err)
	}
}

// The kernel has a trigger for test errors.
func TestExt4(t *testing.T) {
	fs := testenv.LoopFS(t, "ext4", 64*mib)
	wantNone(t, fs)
	var st unix.Stat_t
	must.Succeed(t, unix.Stat(fs, &st))
	device, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	must.Succeed(t, err)
	for want := int64(1); want <= 3; want++ {
		must.Succeed(t, os.WriteFile(filepath.Join("/sys/fs/ext4", filepath.Base(device), "trigger_fs_error"), []byte("test"), 0o200))
		wantCount(t, fs, want)
	}
	must.Succeed(t, os.Mkdir(filepath.Join(fs, "below"), 0o755))
	wantCount(t, filepath.Join(fs, "below"), 3)
}

func TestCorruption(t *testing.T) {
	for _, kind := range rotten.Kinds() {
		t.Run(kind, func(t *testing.T) {
			r := rotten.New(t, kind)
			wantNone(t, r.Path)
			r.Touch(t)
			wantCount(t, r.Path, 1)
		})
	}
}

func TestUnsupportedFilesystems(t *testing.T) {
	for name, path := range map[string]string{"tmpfs": testenv.Tmpfs(t, mib), "xfs": testenv.LoopFS(t, "xfs", 300*mib)} {
		t.Run(name, func(t *testing.T) {
			d, err := dir.Open(path)
			must.Succeed(t, err)
			defer func() { must.Succeed(t, d.Close()) }()
			if _, err := errorcount.Of(d); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("error %v, want ErrUnsupported", err)
			}
		})
	}
}
