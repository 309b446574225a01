package pool

import (
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// All that the driver writes is read without reflection. That what is read so is right,
// FuzzDecodeRecord sees to.
func TestWhatIsWrittenIsRead(t *testing.T) {
	for name, r := range map[string]*record{
		"a directory":              newRecord(Request{ID: VolumeID{name: "pvc-1"}, Mode: ModeMount}, 4096, loop.Thick),
		"an inline volume":         newRecord(Request{ID: VolumeID{name: "csi-1"}, Mode: ModeMount, Inline: true}, MaxBytes, loop.Thick),
		"a device, thin":           newRecord(Request{ID: VolumeID{name: "pvc-1"}, Mode: ModeBlock}, 4096, loop.Thin),
		"one with all fields":      {Version: 1, ID: "pvc-1", UID: "a", Mode: ModeBlock, Bytes: 1, Quota: "xfs", ProjectID: 1 << 31, Thin: true, BlockBytes: 512, Inline: true, Created: time.Now().UTC()},
		"one of another time zone": {Version: 1, ID: "pvc-1", UID: "a", Mode: ModeMount, Created: time.Date(2026, 11, 20, 18, 56, 54, 0, time.FixedZone("", 3600))},
	} {
		t.Run(name, func(t *testing.T) {
			data, err := r.encode()
			if err != nil {
				t.Fatal(err)
			}
			got, ok := parseWritten(data)
			if !ok || !got.Created.Equal(r.Created) {
				t.Fatalf("%s is read as %+v, %v", data, got, ok)
			}
			if got.Created = r.Created; got != *r {
				t.Errorf("%s is read as %+v, want %+v", data, got, *r)
			}
		})
	}
}

func TestWhatOthersWroteIsLeftToJSON(t *testing.T) {
	const end = `"mode":"mount","bytes":1,"created":"2026-11-20T18:56:54Z"}` + "\n"
	for name, data := range map[string]string{
		"nothing":              "",
		"no newline":           wholeRecord,
		"something behind":     wholeRecord + "\n\n",
		"spaces":               `{ "version":1,"id":"pvc-1","uid":"a",` + end,
		"another order":        `{"id":"pvc-1","version":1,"uid":"a",` + end,
		"an escape":            `{"version":1,"id":"pvc-\u0031","uid":"a",` + end,
		"not ASCII":            `{"version":1,"id":"pvc-é","uid":"a",` + end,
		"a string without end": `{"version":1,"id":"pvc-1`,
		"no number":            `{"version":"1","id":"pvc-1","uid":"a",` + end,
		"a zero in front":      `{"version":01,"id":"pvc-1","uid":"a",` + end,
		"a number too large":   `{"version":9223372036854775808,"id":"pvc-1","uid":"a",` + end,
		"a sign":               `{"version":-1,"id":"pvc-1","uid":"a",` + end,
		"a fraction":           `{"version":1.0,"id":"pvc-1","uid":"a",` + end,
		"no time":              `{"version":1,"id":"pvc-1","uid":"a","mode":"mount","bytes":1,"created":"now"}` + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			if r, ok := parseWritten([]byte(data)); ok {
				t.Errorf("%q is read as %+v", data, r)
			}
		})
	}
}

func BenchmarkDecodeRecord(b *testing.B) {
	for range b.N {
		if _, err := decodeRecord(VolumeID{name: "pvc-1"}, []byte(wholeRecord+"\n")); err != nil {
			b.Fatal(err)
		}
	}
}
