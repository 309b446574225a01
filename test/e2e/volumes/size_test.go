package volumes

import (
	"path/filepath"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

func holdsItsPromise(h *harness) {
	promise := short(64 * mib)
	users := map[string]uint32{"nobody": nobody, "root": 0}
	if h.fs.rootIsExempt {
		delete(users, "root")
	}
	h.create("other", promise)
	other := h.publish("other", "other")
	for name, uid := range users {
		h.create(name, promise)
		path := h.publish(name, name)
		h.wantSpace(name, name, promise, 0)
		w := h.writer(filepath.Join(path, "data"), uid)
		size := h.fill(w, promise)
		h.wantSpace(name, name, promise, promise)
		more, err := w.write(size + 1)
		drivertest.WantErrno(h, "writing a byte more", err, h.fs.full)
		if more != size {
			h.Errorf("%d bytes were written after %d", more-size, size)
		}
		w.close(size)
		h.wantSpace("other", "other", promise, 0)
		h.MustUnpublish(name, name)
	}
	w := h.writer(filepath.Join(other, "data"), nobody)
	size := h.fill(w, promise)
	w.close(size)
	h.wantSpace("other", "other", promise, promise)
	h.MustUnpublish("other", "other")
}

// fill writes until the writer is refused, which has to be at the promise.
func (h *harness) fill(w *writer, promise int64) (size int64) {
	h.Helper()
	size, err := w.write(2 * promise)
	drivertest.WantErrno(h, "writing too much", err, h.fs.full)
	if size > promise || size < promise-h.fs.slack() {
		h.Errorf("%d bytes were written, want %d and no more", size, promise)
	}
	return size
}

func growsWhileWritten(h *harness) {
	unit := short(mib)
	h.create("growing", 64*unit)
	path := h.publish("growing", "pod")
	w := h.writer(filepath.Join(path, "data"), nobody)
	if size, err := w.write(48 * unit); err != nil {
		h.Errorf("writing: %v after %d bytes", err, size)
	}

	// Far enough from the limit a writer does not notice.
	grown := make(chan error, 1)
	go func() { grown <- h.expand("growing", "pod", 80*unit) }()
	if size, err := w.write(60 * unit); err != nil {
		h.Errorf("writing while the volume grows: %v after %d bytes", err, size)
	}
	h.Must(<-grown)

	// One that was refused goes on.
	h.fill(w, 80*unit)
	h.Must(h.expand("growing", "pod", 96*unit))
	h.fill(w, 96*unit)
	h.wantSpace("growing", "pod", 96*unit, 96*unit)

	// One that tries again and again gets in as the limit rises.
	go func() {
		for bytes := 100 * unit; bytes < 128*unit; bytes += 4 * unit {
			if err := h.expand("growing", "pod", bytes); err != nil {
				grown <- err
				return
			}
		}
		grown <- h.expand("growing", "pod", 160*unit)
	}()
	size := h.insist(w, 128*unit, grown)
	w.close(size)
	h.wantSpace("growing", "pod", 160*unit, 128*unit)
	h.MustUnpublish("growing", "pod")
}

// insist has a writer try until it has written everything, at the latest when the
// volume has grown.
func (h *harness) insist(w *writer, bytes int64, grown <-chan error) int64 {
	h.Helper()
	for has := false; ; {
		size, err := w.write(bytes)
		if err == nil {
			if !has {
				h.Must(<-grown)
			}
			return size
		}
		drivertest.WantErrno(h, "writing while the volume grows", err, h.fs.full)
		if has {
			h.Fatalf("%d bytes were written, and the volume has grown", size)
		}
		select {
		case err := <-grown:
			h.Must(err)
			has = true
		default:
		}
	}
}

func limitsArePutBack(h *harness) {
	promise := short(64 * mib)
	for name, l := range map[string]quota.Limit{
		"raised":    {Bytes: 2 * promise},
		"lowered":   {Bytes: promise / 2},
		"too-small": {Bytes: promise / 4},
		"removed":   {},
	} {
		h.create(name, promise)
		h.wantLimit(name, promise)
		if name == "too-small" {
			h.hold(name, promise/2)
		}
		d := h.open(name)
		h.Must(h.facility.Limit(d, h.ids[name], l))
		h.Must(d.Close())
		if c := h.condition(name); !c.GetAbnormal() || !strings.Contains(c.GetMessage(), "limit") {
			h.Errorf("the condition of a volume whose limit was %s: %v, want it to say so", name, c)
		}
	}
	h.Restart()
	for name := range h.ids {
		h.wantLimit(name, promise)
		if c := h.condition(name); c.GetAbnormal() {
			h.Errorf("the condition of a volume whose limit was %s and is right again: %v", name, c)
		}
		if reported := `"Restored the limit of a volume" pool="local" volume="` + name + `"`; !strings.Contains(h.Process.Log(), reported) {
			h.Errorf("the driver does not report: %s", reported)
		}
	}
}

func (h *harness) wantLimit(name string, bytes int64) {
	h.Helper()
	want := quota.Limit{Bytes: bytes}
	if h.fs.kind == quota.XFS {
		want.Inodes = inodesOf(bytes)
	}
	if got := h.limit(name); got != want {
		h.Errorf("the limit of %s is %+v, want %+v", name, got, want)
	}
}

// hold has a volume hold that many bytes.
func (h *harness) hold(name string, bytes int64) {
	h.Helper()
	w := h.writer(filepath.Join(h.publish(name, name), "data"), nobody)
	if size, err := w.write(bytes); err != nil {
		h.Errorf("writing %d bytes: %v after %d", bytes, err, size)
	}
	w.close(bytes)
	h.MustUnpublish(name, name)
	h.settle()
}
