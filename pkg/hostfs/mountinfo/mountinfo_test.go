package mountinfo_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/mountinfo"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestRead(t *testing.T) {
	table, err := mountinfo.Read(strings.NewReader(strings.Join([]string{
		`21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw,errors=continue`,
		`45 21 0:28 / /mnt/a\040b\134c\011\012\043 ro,nosuid shared:7 master:3 - nfs4 127.0.0.1:/a\040pool rw,vers=4.2,note=a - b`,
		`46 21 0:4 net:[4026531840] /run/netns/x rw - nsfs  rw`, // without a source
		`47 21 8:1 /volumes/pvc-a//deleted /x rw - ext4 /dev/root rw`,
		`48 21 8:1 /a\04 /\377\400\08 rw - ext4 /dev/root rw`, // not of the kernel's
		"",
	}, "\n")))
	must.Succeed(t, err)
	want := mountinfo.Table{
		{ID: 21, Parent: 1, Major: 8, Minor: 1, Root: "/", Mountpoint: "/", Options: "rw,relatime", Optional: "shared:1", Type: "ext4", Source: "/dev/root"},
		{ID: 45, Parent: 21, Minor: 28, Root: "/a pool", Mountpoint: "/mnt/a b\\c\t\n#", Options: "ro,nosuid", Optional: "shared:7 master:3", Type: "nfs4", Source: "127.0.0.1:/a pool"},
		{ID: 46, Parent: 21, Minor: 4, Root: "net:[4026531840]", Mountpoint: "/run/netns/x", Options: "rw", Type: "nsfs"},
		{ID: 47, Parent: 21, Major: 8, Minor: 1, Root: "/volumes/pvc-a//deleted", Mountpoint: "/x", Options: "rw", Type: "ext4", Source: "/dev/root"},
		{ID: 48, Parent: 21, Major: 8, Minor: 1, Root: `/a\04`, Mountpoint: "/\xff\\400\\08", Options: "rw", Type: "ext4", Source: "/dev/root"},
	}
	if diff := cmp.Diff(want, table); diff != "" {
		t.Error(diff)
	}
	if m := table.ByID(46); m != table[2] || table.ByID(47+1<<32) != nil {
		t.Errorf("by its number: %+v", m)
	}
}

func TestRead_notATable(t *testing.T) {
	const line = "1 2 8:1 / /a rw shared:1 - ext4 source rw\n"
	for _, text := range []string{
		"\n", "x 2 8:1 / /a rw - ext4 source rw\n", "1 2 8 / /a rw - ext4 source rw\n", "1 2 8:1 / /a\n" + line,
		"1 2 8:1 / /a rw ext4 source rw\n" + line, line + line[:len(line)-1],
	} {
		if table, err := mountinfo.Read(strings.NewReader(text)); err == nil {
			t.Errorf("%q is read as %+v", text, *table[0])
		}
	}
	broken := errors.New("broken")
	_, err := mountinfo.Read(io.MultiReader(strings.NewReader(line), failing{broken}))
	must.ErrorIs(t, err, broken)
}

type failing struct{ error }

func (f failing) Read([]byte) (int, error) { return 0, f.error }

// What a pod can do to the line of its own mount: 60,000 directories, of which each has 255 newlines as its name.
func TestRead_longLineInBoundedMemory(t *testing.T) {
	name := "/" + strings.Repeat(`\012`, 255)
	const before, after = "30 1 8:1 / /other rw - ext4 /dev/root rw\n31 1 8:1 /pool/pvc-a/deep", " /sub rw shared:5 - ext4 /dev/root rw\n32 1 8:1 / /last rw - ext4 /dev/root rw\n"
	parts := []io.Reader{strings.NewReader(before)}
	for range 60_000 {
		parts = append(parts, strings.NewReader(name))
	}
	parts = append(parts, strings.NewReader(after))
	var start, end runtime.MemStats
	runtime.ReadMemStats(&start)
	table, err := mountinfo.Read(io.MultiReader(parts...))
	runtime.ReadMemStats(&end)
	must.Succeed(t, err)
	if len(table) != 3 || table.ByID(32) == nil {
		t.Fatalf("read %d lines, want 3", len(table))
	}
	m := table[1]
	if whole, found := strings.CutPrefix(m.Root, "/pool/pvc-a/deep"); !m.Cut || !found || strings.Trim(whole, "/\n") != "" || len(m.Root) < 4096+255 || len(whole)%256 != 0 {
		t.Errorf("cut %t, %d bytes that begin with %.20q", m.Cut, len(m.Root), m.Root)
	}
	if m.Mountpoint != "/sub" || m.Optional != "shared:5" || m.Type != "ext4" || m.Source != "/dev/root" || m.Major != 8 {
		t.Errorf("what is not its root: %.20q on %s of %s, %s, %d", m.Mountpoint, m.Source, m.Type, m.Optional, m.Major)
	}
	if bytes := end.TotalAlloc - start.TotalAlloc; bytes > 1<<20 {
		t.Errorf("reading took %d bytes of memory", bytes)
	}
}

func TestOwn(t *testing.T) {
	table, err := mountinfo.Own()
	must.Succeed(t, err)
	text, err := os.ReadFile(mountinfo.Path)
	must.Succeed(t, err)
	if lines := strings.Count(string(text), "\n"); len(table) != lines {
		t.Errorf("%d mounts, want one of each of the %d lines", len(table), lines)
	}
}

// What is read is the same when it is written and read again.
func FuzzRead(f *testing.F) {
	f.Add("45 21 0:28 / /mnt/a\\040b ro,nosuid shared:7 master:3 - nfs4 127.0.0.1:/pool rw\n")
	escape := strings.NewReplacer(" ", `\040`, "\n", `\012`, "\t", `\011`, `\`, `\134`).Replace
	f.Fuzz(func(t *testing.T, text string) {
		table, err := mountinfo.Read(strings.NewReader(text))
		if err != nil {
			return
		}
		var again strings.Builder
		for _, m := range table {
			if m.Optional != "" {
				m.Optional += " "
			}
			_, _ = fmt.Fprintf(&again, "%d %d %d:%d %s %s %s %s- %s %s rw\n", m.ID, m.Parent, m.Major, m.Minor,
				escape(m.Root), escape(m.Mountpoint), m.Options, m.Optional, escape(m.Type), escape(m.Source))
			m.Optional = strings.TrimSuffix(m.Optional, " ")
		}
		read, err := mountinfo.Read(strings.NewReader(again.String()))
		if diff := cmp.Diff(table, read); err != nil || diff != "" {
			t.Errorf("%v\n%s", err, diff)
		}
	})
}
