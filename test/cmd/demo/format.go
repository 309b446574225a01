package main

import (
	"fmt"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/codes"
)

// size writes bytes for people: 512 B, 1.0 GiB.
func size(bytes int64) string {
	if bytes < 1024 {
		return fmt.Sprintf("%d B", bytes)
	}
	value, unit := float64(bytes), -1
	// 1023.95 and more would be written as 1024.0.
	for value >= 1023.95 && unit < 4 {
		value /= 1024
		unit++
	}
	return fmt.Sprintf("%.1f %ciB", value, "KMGTP"[unit])
}

// milliseconds writes a time in the unit that CSI calls are best compared in,
// and in seconds what is too long for it.
func milliseconds(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%.2f ms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.2f s", d.Seconds())
}

// codeName is a code as the CSI spec writes it: RESOURCE_EXHAUSTED.
func codeName(code codes.Code) string {
	var b strings.Builder
	for i, r := range code.String() {
		if i > 0 && unicode.IsUpper(r) && code != codes.OK {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToUpper(r))
	}
	return b.String()
}
