package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// modules are what the guest's kernel may load, with all that they depend on. A
// name that this kernel does not have any more is left out: newer ones have some
// built in.
var modules = []string{
	"virtio_pci", "virtio_blk", "virtio_console",
	"xfs", "ext4", "btrfs", "overlay", "fuse", "loop",
	"quota_v1", "quota_v2",
	"dm_mod", "dm_thin_pool", "dm_snapshot", "dm_flakey", "dm_multipath", "dm_round_robin",
	"nvme_tcp", "nvmet_tcp", "nfsd", "nfsv4",
	"raid1", "bcache", "null_blk", "scsi_debug", "sd_mod",
	"bridge", "veth",
	// What filesystems ask for by the name of an algorithm only.
	"crc32c_generic", "xxhash_generic", "blake2b_generic", "sha256_generic",
	"sha512_generic", "hmac", "aes_generic", "xts", "cts", "cbc", "ecb",
}

// A kernel is Debian's, unpacked.
type kernel struct {
	image string
	// modules is a directory that belongs at /lib/modules.
	modules string
}

// findKernel returns the kernel of a package from the cache. If it is not there it
// is fetched; that is not repeated when Debian has a newer one.
func findKernel(ctx context.Context, name string) (kernel, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return kernel{}, err
	}
	cache = filepath.Join(cache, "hostpath-kernel")
	dir := filepath.Join(cache, filepath.Base(name)+"-"+digest(strings.Join(modules, " ")))
	k := kernel{filepath.Join(dir, "vmlinuz"), filepath.Join(dir, "usr/lib/modules")}
	if _, err := os.Stat(dir); err == nil {
		return k, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return k, err
	}
	unlock, err := lock(ctx, filepath.Join(cache, "lock"))
	if err != nil {
		return k, err
	}
	defer unlock()
	if _, err := os.Stat(dir); err == nil {
		return k, nil
	}
	return k, makeKernel(ctx, name, filepath.Join(cache, "unfinished"), dir)
}

// lock waits until no other process holds the lock, or the context ends.
func lock(ctx context.Context, path string) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), file.Close())
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), file.Close())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// makeKernel fetches and unpacks a kernel in the directory unfinished, so that dir
// is there only when it is whole.
func makeKernel(ctx context.Context, name, unfinished, dir string) (err error) {
	// A run that was killed here has left it.
	if err := os.RemoveAll(unfinished); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(unfinished)) }()
	tree, result := filepath.Join(unfinished, "tree"), filepath.Join(unfinished, "result")
	if err := os.MkdirAll(result, 0o755); err != nil {
		return err
	}
	deb := name
	if filepath.Ext(name) != ".deb" {
		if deb, err = fetch(ctx, name, unfinished); err != nil {
			return err
		}
	}
	if _, err := output(ctx, "dpkg-deb", "--extract", deb, tree); err != nil {
		return err
	}
	if err := mergeUsr(tree); err != nil {
		return err
	}
	if err := takeKernel(ctx, tree, result); err != nil {
		return err
	}
	return os.Rename(result, dir)
}

// fetch downloads a package into a directory and returns its file. For one of the
// packages that only stand for the current kernel, it is that kernel's.
func fetch(ctx context.Context, name, dir string) (string, error) {
	downloaded, err := download(ctx, name, dir)
	if err != nil && os.Geteuid() == 0 && ctx.Err() == nil {
		// The lists are missing, or older than what the archive still has.
		if _, e := output(ctx, "apt-get", "--quiet", "update"); e != nil {
			fmt.Fprintln(os.Stderr, "kernel:", e)
		}
		downloaded, err = download(ctx, name, dir)
	}
	if err != nil {
		return "", fmt.Errorf("fetch the kernel: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil || len(files) != 1 {
		return "", fmt.Errorf("fetch the kernel: apt-get downloaded %v for %s", files, downloaded)
	}
	return files[0], nil
}

func download(ctx context.Context, name, dir string) (string, error) {
	depends, err := output(ctx, "apt-cache", "depends", "--important", name)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(depends) {
		if _, dependency, ok := strings.Cut(line, "Depends: linux-image-"); ok {
			name = "linux-image-" + strings.TrimSpace(dependency)
		}
	}
	fmt.Fprintln(os.Stderr, "kernel: fetching", name)
	// As root, apt would become a user who may not write here.
	cmd := command(ctx, "apt-get", "--quiet", "--option=APT::Sandbox::User=root", "download", name)
	cmd.Dir = dir
	_, err = outputOf(cmd)
	return name, err
}

// mergeUsr brings the trees of all releases into one form: the modules are in
// /usr/lib since Debian 13, and kmod searches where its own release has them.
func mergeUsr(tree string) error {
	lib, usr := filepath.Join(tree, "lib"), filepath.Join(tree, "usr")
	if err := os.MkdirAll(usr, 0o755); err != nil {
		return err
	}
	if _, err := os.Stat(lib); err == nil {
		if err := os.Rename(lib, filepath.Join(usr, "lib")); err != nil {
			return err
		}
	}
	return os.Symlink("usr/lib", lib)
}

// takeKernel puts the kernel's image and the wanted modules of a package's tree
// into the directory result.
func takeKernel(ctx context.Context, tree, result string) error {
	images, err := filepath.Glob(filepath.Join(tree, "boot/vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return fmt.Errorf("the package has %d kernels: %v", len(images), images)
	}
	version := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	fmt.Fprintln(os.Stderr, "kernel: unpacking Linux", version)
	if err := os.Rename(images[0], filepath.Join(result, "vmlinuz")); err != nil {
		return err
	}
	to := filepath.Join(result, "usr/lib/modules", version)
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	if err := os.Symlink("usr/lib", filepath.Join(result, "lib")); err != nil {
		return err
	}
	if _, err := output(ctx, "depmod", "-b", tree, version); err != nil {
		return err
	}
	for _, module := range modules {
		if err := takeModule(ctx, tree, version, module, to); err != nil {
			return err
		}
	}
	for _, list := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if err := os.Rename(filepath.Join(tree, "lib/modules", version, list), filepath.Join(to, list)); err != nil {
			return err
		}
	}
	_, err = output(ctx, "depmod", "-b", result, version)
	return err
}

// takeModule moves a module and what it depends on from a package's tree.
func takeModule(ctx context.Context, tree, version, module, to string) error {
	// A configuration of this machine must not change what the guest gets.
	needs, err := output(ctx, "modprobe", "-C", "/dev/null", "-d", tree, "-S", version, "--show-depends", module)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return nil
	}
	if err != nil {
		return err
	}
	for line := range strings.Lines(needs) {
		// "insmod /tree/lib/modules/6.1/kernel/fs/xfs/xfs.ko", or "builtin xfs".
		_, below, ok := strings.Cut(strings.TrimSpace(line), "/lib/modules/"+version+"/")
		if !ok {
			continue
		}
		target := filepath.Join(to, below)
		if _, err := os.Stat(strings.TrimSuffix(target, ".xz")); err == nil {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		// Not moved, for the next one may depend on it too.
		if err := os.Link(filepath.Join(tree, "lib/modules", version, below), target); err != nil {
			return err
		}
		// Busybox cannot load what is compressed.
		if filepath.Ext(target) == ".xz" {
			if _, err := output(ctx, "xz", "--decompress", "--force", target); err != nil {
				return err
			}
		}
	}
	return nil
}
