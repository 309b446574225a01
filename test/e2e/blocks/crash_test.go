package blocks

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/testenv"
	"kubevirt.io/hostpath-provisioner/test/testenv/mountns"
)

// A volume is what a check of crashes expects of one.
type volume struct {
	name       string
	size       int64
	generation uint64
	published  map[string]bool // pods
}

// crashesAnywhere kills the driver at moments from the beginning of a call to shortly
// after its answer. The call is repeated, as kubelet does, until it is answered. With -short it
// takes a third of the time: test/e2e/crash has each step.
func crashesAnywhere(b *bench) {
	const seed = 4
	allowed := 12 * time.Second
	if testenv.Guest() {
		allowed = 25 * time.Second
	}
	if testing.Short() {
		allowed /= 3
	}
	random := rand.New(rand.NewPCG(seed, seed))
	var volumes []*volume
	for i := range 3 {
		v := &volume{name: fmt.Sprintf("disk-%d", i), size: 2 * mib, published: make(map[string]bool)}
		b.create(v.name, v.size)
		volumes = append(volumes, v)
	}
	longest := b.longestCall()
	rounds, interrupted := 0, 0
	for deadline := time.Now().Add(allowed); time.Now().Before(deadline) && !b.Failed(); rounds++ {
		v := volumes[random.IntN(len(volumes))]
		call := b.pick(random, v)
		// Most calls are shorter than the longest.
		after := random.Float64() * random.Float64() * float64(longest)
		if b.killDuring(call, time.Duration(after)) {
			interrupted++
		}
		b.wantNoLeak()
		b.Must(call())
		for _, v := range volumes {
			b.wantVolume(v)
		}
		b.writeAnew(v)
	}
	b.Logf("seed %d: %d calls, each with a SIGKILL within %v, of which %d came before the answer", seed, rounds, longest, interrupted)
	for _, v := range volumes {
		for pod := range v.published {
			b.unpublish(v.name, pod)
		}
	}
	b.wantDevices(0)
}

// longestCall is how long the slower of the calls takes here, and a bit.
func (b *bench) longestCall() time.Duration {
	b.Helper()
	began := time.Now()
	b.publish("disk-0", "measured")
	published := time.Since(began)
	began = time.Now()
	b.unpublish("disk-0", "measured")
	return max(published, time.Since(began)) * 5 / 4
}

// pick chooses a call, notes what it leads to, and returns what makes it.
func (b *bench) pick(random *rand.Rand, v *volume) (call func() error) {
	pod := fmt.Sprintf("%s-%d", v.name, random.IntN(2))
	switch {
	case !v.published[pod]:
		v.published[pod] = true
		return func() error { return b.tryPublish(v.name, pod) }
	case v.size < 16*mib && random.IntN(3) == 0:
		v.size += mib
		return func() error { return b.expand(v.name, pod, v.size) }
	}
	delete(v.published, pod)
	return func() error { return b.tryUnpublish(v.name, pod) }
}

// killDuring kills the driver a while after a call began and starts it again. It
// returns whether the call had no answer yet.
func (b *bench) killDuring(call func() error, after time.Duration) (interrupted bool) {
	b.Helper()
	answer := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		close(begun)
		answer <- call()
	}()
	<-begun
	moment := time.NewTimer(after)
	defer moment.Stop()
	<-moment.C
	b.Must(b.Process.Kill())
	err := <-answer
	if code := status.Code(err); code != codes.OK && code != codes.Unavailable && code != codes.Canceled {
		b.Errorf("a call that was interrupted: %v", err)
	}
	b.Must(b.Process.Restart(b.Context()))
	b.AwaitServing()
	return err != nil
}

// wantNoLeak expects no more devices than are published.
func (b *bench) wantNoLeak() {
	b.Helper()
	mounts, err := mountns.Below(b.Targets)
	b.Must(err)
	devices := make(map[uint64]bool)
	for _, mount := range mounts {
		devices[number(b, mount)] = true
	}
	b.wantDevices(len(devices))
}

// wantVolume expects a volume to be published where it was asked for, whole, and
// nowhere else.
func (b *bench) wantVolume(v *volume) {
	b.Helper()
	mounts, err := mountns.Below(b.Targets)
	b.Must(err)
	devices := make(map[uint64]bool)
	for i := range 2 {
		pod := fmt.Sprintf("%s-%d", v.name, i)
		if is := slices.Contains(mounts, b.Target(pod)); is != v.published[pod] {
			b.Fatalf("%s is published at %s: %v, want %v", v.name, pod, is, !is)
		}
		if !v.published[pod] {
			continue
		}
		devices[number(b, b.Target(pod))] = true
		b.wantInOrder(v.name, pod, v.size)
		d := open(b, b.Target(pod), os.O_RDONLY)
		if got := d.size(); got != v.size {
			b.Errorf("the device of %s has %d bytes, want %d", v.name, got, v.size)
		}
		if v.generation > 0 {
			d.want(0, mib, v.generation)
		}
		d.close()
	}
	if len(devices) > 1 {
		b.Errorf("%s has %d devices", v.name, len(devices))
	}
}

// writeAnew writes to a volume if it is published.
func (b *bench) writeAnew(v *volume) {
	b.Helper()
	for pod := range v.published {
		v.generation++
		d := open(b, b.Target(pod), os.O_RDWR)
		d.write(0, mib, v.generation)
		d.close()
		return
	}
}
