package volumes

import (
	"path/filepath"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

func holdsItsPromise(b *bench) {
	promise := short(64 * mib)
	users := map[string]uint32{"nobody": nobody, "root": 0}
	if b.fs.rootIsExempt {
		delete(users, "root")
	}
	b.create("other", promise)
	other := b.publish("other", "other")
	for name, uid := range users {
		b.create(name, promise)
		path := b.publish(name, name)
		b.wantSpace(name, name, promise, 0)
		w := b.writer(filepath.Join(path, "data"), uid)
		size := b.fill(w, promise)
		b.wantSpace(name, name, promise, promise)
		more, err := w.write(size + 1)
		drivertest.WantErrno(b, "writing a byte more", err, b.fs.full)
		if more != size {
			b.Errorf("%d bytes were written after %d", more-size, size)
		}
		w.close(size)
		b.wantSpace("other", "other", promise, 0)
		b.unpublish(name, name)
	}
	w := b.writer(filepath.Join(other, "data"), nobody)
	size := b.fill(w, promise)
	w.close(size)
	b.wantSpace("other", "other", promise, promise)
	b.unpublish("other", "other")
}

// fill writes until the writer is refused, which has to be at the promise.
func (b *bench) fill(w *writer, promise int64) (size int64) {
	b.Helper()
	size, err := w.write(2 * promise)
	drivertest.WantErrno(b, "writing too much", err, b.fs.full)
	if size > promise || size < promise-b.fs.slack() {
		b.Errorf("%d bytes were written, want %d and no more", size, promise)
	}
	return size
}

func growsWhileWritten(b *bench) {
	unit := short(mib)
	b.create("growing", 64*unit)
	path := b.publish("growing", "pod")
	w := b.writer(filepath.Join(path, "data"), nobody)
	if size, err := w.write(48 * unit); err != nil {
		b.Errorf("writing: %v after %d bytes", err, size)
	}

	// Far enough from the limit a writer does not notice.
	grown := make(chan error, 1)
	go func() { grown <- b.expand("growing", "pod", 80*unit) }()
	if size, err := w.write(60 * unit); err != nil {
		b.Errorf("writing while the volume grows: %v after %d bytes", err, size)
	}
	b.Must(<-grown)

	// One that was refused goes on.
	b.fill(w, 80*unit)
	b.Must(b.expand("growing", "pod", 96*unit))
	b.fill(w, 96*unit)
	b.wantSpace("growing", "pod", 96*unit, 96*unit)

	// One that tries again and again gets in as the limit rises.
	go func() {
		for bytes := 100 * unit; bytes < 128*unit; bytes += 4 * unit {
			if err := b.expand("growing", "pod", bytes); err != nil {
				grown <- err
				return
			}
		}
		grown <- b.expand("growing", "pod", 160*unit)
	}()
	size := b.insist(w, 128*unit, grown)
	w.close(size)
	b.wantSpace("growing", "pod", 160*unit, 128*unit)
	b.unpublish("growing", "pod")
}

// insist has a writer try until it has written everything, at the latest when the
// volume has grown.
func (b *bench) insist(w *writer, bytes int64, grown <-chan error) int64 {
	b.Helper()
	for has := false; ; {
		size, err := w.write(bytes)
		if err == nil {
			if !has {
				b.Must(<-grown)
			}
			return size
		}
		drivertest.WantErrno(b, "writing while the volume grows", err, b.fs.full)
		if has {
			b.Fatalf("%d bytes were written, and the volume has grown", size)
		}
		select {
		case err := <-grown:
			b.Must(err)
			has = true
		default:
		}
	}
}

func limitsArePutBack(b *bench) {
	promise := short(64 * mib)
	for name, l := range map[string]quota.Limit{
		"raised":    {Bytes: 2 * promise},
		"lowered":   {Bytes: promise / 2},
		"too-small": {Bytes: promise / 4},
		"removed":   {},
	} {
		b.create(name, promise)
		b.wantLimit(name, promise)
		if name == "too-small" {
			b.hold(name, promise/2)
		}
		d := b.open(name)
		b.Must(b.facility.Limit(d, b.ids[name], l))
		b.Must(d.Close())
		if c := b.condition(name); !c.GetAbnormal() || !strings.Contains(c.GetMessage(), "limit") {
			b.Errorf("the condition of a volume whose limit was %s: %v, want it to say so", name, c)
		}
	}
	b.Restart()
	for name := range b.ids {
		b.wantLimit(name, promise)
		if c := b.condition(name); c.GetAbnormal() {
			b.Errorf("the condition of a volume whose limit was %s and is right again: %v", name, c)
		}
		if reported := `"Restored the limit of a volume" pool="local" volume="` + name + `"`; !strings.Contains(b.Process.Log(), reported) {
			b.Errorf("the driver does not report: %s", reported)
		}
	}
}

func (b *bench) wantLimit(name string, bytes int64) {
	b.Helper()
	want := quota.Limit{Bytes: bytes}
	if b.fs.kind == quota.XFS {
		want.Inodes = inodesOf(bytes)
	}
	if got := b.limit(name); got != want {
		b.Errorf("the limit of %s is %+v, want %+v", name, got, want)
	}
}

// hold has a volume hold that many bytes.
func (b *bench) hold(name string, bytes int64) {
	b.Helper()
	w := b.writer(filepath.Join(b.publish(name, name), "data"), nobody)
	if size, err := w.write(bytes); err != nil {
		b.Errorf("writing %d bytes: %v after %d", bytes, err, size)
	}
	w.close(bytes)
	b.unpublish(name, name)
	b.settle()
}
