package clone

import (
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/internal/ioctl"
)

// The ctime of a subvolume that was renamed is forgotten with its inode (seen with Linux 6.18).
func TestCtimeOfSubvolumeShowsNoMove(t *testing.T) {
	p := &pass{notesMoves: true}
	if !p.showsMoves(&unix.Stat_t{Ino: 257}) || p.showsMoves(&unix.Stat_t{Ino: ioctl.SubvolumeRoot}) {
		t.Error("the ctime of a file shows that it was moved, and that of a subvolume does not")
	}
}
