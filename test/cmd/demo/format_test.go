package main

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

func TestSize(t *testing.T) {
	for bytes, want := range map[int64]string{
		0:               "0 B",
		1023:            "1023 B",
		1024:            "1.0 KiB",
		1536:            "1.5 KiB",
		1<<20 - 1:       "1.0 MiB",
		1 << 30:         "1.0 GiB",
		8<<30 - 90<<20:  "7.9 GiB",
		3 << 40:         "3.0 TiB",
		1<<63 - 1:       "8192.0 PiB",
		1023*1024 + 900: "1023.9 KiB",
	} {
		if got := size(bytes); got != want {
			t.Errorf("size(%d) = %q, want %q", bytes, got, want)
		}
	}
}

func TestMilliseconds(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                       "0.00 ms",
		312 * time.Microsecond:  "0.31 ms",
		1500 * time.Microsecond: "1.50 ms",
		250 * time.Millisecond:  "250.00 ms",
		1250 * time.Millisecond: "1.25 s",
	} {
		if got := milliseconds(d); got != want {
			t.Errorf("milliseconds(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestCodeName(t *testing.T) {
	for code, want := range map[codes.Code]string{
		codes.OK:                 "OK",
		codes.NotFound:           "NOT_FOUND",
		codes.ResourceExhausted:  "RESOURCE_EXHAUSTED",
		codes.FailedPrecondition: "FAILED_PRECONDITION",
	} {
		if got := codeName(code); got != want {
			t.Errorf("codeName(%v) = %q, want %q", code, got, want)
		}
	}
}
