package store

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

func idOf(name string) volume.ID {
	id, err := volume.ParseID(name)
	if err != nil {
		panic(err)
	}
	return id
}

// wholeRecord is one of a directory, and wholeBlock one of a device.
const (
	wholeRecord = `{"version":1,"id":"pvc-1","uid":"zzhioir5avpfwbox","mode":"mount","bytes":1003520,"quota":"xfs","projectID":1213202432,"created":"2026-11-20T18:56:54Z"}`
	wholeBlock  = `{"version":1,"id":"pvc-1","uid":"a","mode":"block","bytes":4096,"thin":true,"blockBytes":512,"created":"2026-11-20T18:56:54+01:00"}`
	wholeSource = `{"version":2,"id":"pvc-1","uid":"a","mode":"mount","bytes":4096,"move":{"id":"m-1","role":"source","peer":"node-2","fence":"f","handedOver":true},"moved":"m-0","undone":"m--1","created":"2026-11-20T18:56:54Z"}`
	wholeTarget = `{"version":2,"id":"pvc-1","uid":"a","mode":"mount","bytes":4096,"move":{"id":"m-1","role":"target","peer":"node-1"},"created":"2026-11-20T18:56:54Z"}`
)

func FuzzDecodeRecord(f *testing.F) {
	for _, seed := range []string{
		wholeRecord, wholeBlock, wholeSource, wholeTarget, wholeRecord + "\n", wholeBlock + "\n", wholeRecord[:60],
		`{"version":1,"id":"pvc-1","uid":"a","mode":"mount","bytes":1234567890123456789,"created":"2026-11-20T18:56:54Z"}` + "\n",
		`{"version":01,"id":"pvc-\u0031","uid":"a","mode":"mount","bytes":-1,"created":"2026-11-20T18:56:54Z"}` + "\n", "\x00", `{"version":1,"id":"..","uid":"../x"}`, `{"version":2}`,
		`{"version":1,"id":"pvc-1","uid":"a","mode":"mount","bytes":9223372036854775807,"inline":true}`,
		`{"VERSION":1,"ID":"pvc-1","uid":"a","uid":"b","mode":"mount","created":"0000-01-01T00:00:00-23:59"}`,
	} {
		f.Add([]byte(seed))
	}
	id, err := volume.ParseID("pvc-1")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeRecord(id, data)
		if err != nil {
			if !errors.Is(err, volume.ErrDamagedRecord) {
				t.Errorf("error %v, want ErrDamaged", err)
			}
			return
		}
		if r.ID != id.String() || r.Bytes < 0 || !validName(r.UID) || r.Mode == "" || (r.Mode == volume.ModeBlock) != (r.BlockBytes > 0) {
			t.Errorf("%+v is a record", r)
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
		if _, err := decodeRecord(idOf("pvc-2"), whole); !errors.Is(err, volume.ErrDamagedRecord) {
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

func TestRecordOfMove(t *testing.T) {
	id := idOf("pvc-1")
	for _, whole := range []string{wholeSource, wholeTarget} {
		r, err := decodeRecord(id, []byte(whole))
		if err != nil {
			t.Fatalf("%s: %v", whole, err)
		}
		if again, err := r.encode(); err != nil || string(again) != whole+"\n" {
			t.Errorf("%s is written as %s (%v)", whole, again, err)
		}
	}
	for what, change := range map[string][2]string{
		"a version that earlier drivers read": {`"version":2`, `"version":1`},
		"no move":                             {`"move":`, `"other":`},
		"another role":                        {`"role":"source"`, `"role":"both"`},
		"no role":                             {`"role":"source",`, ``},
		"no id":                               {`"id":"m-1"`, `"id":""`},
		"an id that is none":                  {`"id":"m-1"`, `"id":"../m"`},
		"a peer that is none":                 {`"peer":"node-2"`, `"peer":"a/b"`},
		"a source without a fence":            {`"fence":"f",`, ``},
		"a target that is handed over":        {`"role":"source"`, `"role":"target"`},
		"a move before that is none":          {`"moved":"m-0"`, `"moved":"/"`},
		"an undone move that is none":         {`"undone":"m--1"`, `"undone":"/"`},
		"an inline volume":                    {`"bytes":4096`, `"bytes":4096,"inline":true`},
	} {
		data := strings.Replace(wholeSource, change[0], change[1], 1)
		if r, err := decodeRecord(id, []byte(data)); data == wholeSource || !errors.Is(err, volume.ErrDamagedRecord) {
			t.Errorf("%s: %s is %+v (%v)", what, data, r, err)
		}
	}
}

// The records of each release must load in the next.
func TestRecordOfVersion1Loads(t *testing.T) {
	id, err := volume.ParseID("pvc-1")
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeRecord(id, []byte(`{"version":1,"id":"pvc-1","uid":"abcdefgh","mode":"mount","bytes":4096,"inline":true,"created":"2026-01-02T03:04:05Z"}`+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := Record{Version: 1, ID: "pvc-1", UID: "abcdefgh", Mode: volume.ModeMount, Bytes: 4096, Inline: true, Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	if *got != want {
		t.Errorf("record %+v, want %+v", *got, want)
	}
}
