package served_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevirt.io/hostpath-provisioner/pkg/pool/served"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func volumes(ids ...string) func() []string { return func() []string { return ids } }

func none(served.Entry) bool { return false }

func TestNote(t *testing.T) {
	path := t.TempDir()
	old := served.Entry{Name: "old", Path: "/old", UUID: "u1"}
	n := served.Note{Memory: served.In(path)}
	want := func(when string, pools ...served.Entry) {
		t.Helper()
		got := must.Value(served.In(path).OutOfUse(none))(t)
		if diff := cmp.Diff(pools, got); diff != "" {
			t.Errorf("%s (- want, + got):\n%s", when, diff)
		}
	}
	want("at first")
	must.Succeed(t, n.Write(old, volumes()))
	want("empty")
	done := must.Value(n.Making(old))(t)
	want("while something is made", served.Entry{Name: "old", Path: "/old", UUID: "u1", Partial: true})
	must.Succeed(t, n.Write(old, volumes("pvc-1")))
	want("noted while something is made", served.Entry{Name: "old", Path: "/old", UUID: "u1", Partial: true})
	done()
	must.Succeed(t, n.Write(old, volumes("pvc-1")))
	want("noted", served.Entry{Name: "old", Path: "/old", UUID: "u1", Volumes: []string{"pvc-1"}})

	other := served.Note{Memory: served.In(path)}
	must.Succeed(t, other.Write(served.Entry{Name: "new", Path: "/old", UUID: "u2", Shared: true}, volumes("pvc-2")))
	replaced, replacing := served.Entry{Name: "old", Path: "/old", UUID: "u1", Volumes: []string{"pvc-1"}},
		served.Entry{Name: "new", Path: "/old", UUID: "u2", Shared: true, Volumes: []string{"pvc-2"}, Partial: true}
	want("another at its path", replacing, replaced)
	must.Succeed(t, other.Forget("u2"))
	want("forgotten", replaced)
	must.Succeed(t, other.Forget("u2"))
}

// A driver is killed before it has noted a new pool, in which it makes something.
func TestNewPoolIsNotedBeforeSomethingIsMade(t *testing.T) {
	path := t.TempDir()
	p := served.Entry{Name: "new", Path: "/new", UUID: "u1"}
	killed := served.Note{Memory: served.In(path)}
	_, err := killed.Making(p)
	must.Succeed(t, err)
	p.Partial = true
	pools, err := served.In(path).OutOfUse(none)
	must.Succeed(t, err)
	if diff := cmp.Diff([]served.Entry{p}, pools); diff != "" {
		t.Error(diff)
	}
}

// What cannot be read may name a volume.
func TestOutOfUse_unreadable(t *testing.T) {
	path := t.TempDir()
	must.Succeed(t, os.MkdirAll(filepath.Join(path, "pools"), 0o700))
	must.Succeed(t, os.WriteFile(filepath.Join(path, "pools", "u1.json"), []byte("{"), 0o600))
	pools, err := served.In(path).OutOfUse(none)
	if err == nil || !strings.Contains(err.Error(), "u1.json") || !strings.Contains(err.Error(), "remove that file") {
		t.Errorf("it is %+v, %v, want an error with the file and what to do", pools, err)
	}
}

// A driver that is killed while it notes a pool leaves the beginning of a file, and nothing writes that again once the
// pool is not configured any more.
func TestOutOfUse_interruptedNote(t *testing.T) {
	path := t.TempDir()
	n := served.Note{Memory: served.In(path)}
	must.Succeed(t, n.Write(served.Entry{Name: "old", Path: "/old", UUID: "u1"}, volumes("pvc-1")))
	must.Succeed(t, os.WriteFile(filepath.Join(path, "pools", ".new-u1.json"), []byte(`{"name":"o`), 0o600))
	pools := must.Value(served.In(path).OutOfUse(none))(t)
	want := []served.Entry{{Name: "old", Path: "/old", UUID: "u1", Volumes: []string{"pvc-1"}}}
	if diff := cmp.Diff(want, pools); diff != "" {
		t.Error(diff)
	}
}

// Notes come and go while others are read: forget-pool is another process.
func TestOutOfUse_whileOthersAreForgotten(t *testing.T) {
	path := t.TempDir()
	n := served.Note{Memory: served.In(path)}
	must.Succeed(t, n.Write(served.Entry{Name: "old", Path: "/old", UUID: "u1"}, volumes("pvc-1")))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 100 {
			p := served.Entry{Name: "other", Path: "/other", UUID: fmt.Sprintf("o%d", i%7)}
			n := served.Note{Memory: served.In(path)}
			_ = n.Write(p, volumes("pvc-2"))
			_ = served.In(path).Forget(p)
		}
	}()
	for {
		pools, err := served.In(path).OutOfUse(none)
		if err != nil || !slices.ContainsFunc(pools, func(p served.Entry) bool { return p.UUID == "u1" }) {
			t.Fatalf("it is %+v, %v, want old", pools, err)
		}
		select {
		case <-done:
			return
		default:
		}
	}
}

// A pool that was away when it was forgotten may be served again by the same driver.
func TestForgottenPoolIsNotedAgain(t *testing.T) {
	path := t.TempDir()
	p := served.Entry{Name: "old", Path: "/old", UUID: "u1", Volumes: []string{"pvc-1"}}
	n := served.Note{Memory: served.In(path)}
	must.Succeed(t, n.Write(p, volumes("pvc-1")), served.In(path).Forget(p), n.Write(p, volumes("pvc-1")))
	pools := must.Value(served.In(path).OutOfUse(none))(t)
	if diff := cmp.Diff([]served.Entry{p}, pools); diff != "" {
		t.Error(diff)
	}
}
