// Package must ends a test at once when a step that the rest of it needs has failed.
package must

import "errors"

// T is a test: a testing.TB, or another that embeds what ends one.
type T interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// Succeed ends the test if there are errors.
func Succeed(t T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// ErrorIs ends the test if an error is another than the one wanted.
func ErrorIs(t T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Fatalf("error %v, want %v", got, want)
	}
}

// Value is what a call returned, for the test that it is given to, which ends if the call failed: must.Value(os.ReadFile(path))(t).
func Value[V any](v V, err error) func(T) V {
	return func(t T) V {
		t.Helper()
		Succeed(t, err)
		return v
	}
}

// Err is the error of a call whose other answer does not matter.
func Err[V any](_ V, err error) error { return err }
