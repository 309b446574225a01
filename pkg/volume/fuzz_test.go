package volume_test

import (
	"errors"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// wantInvalid says that what is refused is refused as the caller's mistake.
func wantInvalid(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, volume.ErrInvalid) && !errors.Is(err, volume.ErrOutOfRange) {
		t.Errorf("error %v, want ErrInvalid or ErrOutOfRange", err)
	}
}

func FuzzParseID(f *testing.F) {
	for _, seed := range []string{"pvc-1", "..", "a/b", ".hidden", "x\x00", "lost+found", "é", "-rf", strings.Repeat("x", 201)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		parsed, err := volume.ParseID(s)
		_, nodeErr := volume.ParseNodeID(s)
		if (err == nil) != (nodeErr == nil) {
			t.Errorf("as an id: %v, as a node: %v", err, nodeErr)
		}
		if err != nil {
			wantInvalid(t, err)
			return
		}
		name := parsed.String()
		again, err := volume.ParseID(name)
		if name != s || again != parsed || err != nil {
			t.Errorf("%q is parsed to %q, and that to %q, %v", s, name, again, err)
		}
		// One element of a path, whatever is put before and behind it.
		if filepath.Base(name) != name || !filepath.IsLocal(name) || strings.HasPrefix(name, ".") || len(".new-"+name+".json") > 255 ||
			filepath.Join("/pool", name) != "/pool/"+name {
			t.Errorf("%q is an id", name)
		}
	})
}

func FuzzParsePoolName(f *testing.F) {
	for _, seed := range []string{"local", "Fast NVMe", "größe", "a/b", "\xff", "a\u202eb", strings.Repeat("ß", 127)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := volume.ParsePoolName(s)
		if err != nil {
			wantInvalid(t, err)
			return
		}
		again, err := volume.ParsePoolName(name.String())
		if name.String() != s || again != name || err != nil || name == (volume.PoolName{}) {
			t.Errorf("%q is parsed to %q, and that to %q, %v", s, name, again, err)
		}
		if strings.ContainsAny(s, "/\x00\n\r") || !utf8.ValidString(s) || len(s) > 253 {
			t.Errorf("%q is a name", s)
		}
	})
}

func FuzzParseBytes(f *testing.F) {
	for _, seed := range []string{"10Gi", "1.5M", "1e18", "e", "1e999999999", "9223372036854775807", "8Ei", "0.0000000000000000000000001", "1e+3", "+1", "1.e1Ki"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		bytes, err := volume.ParseBytes(s)
		if err != nil {
			wantInvalid(t, err)
			return
		}
		if again, err := volume.ParseBytes(strconv.FormatInt(bytes, 10)); again != bytes || err != nil || bytes < 0 {
			t.Errorf("%q is %d, and that is %d, %v", s, bytes, again, err)
		}
		if plain, err := strconv.ParseInt(s, 10, 64); err == nil && plain != bytes {
			t.Errorf("%q is %d", s, bytes)
		}
		if strings.ContainsAny(s, "-/_xX \n") {
			t.Errorf("%q is %d", s, bytes)
		}
	})
}

func FuzzParseReserve(f *testing.F) {
	for _, seed := range []string{"5%", "100%", "0.1%", "1e2%", "-0%", "NaN%", "0x1p4%", "5Gi", "%", "5%%", "8E"} {
		f.Add(seed, int64(1)<<40)
	}
	f.Add("100%", int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, s string, size int64) {
		reserve, err := volume.ParseReserve(s)
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) && !errors.Is(err, volume.ErrOutOfRange) {
				t.Errorf("error %v, want ErrInvalid or ErrOutOfRange", err)
			}
			return
		}
		size = max(size, 0)
		if got := reserve.Of(size); got < 0 || got > size {
			t.Errorf("%q of %d is %d", s, size, got)
		}
	})
}

func FuzzRange(f *testing.F) {
	f.Add(int64(0), int64(0), uint8(3))
	f.Add(int64(4097), int64(8192), uint8(3))
	f.Add(int64(math.MaxInt64), int64(0), uint8(7))
	f.Add(int64(0), int64(math.MaxInt64), uint8(0))
	f.Add(int64(-1), int64(1), uint8(1))
	f.Fuzz(func(t *testing.T, required, limit int64, shift uint8) {
		r, block := volume.Range{Required: required, Limit: limit}, int64(512)<<(shift%8)
		bytes, err := r.Promise(block)
		if err != nil {
			if !errors.Is(err, volume.ErrInvalid) && !errors.Is(err, volume.ErrOutOfRange) {
				t.Errorf("error %v, want ErrInvalid or ErrOutOfRange", err)
			}
			return
		}
		if bytes <= 0 || bytes%block != 0 || !r.Allows(bytes) || r.Check() != nil {
			t.Errorf("%+v in blocks of %d is %d", r, block, bytes)
		}
		if required > 0 && bytes-required >= block {
			t.Errorf("%+v in blocks of %d is %d, more than needed", r, block, bytes)
		}
	})
}
