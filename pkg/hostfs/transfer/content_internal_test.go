package transfer

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"testing"

	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/disk"
)

// What a filesystem takes for a hole is read, if its kernel does not find all data: otherwise zeros would be sent, and be compared with zeros.
func TestFilesystemThatFindsNoData(t *testing.T) {
	testenv.NeedRoot(t)
	written := bytes.Repeat([]byte{'w'}, blockBytes)
	size := int64(len(written))
	file := filepath.Join(t.TempDir(), "disk")
	must.Succeed(t, os.WriteFile(file, written, 0o600))
	d := disk.New(t, file, t.TempDir())
	d.FindNoData()
	f := must.Value(os.Open(d.Path))(t)
	defer func() { must.Succeed(t, f.Close()) }()
	fd := int(f.Fd())

	r := newReader(fd, 0, size, newBlockBuffer())
	if at := must.Value(r.holeUntil(0))(t); at != 0 {
		t.Errorf("there is a hole up to %d", at)
	}
	if b := must.Value(r.block(0))(t); b.sum != sha256.Sum256(written) {
		t.Errorf("what was written has the digest %x", b.sum)
	}
	var sent bytes.Buffer
	out := &output{ctx: t.Context(), wire: newWire(&sent, Options{}), meter: &meter{}, data: make([]byte, dataBytes)}
	must.Succeed(t, out.sendRange(fd, 0, size, true), out.wire.w.Flush())
	if !bytes.Contains(sent.Bytes(), written[:granule]) {
		t.Errorf("of what was written nothing is sent: %q", sent.Bytes())
	}
}

// Zeros are no difference from a hole where it is not known what is one.
func TestHolesThatAreNotKnown(t *testing.T) {
	b := &block{content: make([]byte, granule), data: 1}
	for holes, want := range map[bool]string{true: "holes", false: ""} {
		f := &comparedFile{holes: holes}
		if is := f.difference(b, digest{}, 0); is != want {
			t.Errorf("holes are known: %v; the difference is %q, want %q", holes, is, want)
		}
	}
}
