package cpio

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// list has cpio(1) say what is in an archive.
func list(t *testing.T, archive io.Reader) string {
	t.Helper()
	testenv.NeedPrograms(t, "cpio")
	cmd := exec.CommandContext(t.Context(), "cpio", "--list", "--verbose", "--numeric-uid-gid", "--quiet")
	cmd.Stdin = archive
	// The time of an entry is the epoch, shown in local time.
	cmd.Env = append(os.Environ(), "TZ=UTC", "LC_ALL=C")
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("cpio: %v\n%s", err, output)
	}
	lines := strings.Split(string(output), "\n")
	for i, line := range lines {
		lines[i] = strings.Join(strings.Fields(strings.Replace(line, "Jan  1  1970", "", 1)), " ")
	}
	return strings.Join(lines, "\n")
}

func TestArchiveRoundTrip(t *testing.T) {
	source := t.TempDir()
	if err := os.WriteFile(filepath.Join(source, "program"), []byte("12345"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("program", filepath.Join(source, "link")); err != nil {
		t.Fatal(err)
	}

	var archive bytes.Buffer
	w := NewWriter(&archive)
	for _, err := range []error{
		w.Text("/etc/deep/name", "text"),
		w.Directory("/etc"),
		w.CharDevice("/dev/null", 1, 3),
		w.Symlink("/bin/sh", "dash"),
		w.Copy("/data", source),
		w.Copy("/followed", filepath.Join(source, "link")),
		w.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	want := `drwxr-xr-x 1 0 0 0 etc
drwxr-xr-x 1 0 0 0 etc/deep
-rw-r--r-- 1 0 0 4 etc/deep/name
drwxr-xr-x 1 0 0 0 dev
crw-rw-rw- 1 0 0 1, 3 dev/null
drwxr-xr-x 1 0 0 0 bin
lrwxrwxrwx 1 0 0 4 bin/sh -> dash
drwxr-xr-x 1 0 0 0 data
lrwxrwxrwx 1 0 0 7 data/link -> program
-rwx------ 1 0 0 5 data/program
-rwx------ 1 0 0 5 followed
`
	if got := list(t, &archive); got != want {
		t.Errorf("the archive has\n%s\nwant\n%s", got, want)
	}
}

func TestInvalidFilesAreRefused(t *testing.T) {
	w := NewWriter(io.Discard)
	if err := w.File("/short", 0o644, 5, strings.NewReader("1234")); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a file that shrank: %v", err)
	}
	if err := w.File("/long", 0o644, 1<<32, strings.NewReader("")); err == nil {
		t.Error("a file of 4 GiB was written, which the format cannot hold")
	}
	if err := w.Text("relative", ""); err == nil {
		t.Error("a relative path was written")
	}
	if err := w.Copy("/null", "/dev/null"); err == nil {
		t.Error("a device was copied")
	}
}
