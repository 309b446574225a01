// Package must ends a test at once when a step that the rest of it needs has failed.
package must

import (
	"errors"
	"testing"
)

// Succeed ends the test if there are errors.
func Succeed(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// ErrorIs ends the test if an error is another than the one wanted.
func ErrorIs(t testing.TB, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Fatalf("error %v, want %v", got, want)
	}
}
