package main

import (
	"archive/tar"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// release is Debian's: the image has its programs, whatever this machine runs. osRelease says so in the image (os-release(5)): without
// it scanners for known vulnerabilities, and the SBOM, know the packages for none of a distribution. Debian's own file changes with each
// point release, whatever the packages are.
const (
	release     = "trixie"
	osRelease   = "etc/os-release"
	osReleaseIs = `NAME="Debian GNU/Linux"
PRETTY_NAME="Debian GNU/Linux 13 (trixie)"
ID=debian
VERSION_ID="13"
VERSION_CODENAME=` + release + "\n"
)

// machines are what the programs of an architecture are for, and tuples the directories of its libraries.
var (
	machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}
	tuples   = map[string]string{"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
)

// merged are the directories that Debian keeps below usr, with links where they were.
var merged = []string{"bin", "lib", "lib64", "sbin"}

// inUsr is a path, from the root and without a slash, as it is where those links lead to.
func inUsr(name string) string {
	name = strings.TrimPrefix(path.Clean(name), "/")
	if top, _, below := strings.Cut(name, "/"); below && slices.Contains(merged, top) {
		return path.Join("usr", name)
	}
	return name
}

// root makes the directory dir with what the image has besides the program, for an architecture. It is there only when
// it is whole. Nothing is executed of the packages, so the architecture need not be this machine's.
func (i image) root(ctx context.Context, program, arch, dir string) (err error) {
	if machines[arch] == 0 {
		return fmt.Errorf("unknown architecture %q", arch)
	}
	unfinished, err := os.MkdirTemp("", "image-root-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(unfinished)) }()
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	next := dir + ".new"
	if err := errors.Join(os.RemoveAll(next), os.Mkdir(next, 0o755)); err != nil {
		return err
	}
	if len(i.debian) > 0 {
		tree := filepath.Join(unfinished, "tree")
		if err := i.extract(ctx, arch, tree); err != nil {
			return err
		}
		r := root{arch: arch, tree: tree, to: next, taken: make(map[string]bool)}
		if err := r.fill(ctx, i.programs()); err != nil {
			return err
		}
	}
	for _, link := range i.links {
		at := filepath.Join(next, link)
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.Symlink("/"+program, at)); err != nil {
			return err
		}
	}
	return os.Rename(next, dir)
}

// above says whether a directory is there for a link.
func (i image) above(dir string) bool {
	return slices.ContainsFunc(i.links, func(link string) bool { return strings.HasPrefix(link, "/"+dir+"/") })
}

func (i image) programs() []string {
	var all []string
	for _, programs := range i.debian {
		all = append(all, programs...)
	}
	slices.Sort(all)
	return all
}

// extract unpacks the packages with all that they depend on, without running their scripts.
func (i image) extract(ctx context.Context, arch, tree string) error {
	var packages []string
	for name := range i.debian {
		packages = append(packages, name)
	}
	slices.Sort(packages)
	cmd := exec.CommandContext(ctx, "mmdebstrap", "--quiet", "--variant=extract", "--architectures="+arch,
		// The packages themselves, for what they say of their files.
		"--skip=cleanup", "--include="+strings.Join(packages, ","), release, tree)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("unpack %s for %s from Debian %s: %v", strings.Join(packages, " "), arch, release, err)
	}
	return nil
}

// A root takes programs out of a tree of Debian's.
type root struct {
	arch, tree, to string
	// taken are the files so far, by their real path in the tree.
	taken map[string]bool
}

func (r *root) fill(ctx context.Context, programs []string) error {
	if err := r.links(); err != nil {
		return err
	}
	for _, program := range programs {
		if err := r.take(program); err != nil {
			return err
		}
	}
	return r.describe(ctx)
}

// links has the tree and the image find in usr what programs search for in /lib and the like: the package that
// does so on a whole system is not among those that are unpacked.
func (r *root) links() error {
	for _, name := range merged {
		for _, base := range []string{r.tree, r.to} {
			if _, err := os.Stat(filepath.Join(r.tree, "usr", name)); err != nil {
				continue
			}
			err := os.Symlink(path.Join("usr", name), filepath.Join(base, name))
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		}
	}
	return nil
}

// take copies a program or library, and all that it loads.
func (r *root) take(name string) error {
	resolved, err := r.resolve(name)
	if err != nil {
		return err
	}
	if err := r.link(name, resolved); err != nil || r.taken[resolved] {
		return err
	}
	r.taken[resolved] = true
	content, err := os.ReadFile(filepath.Join(r.tree, resolved))
	if err != nil {
		return err
	}
	if err := r.write(resolved, content, 0o755); err != nil {
		return err
	}
	file, err := elf.Open(filepath.Join(r.tree, resolved))
	if err != nil {
		return fmt.Errorf("%s: %v", name, err)
	}
	defer func() { _ = file.Close() }()
	needs, err := needs(file, machines[r.arch])
	if err != nil {
		return fmt.Errorf("%s: %v", name, err)
	}
	for _, need := range needs {
		found, err := r.library(need)
		if err != nil {
			return fmt.Errorf("%s: %v", name, err)
		}
		if err := r.take(found); err != nil {
			return err
		}
	}
	return nil
}

// needs are the libraries that a program or library loads: names, and the path of its loader.
func needs(file *elf.File, machine elf.Machine) ([]string, error) {
	if file.Machine != machine {
		return nil, fmt.Errorf("it is for %v", file.Machine)
	}
	for _, tag := range []elf.DynTag{elf.DT_RPATH, elf.DT_RUNPATH} {
		if at, err := file.DynString(tag); err == nil && len(at) > 0 {
			return nil, fmt.Errorf("it searches for libraries in %s, where this tool does not", at)
		}
	}
	found, err := file.ImportedLibraries()
	if err != nil {
		return nil, err
	}
	for _, p := range file.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		loader, err := io.ReadAll(p.Open())
		if err != nil {
			return nil, err
		}
		found = append(found, strings.TrimRight(string(loader), "\x00"))
	}
	return found, nil
}

// library is the path of a library in the tree, where Debian's loader searches for it.
func (r *root) library(name string) (string, error) {
	if path.IsAbs(name) {
		return name, nil
	}
	for _, dir := range []string{"/usr/lib/" + tuples[r.arch], "/usr/lib"} {
		if _, err := r.resolve(path.Join(dir, name)); err == nil {
			return path.Join(dir, name), nil
		}
	}
	return "", fmt.Errorf("the library %s is in none of the packages", name)
}

// resolve follows the links of a path inside the tree, and answers the path below the tree.
func (r *root) resolve(name string) (string, error) {
	inside, err := os.OpenRoot(r.tree)
	if err != nil {
		return "", err
	}
	defer func() { _ = inside.Close() }()
	at := inUsr(name)
	for range 16 {
		info, err := inside.Lstat(at)
		if err != nil {
			return "", err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			return at, nil
		}
		target, err := inside.Readlink(at)
		if err != nil {
			return "", err
		}
		if !path.IsAbs(target) {
			target = path.Join("/", path.Dir(at), target)
		}
		at = inUsr(target)
	}
	return "", fmt.Errorf("%s: too many links", name)
}

// link has a file of the image found under the name by which it is loaded.
func (r *root) link(name, resolved string) error {
	loaded := inUsr(name)
	if loaded == resolved {
		return nil
	}
	target, err := filepath.Rel(filepath.Dir(loaded), resolved)
	if err != nil {
		return err
	}
	at := filepath.Join(r.to, loaded)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if err := os.Symlink(target, at); !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil // two programs load it
}

func (r *root) write(name string, content []byte, mode fs.FileMode) error {
	at := filepath.Join(r.to, name)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(at, content, mode), os.Chmod(at, mode))
}

// describe adds the control files of the packages that files came from, where scanners for known vulnerabilities
// search for them in an image without dpkg, their licenses, and of which distribution they are.
func (r *root) describe(ctx context.Context) error {
	packages, err := filepath.Glob(filepath.Join(r.tree, "var/cache/apt/archives/*.deb"))
	if err != nil {
		return err
	}
	owned := make(map[string]bool)
	for _, deb := range packages {
		name, _, _ := strings.Cut(filepath.Base(deb), "_")
		files, err := r.owns(ctx, deb)
		if err != nil {
			return fmt.Errorf("%s: %v", filepath.Base(deb), err)
		}
		if len(files) == 0 {
			continue
		}
		for _, file := range files {
			owned[file] = true
		}
		control, err := exec.CommandContext(ctx, "dpkg-deb", "--field", deb).Output()
		if err != nil {
			return fmt.Errorf("%s: %v", filepath.Base(deb), err)
		}
		if err := r.write("var/lib/dpkg/status.d/"+name, control, 0o644); err != nil {
			return err
		}
		license, err := r.license(name)
		if err != nil {
			return err
		}
		if err := r.write("usr/share/doc/"+name+"/copyright", license, 0o644); err != nil {
			return err
		}
	}
	for file := range r.taken {
		if !owned[file] {
			return fmt.Errorf("%s is in none of the packages", file)
		}
	}
	return r.write(osRelease, []byte(osReleaseIs), 0o644)
}

// license is the copyright file of a package, whose directory may be a link to that of another.
func (r *root) license(name string) ([]byte, error) {
	dir, err := r.resolve("usr/share/doc/" + name)
	if err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(r.tree, dir, "copyright"))
}

// owns are the taken files that a package has.
func (r *root) owns(ctx context.Context, deb string) (files []string, err error) {
	cmd := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	defer func() {
		_, e := io.Copy(io.Discard, pipe)
		err = errors.Join(err, e, cmd.Wait())
	}()
	for t := tar.NewReader(pipe); ; {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if name := inUsr(header.Name); r.taken[name] {
			files = append(files, name)
		}
	}
}
