package pool

import (
	"encoding/json"
	"errors"
	"math"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/loop"
)

// wholeRecord is one of a directory, and wholeBlock one of a device.
const (
	wholeRecord = `{"version":1,"id":"pvc-1","uid":"zzhioir5avpfwbox","mode":"mount","bytes":1003520,"quota":"xfs","projectID":1213202432,"created":"2026-11-20T18:56:54Z"}`
	wholeBlock  = `{"version":1,"id":"pvc-1","uid":"a","mode":"block","bytes":4096,"thin":true,"blockBytes":512,"created":"2026-11-20T18:56:54+01:00"}`
)

func FuzzDecodeRecord(f *testing.F) {
	for _, seed := range []string{
		wholeRecord, wholeBlock, wholeRecord + "\n", wholeBlock + "\n", wholeRecord[:60],
		`{"version":1,"id":"pvc-1","uid":"a","mode":"mount","bytes":1234567890123456789,"created":"2026-11-20T18:56:54Z"}` + "\n",
		`{"version":01,"id":"pvc-\u0031","uid":"a","mode":"mount","bytes":-1,"created":"2026-11-20T18:56:54Z"}` + "\n", "\x00", `{"version":1,"id":"..","uid":"../x"}`, `{"version":2}`,
		`{"version":1,"id":"pvc-1","uid":"a","mode":"mount","bytes":9223372036854775807,"inline":true}`,
		`{"VERSION":1,"ID":"pvc-1","uid":"a","uid":"b","mode":"mount","created":"0000-01-01T00:00:00-23:59"}`,
	} {
		f.Add([]byte(seed))
	}
	id, err := ParseVolumeID("pvc-1")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if quick, ok := parseWritten(data); ok {
			var r record
			err := json.Unmarshal(data, &r)
			same := quick.Created.Equal(r.Created)
			if quick.Created = r.Created; err != nil || !same || quick != r {
				t.Errorf("%q is read as %+v, and is %+v, %v", data, quick, r, err)
			}
		}
		r, err := decodeRecord(id, data)
		if err != nil {
			if !errors.Is(err, ErrDamaged) {
				t.Errorf("error %v, want ErrDamaged", err)
			}
			return
		}
		if r.ID != id.name || r.Bytes < 0 || checkElement("uid", r.UID) != nil || r.Mode == "" || (r.Mode == ModeBlock) != (r.BlockBytes > 0) {
			t.Errorf("%+v is a record", r)
		}
		// What later code computes of it does not overflow, also for many of them.
		p := &Pool{config: Config{BytesPerInode: 1}}
		if limit := p.limits(r.card()); limit.Bytes < r.Bytes || limit.Inodes < 0 || r.Bytes > math.MaxInt64/1000 {
			t.Errorf("%+v has the limits %+v", r, limit)
		}
		// A record is written anew when its volume grows: nothing else may change.
		whole, err := r.encode()
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", r, err)
		}
		again, err := decodeRecord(id, whole)
		if err != nil {
			t.Fatalf("%s, from %q: %v", whole, data, err)
		}
		if !again.Created.Equal(r.Created) {
			t.Errorf("%s is from %v, and was from %v", whole, again.Created, r.Created)
		}
		again.Created = r.Created
		if *again != *r {
			t.Errorf("%+v is %+v when it is read again", r, again)
		}
		if _, err := decodeRecord(VolumeID{name: "pvc-2"}, whole); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s is also of pvc-2: %v", whole, err)
		}
	})
}

func FuzzDecodeFormat(f *testing.F) {
	for _, seed := range []string{
		`{"version":1,"uuid":"kwinljr55icti4ji","foreignBytes":108240896,"created":"2026-11-20T18:56:53Z"}`,
		`{"version":2,"uuid":{}}`, `{"version":1}`, `{"version":1,"uuid":"x","foreignBytes":-1}`, "", "null",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		found, err := decodeFormat(data)
		if err != nil {
			return
		}
		if found.Version != formatVersion || found.UUID == "" || found.Foreign < 0 || found.Foreign > math.MaxInt64/1000 {
			t.Errorf("%+v is a format", found)
		}
		whole, err := json.Marshal(found)
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", found, err)
		}
		again, err := decodeFormat(whole)
		if err != nil || again.UUID != found.UUID || again.Foreign != found.Foreign || !again.Created.Equal(found.Created) {
			t.Errorf("%+v is %+v, %v when it is read again", found, again, err)
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
		r, block := Range{Required: required, Limit: limit}, int64(512)<<(shift%8)
		bytes, err := r.promise(block)
		if err != nil {
			if !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrOutOfRange) {
				t.Errorf("error %v, want ErrInvalid or ErrOutOfRange", err)
			}
			return
		}
		if bytes <= 0 || bytes%block != 0 || !r.allows(bytes) || r.check() != nil {
			t.Errorf("%+v in blocks of %d is %d", r, block, bytes)
		}
		if required > 0 && bytes-required >= block {
			t.Errorf("%+v in blocks of %d is %d, more than needed", r, block, bytes)
		}
		// What is promised can be recorded, and read again.
		rec := newRecord(Request{ID: VolumeID{name: "pvc-1"}, Mode: ModeMount}, bytes, loop.Thick)
		whole, err := json.Marshal(rec)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decodeRecord(VolumeID{name: "pvc-1"}, whole); err != nil {
			t.Error(err)
		}
	})
}

func FuzzParseReserve(f *testing.F) {
	for _, seed := range []string{"5%", "100%", "0.1%", "1e2%", "-0%", "NaN%", "0x1p4%", "5Gi", "%", "5%%", "8E"} {
		f.Add(seed, int64(1)<<40)
	}
	f.Add("100%", int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, s string, size int64) {
		reserve, err := ParseReserve(s)
		if err != nil {
			if !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrOutOfRange) {
				t.Errorf("error %v, want ErrInvalid or ErrOutOfRange", err)
			}
			return
		}
		size = max(size, 0)
		if got := reserve.of(size); got < 0 || got > size || reserve.percent == 0 && got != min(reserve.bytes, size) {
			t.Errorf("%q of %d is %d", s, size, got)
		}
	})
}
