package disk

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// zeros is a disk without content, open.
func zeros(t *testing.T) (*Disk, *os.File) {
	t.Helper()
	testenv.NeedRoot(t)
	file := filepath.Join(t.TempDir(), "zeros")
	must.Succeed(t, os.WriteFile(file, nil, 0o600))
	must.Succeed(t, os.Truncate(file, 16*unit))
	d := New(t, file, t.TempDir())
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, f.Close()) })
	return d, f
}

func page(c byte) []byte { return bytes.Repeat([]byte{c}, unit) }

func wantPage(t *testing.T, what string, got []byte, want byte) {
	t.Helper()
	if !bytes.Equal(got, page(want)) {
		t.Errorf("%s begins with %q, want %q everywhere", what, got[:8], want)
	}
}

func TestPowerLossKeepsFlushedWrites(t *testing.T) {
	d, f := zeros(t)
	flushes := 0
	d.OnFlush(func(Image) { flushes++ })
	_, err := f.WriteAt(page('a'), 0)
	must.Succeed(t, err)
	must.Succeed(t, f.Sync())
	_, err = f.WriteAt(page('b'), 0)
	must.Succeed(t, err)
	_, err = f.WriteAt([]byte("cccc"), unit+4)
	must.Succeed(t, err)
	d.OnFlush(nil)
	if flushes != 1 {
		t.Errorf("%d flushes, want 1", flushes)
	}
	got := make([]byte, unit)
	_, err = f.ReadAt(got, 0)
	must.Succeed(t, err)
	wantPage(t, "the disk", got, 'b')

	for kept, want := range map[bool]byte{false: 'a', true: 'b'} {
		left := filepath.Join(t.TempDir(), "left")
		d.AfterPowerLoss(func() bool { return kept }).Store(t, left, d.Bytes)
		content, bytes := Load(t, left)
		if bytes != d.Bytes {
			t.Errorf("%d bytes are left, want %d", bytes, d.Bytes)
		}
		content.read(got, 0)
		wantPage(t, "what is left", got, want)
		content.read(got, unit)
		if is := string(got[:12]) == "\x00\x00\x00\x00cccc\x00\x00\x00\x00"; is != kept {
			t.Errorf("kept: %v, and the second unit begins with %q", kept, got[:12])
		}
	}
}
