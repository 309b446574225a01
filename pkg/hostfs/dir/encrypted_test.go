package dir_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/fulldisk"
)

// A user who owns the root of a volume can encrypt it, and take the key away again. Without it nothing can be renamed.
func TestRemoveTree_deepWithoutKey(t *testing.T) {
	for name, paths := range map[string][]string{
		"one above the other":              {strings.Repeat("/d", 400)},
		"side by side, and far above that": {low + "/a" + strings.Repeat("/d", 150), low + "/b" + strings.Repeat("/d", 150), low + "/c"},
	} {
		t.Run(name, func(t *testing.T) {
			root := open(t, testenv.MadeFS(t, "ext4", 64<<20, "-O", "encrypt"))
			volume := filepath.Join(root.String(), "volume")
			must.Succeed(t, os.Remove(filepath.Join(root.String(), "lost+found")), os.Mkdir(volume, 0o777))
			takeKey := testenv.Encrypt(t, volume)
			for _, path := range paths {
				makeDeep(t, volume+path)
			}
			takeKey()
			wantRemoved(t, root)
		})
	}
}

// A privileged user can make files immutable besides, which cannot be opened then. Since Linux 6.17 flags can be taken off all the same.
func TestRemoveTree_protectedWithoutKey(t *testing.T) {
	testenv.NeedPrograms(t, "chattr")
	root := open(t, testenv.MadeFS(t, "ext4", 64<<20, "-O", "encrypt"))
	volume := filepath.Join(root.String(), "volume")
	must.Succeed(t, os.Remove(filepath.Join(root.String(), "lost+found")), os.Mkdir(volume, 0o777))
	takeKey := testenv.Encrypt(t, volume)
	makeDeep(t, volume+"/d")
	chattr(t, "+ia", volume+"/d/0", volume+"/d")
	takeKey()
	if _, _, errno := unix.Syscall6(unix.SYS_FILE_GETATTR, 0, 0, 0, 0, 0, 0); errno == unix.ENOSYS {
		must.ErrorIs(t, dir.RemoveTree(t.Context(), root, "volume", noPause), unix.ENOKEY)
		return
	}
	wantRemoved(t, root)
}

// low is deeper than the directories that are removed without moving them.
var low = strings.Repeat("/d", 70)

// On btrfs a rename takes space, and a removal none.
func TestRemoveTree_deepOnFullDisk(t *testing.T) {
	root := open(t, testenv.MadeFS(t, "btrfs", 256<<20, "-m", "single"))
	foreign := filepath.Join(root.String(), "foreign")
	must.Succeed(t, os.Mkdir(foreign, 0o700))
	makeDeep(t, filepath.Join(root.String(), "volume")+low+low)
	fulldisk.Fill(t, foreign, fulldisk.Shortage{Bytes: true})
	must.Succeed(t, dir.RemoveTree(t.Context(), root, "volume", noPause))
}

// makeDeep makes directories, and a file in the deepest. No handle stays open.
func makeDeep(t *testing.T, path string) {
	t.Helper()
	must.Succeed(t, os.MkdirAll(path, 0o755))
	for i := range 3 {
		must.Succeed(t, os.WriteFile(filepath.Join(path, fmt.Sprint(i)), []byte("content"), 0o600))
	}
}
