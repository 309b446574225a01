// Command image makes and checks the container images of the programs.
//
//	image root PROGRAM ARCH DIR   put what the program's image takes from Debian, and links to it, into a new directory
//	image check PROGRAM ARCHIVE   check that an archive (oci-archive) holds what it should and nothing else
//
// An image holds the program, which is static, and the programs that it executes, each taken out of Debian's
// package with the shared libraries it needs. There is no shell and no package manager in it.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
)

// An image is what an image holds besides its program.
type image struct {
	// debian are paths of programs in Debian's packages, by package. Their libraries follow.
	debian map[string][]string
	// links are other names of the program.
	links []string
	// user is the one it runs as, root if empty.
	user string
	// mostBytes is what its files may have together, for any architecture: some tenth more than they have.
	mostBytes int64
}

const mb = 1_000_000

// images are all of them, by program; the Dockerfile has a stage for each.
var images = map[string]image{
	"hostpath-csi-driver": {mostBytes: 18 * mb},
	"hostpath-provisioner-operator": {
		mostBytes: 37 * mb, user: "65534:65534",
		// KubeVirt's operators run it by these, the first one as a command in PATH.
		links: []string{"/usr/bin/hostpath-provisioner-operator", "/usr/bin/csv-generator"},
	},
	"local-pv-provisioner": {mostBytes: 40 * mb, debian: map[string][]string{"util-linux": {"/usr/sbin/wipefs"}}},
	"hostpath-provisioner": {mostBytes: 38 * mb},
	"pool-mounter": {mostBytes: 14 * mb, debian: map[string][]string{
		"btrfs-progs": {"/usr/bin/btrfs", "/usr/sbin/mkfs.btrfs"},
		// mke2fs and e2fsck are what the other two names lead to.
		"e2fsprogs":  {"/usr/sbin/e2fsck", "/usr/sbin/fsck.ext4", "/usr/sbin/mke2fs", "/usr/sbin/mkfs.ext4", "/usr/sbin/resize2fs"},
		"util-linux": {"/usr/sbin/blkid", "/usr/sbin/blockdev", "/usr/sbin/fsck"},
		"xfsprogs":   {"/usr/sbin/mkfs.xfs", "/usr/sbin/xfs_growfs"},
	}},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) < 3 {
		return fmt.Errorf("usage: image root PROGRAM ARCH DIR, or image check PROGRAM ARCHIVE")
	}
	i, ok := images[args[1]]
	if !ok {
		return fmt.Errorf("unknown program %q: add it to test/cmd/image/main.go and to the Dockerfile", args[1])
	}
	switch {
	case args[0] == "root" && len(args) == 4:
		return i.root(ctx, args[1], args[2], filepath.Clean(args[3]))
	case args[0] == "check" && len(args) == 3:
		found, err := check(args[2], args[1], i)
		if err != nil {
			return fmt.Errorf("%s: %v", args[2], err)
		}
		fmt.Printf("%s holds %s and what it needs, for %s\n", args[2], args[1], strings.Join(found, ", "))
		return nil
	}
	return fmt.Errorf("unknown command %q", strings.Join(args, " "))
}
