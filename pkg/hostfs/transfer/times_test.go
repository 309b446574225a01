package transfer_test

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// What the target's filesystem cannot have is found while pods go on, and not by the comparison after their end.
func TestTimeThatTheTargetCannotHave(t *testing.T) {
	src, dst := testenv.LoopFS(t, "btrfs", 256*mib), testenv.LoopFS(t, "ext4", 64*mib)
	write(t, filepath.Join(src, "file"), "content")
	at := unix.Timespec{Sec: time.Date(2500, 1, 1, 0, 0, 0, 0, time.UTC).Unix()} // os.Chtimes has none after 2262
	must.Succeed(t, unix.UtimesNanoAt(unix.AT_FDCWD, filepath.Join(src, "file"), []unix.Timespec{at, at}, 0))
	_, err := connect(t, dst, transfer.Options{}).Pass(t.Context(), open(t, src), transfer.Pass{})
	if err == nil || !strings.Contains(err.Error(), "no mtime of 2500") {
		t.Errorf("the error is %v", err)
	}
}
