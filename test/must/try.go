package must

import "errors"

// A failure is what ends the work of a program, up to Try.
type failure struct{ error }

// Go ends the work if there are errors. A program that is no test calls it within Try.
func Go(errs ...error) {
	if err := errors.Join(errs...); err != nil {
		panic(failure{err})
	}
}

// Get is Go for what comes with a value.
func Get[T any](value T, err error) T {
	Go(err)
	return value
}

// Try does some work, and returns the errors that ended it.
func Try(work func()) (err error) {
	defer func() {
		switch f := recover().(type) {
		case nil:
		case failure:
			err = f.error
		default:
			panic(f)
		}
	}()
	work()
	return nil
}
