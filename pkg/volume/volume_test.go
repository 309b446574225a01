package volume_test

import (
	"errors"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func TestParseID(t *testing.T) {
	for _, good := range []string{"pvc-3f2a", "csi-0123456789abcdef", "data", "a", "0", "A.b_c-d", "x..y", strings.Repeat("x", 200)} {
		parsed, err := volume.ParseID(good)
		if err != nil || parsed.String() != good {
			t.Errorf("ParseID(%q) = %q, %v", good, parsed, err)
		}
	}
	for _, bad := range []string{"", ".", "..", "../x", "a/b", "/a", "a/", ".hostpath-provisioner", "-rf", "_x", "lost+found",
		"a b", "a\x00b", "a\nb", "ä", strings.Repeat("x", 201)} {
		if parsed, err := volume.ParseID(bad); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("ParseID(%q) = %q, %v; want ErrInvalid", bad, parsed, err)
		}
	}
}

func TestParsePoolName(t *testing.T) {
	for _, good := range []string{"local", "Fast NVMe", "größe", strings.Repeat("x", 253)} {
		if _, err := volume.ParsePoolName(good); err != nil {
			t.Errorf("ParseName(%q): %v", good, err)
		}
	}
	for _, bad := range []string{"", "a/b", "a\nb", "a\x00", "\xff", strings.Repeat("x", 254)} {
		if _, err := volume.ParsePoolName(bad); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("ParseName(%q): %v, want ErrInvalid", bad, err)
		}
	}
}

func TestParseBytes(t *testing.T) {
	for text, want := range map[string]int64{
		"0": 0, "4096": 4096, "10Gi": 10 << 30, "1.5Gi": 3 << 29, "500M": 5e8, "1k": 1000, "1e9": 1e9, "2E": 2e18, "1.0000001Ki": 1025,
	} {
		if got, err := volume.ParseBytes(text); got != want || err != nil {
			t.Errorf("ParseBytes(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]error{
		"": volume.ErrInvalid, "Gi": volume.ErrInvalid, "-1": volume.ErrInvalid, "1Zi": volume.ErrInvalid, "1 Gi": volume.ErrInvalid,
		"1/2": volume.ErrInvalid, "0x10": volume.ErrInvalid, "1e99": volume.ErrInvalid, "1e-9": volume.ErrInvalid, "1iG": volume.ErrInvalid,
		"9Ei": volume.ErrOutOfRange, "1..2": volume.ErrInvalid, "NaN": volume.ErrInvalid,
	} {
		if got, err := volume.ParseBytes(text); !errors.Is(err, want) {
			t.Errorf("ParseBytes(%q) = %d, %v; want %v", text, got, err, want)
		}
	}
}
