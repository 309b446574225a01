package transfer

import (
	"context"
	"errors"
	"net"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
)

// Compare compares without a pass before, and returns the differences. What the clock says is later than Pass.Since.
func Compare(t testing.TB, from, to *dir.Dir, p Pass) string {
	t.Helper()
	here, there := net.Pipe()
	received := make(chan error, 1)
	go func() { received <- Receive(t.Context(), there, to, Options{}) }()
	s := NewSender(here, Options{})
	_, err := use(t.Context(), s, func(ctx context.Context) (struct{}, error) {
		since, began, err := s.beginPass(ctx, from, p)
		if err != nil {
			return struct{}{}, err
		}
		c := s.comparison(ctx, from, p, began)
		c.track = track{since: since}
		return struct{}{}, c.run(&Result{})
	})
	if finish := s.Finish(t.Context()); finish != nil {
		t.Fatal(err, finish)
	}
	if err := <-received; err != nil {
		t.Fatal(err)
	}
	var differences *DifferencesError
	if err != nil && !errors.As(err, &differences) {
		t.Fatal(err)
	}
	if err == nil {
		return ""
	}
	return err.Error()
}
