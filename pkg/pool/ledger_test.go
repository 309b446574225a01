package pool

import (
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

const g = 1 << 30

// disk100 is a filesystem of 100 GiB of which so much is taken.
func disk100(taken int64) dir.Space {
	return dir.Space{SizeBytes: 100 * g, FreeBytes: (100 - taken) * g, UsedBytes: taken * g, BlockBytes: 4096}
}

func TestAvailable(t *testing.T) {
	for name, c := range map[string]struct {
		ledger ledger
		space  dir.Space
		config Config
		want   int64 // GiB
	}{
		"an empty disk is free":                       {ledger{}, disk100(0), Config{}, 100},
		"promises count in full":                      {ledger{promised: 30 * g}, disk100(0), Config{}, 70},
		"what volumes hold is inside their promise":   {ledger{promised: 30 * g}, disk100(30), Config{}, 70},
		"what others held at first stays theirs":      {ledger{promised: 30 * g, foreign: 20 * g}, disk100(20), Config{}, 50},
		"and is not volumes' use":                     {ledger{promised: 30 * g, foreign: 20 * g}, disk100(50), Config{}, 50},
		"use beyond all promises is foreign":          {ledger{promised: 30 * g}, disk100(60), Config{}, 40},
		"what is taken bounds foreign use":            {ledger{foreign: 90 * g}, disk100(10), Config{}, 90},
		"trash is not sold again":                     {ledger{promised: 50 * g, trashed: 50 * g}, disk100(50), Config{}, 0},
		"trash of unknown size counts all as foreign": {ledger{promised: 30 * g, unknown: 1}, disk100(30), Config{}, 40},
		"nothing below zero":                          {ledger{promised: 150 * g}, disk100(0), Config{}, 0},
		"a reserve stays free":                        {ledger{promised: 30 * g}, disk100(0), Config{Reserve: Reserve{percent: 10}}, 60},
		"promises may exceed the disk":                {ledger{promised: 150 * g}, disk100(0), Config{Overprovision: 2}, 50},
		"but one volume not what is free":             {ledger{}, disk100(40), Config{Overprovision: 3}, 60},
		"one that takes no file more has nothing":     {ledger{}, dir.Space{SizeBytes: g, FreeBytes: g, Inodes: 512}, Config{}, 0},
		"inodes that nobody counts are no matter":     {ledger{}, dir.Space{SizeBytes: g, FreeBytes: g}, Config{}, 1},
		"a read-only disk has nothing":                {ledger{}, dir.Space{SizeBytes: g, FreeBytes: g, ReadOnly: true}, Config{}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			if c.config.Overprovision == 0 {
				c.config.Overprovision = 1
			}
			if got := c.ledger.available(c.space, c.config); got != c.want*g {
				t.Errorf("available %.1f GiB, want %d", float64(got)/g, c.want)
			}
		})
	}
}

func TestQuantum(t *testing.T) {
	for size, want := range map[int64]int64{1 << 20: 1 << 20, 10 * g: 16 << 20, 100 * g: 64 << 20, 100 << 40: 64 << 20} {
		if got := quantum(size); got != want {
			t.Errorf("quantum(%d) = %d, want %d", size, got, want)
		}
	}
}

// The records of each release must load in the next.
func TestRecordOfVersion1Loads(t *testing.T) {
	id, err := ParseVolumeID("pvc-1")
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodeRecord(id, []byte(`{"version":1,"id":"pvc-1","uid":"abcdefgh","mode":"mount","bytes":4096,"inline":true,"created":"2026-01-02T03:04:05Z"}`+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := record{Version: 1, ID: "pvc-1", UID: "abcdefgh", Mode: ModeMount, Bytes: 4096, Inline: true, Created: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	if *got != want {
		t.Errorf("record %+v, want %+v", *got, want)
	}
}
