package must

import "strings"

// SayOnce ends the test if a message has a part twice, as "publish volume v: volume v: not found" has.
func SayOnce(t T, message string) {
	t.Helper()
	parts := strings.Split(message, ": ")
	for n, part := range parts {
		for _, before := range parts[:n] {
			if before == part || strings.HasSuffix(before, " "+part) {
				t.Fatalf("%q says %q twice", message, part)
			}
		}
	}
}
