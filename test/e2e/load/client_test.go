package load

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

// A client is one of the callers. It makes one call after the other, so that it knows
// what each has to be answered with.
type client struct {
	*harness
	number  int
	random  *rand.Rand
	volumes []*volume // that no other client uses
	done    int       // actions
}

// A volume is what its client knows of one: as it would be made, with the size that it has, and where it is published.
type volume struct {
	drivertest.Kept
	there bool
	stamp string // what was written in it
}

const (
	unit = mib     // what sizes are multiples of: btrfs wants some room to keep track of the content
	most = 4 * mib // what volumes grow to
	// published is how many publications a client has at a time.
	published = 6
)

// newClient gives a client its names: a block volume, one in the shared pool, and
// directories in the others. The pool with limits has fewer: there btrfs takes some twenty
// milliseconds to forget a volume.
func newClient(h *harness, number int) *client {
	c := &client{harness: h, number: number, random: rand.New(rand.NewPCG(*seed, uint64(number)))}
	for i := range h.each {
		v := &volume{}
		v.ID = id(fmt.Sprintf("c%02d", number), i)
		switch {
		case i == 0:
			v.Block = true
			v.Pool = h.pools[number%len(h.pools)].Name
		case i == 1:
			v.Pool = "shared"
		case i%10 == 9:
			v.Pool = "limited"
		default:
			v.Pool = []string{"xfs", "ext4", "btrfs"}[i%3]
		}
		c.size(v)
		c.volumes = append(c.volumes, v)
	}
	return c
}

// size gives a volume that is to be made its size.
func (c *client) size(v *volume) { v.Bytes = unit * (1 + c.random.Int64N(3)) }

// actions are what a client does, and how often of a hundred times.
var actions = []struct {
	name  string
	often int
	do    func(*client, context.Context) error
}{
	{"create", 14, (*client).create}, {"delete", 12, (*client).remove}, {"publish", 16, (*client).publish}, {"unpublish", 12, (*client).unpublish},
	{"stats", 15, (*client).stats}, {"expand", 5, (*client).expand}, {"get", 11, (*client).get}, {"list", 1, (*client).list},
	{"inline", 2, (*client).inline}, {"what others use too", 12, (*client).collide},
}

// act does one of them.
func (c *client) act(ctx context.Context) error {
	at := c.random.IntN(100)
	for _, a := range actions {
		if at -= a.often; at < 0 {
			c.done++
			if err := a.do(c, ctx); err != nil {
				return fmt.Errorf("action %d, %s: %w", c.done, a.name, err)
			}
			return nil
		}
	}
	return nil
}

// want expects an error to have one of some codes.
func want(what string, err error, allowed ...codes.Code) error {
	if slices.Contains(allowed, status.Code(err)) {
		return nil
	}
	return fmt.Errorf("%s: %v, want %v", what, err, allowed)
}

// pick is one of the client's volumes for which a condition holds; nil if there is none.
func (c *client) pick(wanted func(v *volume) bool) *volume {
	from := c.random.IntN(len(c.volumes))
	for i := range c.volumes {
		if v := c.volumes[(from+i)%len(c.volumes)]; wanted(v) {
			return v
		}
	}
	return nil
}

func whichever(*volume) bool { return true }
func there(v *volume) bool   { return v.there }
func inUse(v *volume) bool   { return len(v.Pods) > 0 }

// newPod is one that has no volume yet.
func (c *client) newPod() string { return fmt.Sprintf("pod-%d-%d", c.number, c.done) }

// create makes a volume, or repeats what made it.
func (c *client) create(ctx context.Context) error {
	v := c.pick(whichever)
	if !v.there {
		c.size(v)
	}
	return c.make(ctx, v)
}

func (c *client) make(ctx context.Context, v *volume) error {
	var made *csi.CreateVolumeResponse
	if err := drivertest.Repeat(ctx, func() (err error) { made, err = c.Create(ctx, v.Volume); return err }); err != nil {
		return fmt.Errorf("create %s: %w", v.ID, err)
	}
	if !v.there {
		v.there, v.stamp = true, ""
	}
	return c.same(made.GetVolume(), v)
}

// same compares what is reported of a volume with what its client knows.
func (c *client) same(got *csi.Volume, v *volume) error {
	kept := v.Block || c.pool(v.Pool).Enforcement == "required"
	if got.GetVolumeId() != v.ID || got.GetCapacityBytes() != v.Bytes ||
		got.GetVolumeContext()["storagePool"] != v.Pool || got.GetVolumeContext()["sizeEnforced"] != fmt.Sprint(kept) {
		return fmt.Errorf("reported is %v, want %s in %s with %d bytes, enforced: %v", got, v.ID, v.Pool, v.Bytes, kept)
	}
	return nil
}

// remove deletes a volume, which is refused while it is in use.
func (c *client) remove(ctx context.Context) error {
	v := c.pick(there)
	if v == nil {
		return nil
	}
	err := drivertest.Repeat(ctx, func() error { return c.Delete(ctx, v.ID) })
	if inUse(v) {
		return want("delete "+v.ID+" in use", err, codes.FailedPrecondition)
	}
	v.there = err != nil
	return want("delete "+v.ID, err, codes.OK)
}

// publish publishes a volume for a pod and searches for what was written in it, or repeats that.
func (c *client) publish(ctx context.Context) error {
	v, pods := c.pick(there), 0
	for _, of := range c.volumes {
		pods += len(of.Pods)
	}
	if v == nil || pods >= published {
		return c.unpublish(ctx)
	}
	pod := c.newPod()
	if inUse(v) && c.random.IntN(3) == 0 {
		pod = v.Pods[0]
	}
	if err := drivertest.Repeat(ctx, func() error { return c.Publish(ctx, v.Volume, pod) }); err != nil {
		return fmt.Errorf("publish %s for %s: %w", v.ID, pod, err)
	}
	if !slices.Contains(v.Pods, pod) {
		v.Pods = append(v.Pods, pod)
	}
	if v.stamp != "" {
		return v.wantStamp(v.inside(c.Target(pod)))
	}
	return v.write(v.inside(c.Target(pod)), fmt.Sprintf("%s %d", v.ID, c.done))
}

// inside is the file that is written to where a volume is published.
func (v *volume) inside(target string) string {
	if v.Block {
		return target
	}
	return target + "/stamp"
}

func (v *volume) write(path, stamp string) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = file.WriteString(stamp)
	v.stamp = stamp
	return errors.Join(err, file.Sync(), file.Close())
}

// wantStamp expects the content to be what was written.
func (v *volume) wantStamp(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	got := make([]byte, len(v.stamp))
	if _, err := file.ReadAt(got, 0); err != nil || string(got) != v.stamp {
		return fmt.Errorf("%s holds %q, %v; want %q", path, got, err, v.stamp)
	}
	return nil
}

func (c *client) unpublish(ctx context.Context) error {
	v := c.pick(inUse)
	if v == nil {
		return nil
	}
	if err := v.wantStamp(v.inside(c.Target(v.Pods[0]))); err != nil {
		return err
	}
	return c.detach(ctx, v, v.Pods[0])
}

// detach takes a volume from a pod.
func (c *client) detach(ctx context.Context, v *volume, pod string) error {
	if err := drivertest.Repeat(ctx, func() error { return c.Unpublish(ctx, v.ID, pod) }); err != nil {
		return fmt.Errorf("unpublish %s from %s: %w", v.ID, pod, err)
	}
	v.Pods = slices.DeleteFunc(v.Pods, func(of string) bool { return of == pod })
	if _, err := os.Lstat(c.Target(pod)); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s was unpublished, and %s is there: %v", v.ID, c.Target(pod), err)
	}
	return nil
}

func (c *client) stats(ctx context.Context) error {
	v := c.pick(inUse)
	if v == nil {
		v = c.pick(whichever)
		_, err := c.Stats(ctx, v.ID, c.newPod())
		return want("stats of "+v.ID+", which is not published", err, codes.NotFound)
	}
	got, err := c.Stats(ctx, v.ID, v.Pods[0])
	if err != nil || got.GetUsage()[0].GetUnit() != csi.VolumeUsage_BYTES || oldcsi.Condition(got).GetAbnormal() {
		return fmt.Errorf("stats of %s: %v, %w, want bytes, in order", v.ID, got, err)
	}
	return nil
}

func (c *client) expand(ctx context.Context) error {
	v := c.pick(inUse)
	if v == nil {
		return nil
	}
	grown, allowed := v.Volume, codes.OK
	if grown.Bytes = min(most, grown.Bytes+c.random.Int64N(3)*unit); c.random.IntN(4) == 0 {
		grown.Bytes, allowed = 1<<50, codes.FailedPrecondition
	}
	err := drivertest.Repeat(ctx, func() error {
		_, err := c.Expand(ctx, grown, v.Pods[0])
		return err
	})
	if err == nil {
		v.Bytes = grown.Bytes
	}
	return want(fmt.Sprintf("expand %s to %d bytes", v.ID, grown.Bytes), err, allowed)
}

func (c *client) get(ctx context.Context) error {
	v := c.pick(whichever)
	got, err := c.Get(ctx, v.ID)
	if !v.there {
		return want("get "+v.ID+", which is not there", err, codes.NotFound)
	}
	if err != nil || (len(got.GetStatus().GetPublishedNodeIds()) > 0) != inUse(v) || oldcsi.Condition(got.GetStatus()).GetAbnormal() {
		return fmt.Errorf("get %s: %v, %w, want it in order, published: %v", v.ID, got, err, inUse(v))
	}
	return c.same(got.GetVolume(), v)
}

// list asks for all volumes, page by page, and expects the client's own to be there once.
func (c *client) list(ctx context.Context) error {
	all, err := c.List(ctx, 1+c.random.Int32N(500))
	if err != nil {
		return err
	}
	listed := make(map[string]int)
	for _, e := range all {
		listed[e.GetVolume().GetVolumeId()]++
	}
	for _, v := range c.volumes {
		if n := listed[v.ID]; n > 1 || (n == 1) != v.there {
			return fmt.Errorf("%s is listed %d times, want that it is there: %v", v.ID, n, v.there)
		}
	}
	return nil
}

// inline has a volume as long as a pod.
func (c *client) inline(ctx context.Context) error {
	pod := c.newPod()
	v := drivertest.Volume{ID: id("inline-"+pod, 0), Pool: c.pools[c.random.IntN(len(c.pools))].Name, Bytes: unit, Inline: true}
	if err := drivertest.Repeat(ctx, func() error { return c.Publish(ctx, v, pod) }); err != nil {
		return fmt.Errorf("publish %s inline: %w", v.ID, err)
	}
	if err := os.WriteFile(c.Target(pod)+"/file", []byte(v.ID), 0o600); err != nil {
		return err
	}
	if err := drivertest.Repeat(ctx, func() error { return c.Unpublish(ctx, v.ID, pod) }); err != nil {
		return fmt.Errorf("unpublish %s, which is inline: %w", v.ID, err)
	}
	_, err := c.Get(ctx, v.ID)
	return want("get "+v.ID+", which was inline", err, codes.NotFound)
}

// commonPod is where a client has a volume that others use too.
func (c *client) commonPod(v drivertest.Volume) string { return fmt.Sprintf("%s-%d", v.ID, c.number) }

// collide makes a call on a volume whose state no client knows.
func (c *client) collide(ctx context.Context) error {
	v := c.common[c.random.IntN(len(c.common))]
	pod := c.commonPod(v)
	switch c.random.IntN(7) {
	case 0, 1:
		made, err := c.Create(ctx, v)
		if err == nil && made.GetVolume().GetCapacityBytes() != v.Bytes {
			return fmt.Errorf("create %s: %v, want %d bytes", v.ID, made, v.Bytes)
		}
		return want("create "+v.ID, err, codes.OK, codes.Aborted)
	case 2:
		return want("delete "+v.ID, c.Delete(ctx, v.ID), codes.OK, codes.Aborted, codes.FailedPrecondition)
	case 3:
		return want("publish "+v.ID, c.Publish(ctx, v, pod), codes.OK, codes.Aborted, codes.NotFound)
	case 4:
		return want("unpublish "+v.ID, c.Unpublish(ctx, v.ID, pod), codes.OK, codes.Aborted)
	case 5:
		_, err := c.Stats(ctx, v.ID, pod)
		return want("stats of "+v.ID, err, codes.OK, codes.NotFound)
	}
	got, err := c.Get(ctx, v.ID)
	if err == nil && (got.GetVolume().GetCapacityBytes() != v.Bytes || oldcsi.Condition(got.GetStatus()).GetAbnormal()) {
		return fmt.Errorf("get %s: %v, want %d bytes, in order", v.ID, got, v.Bytes)
	}
	return want("get "+v.ID, err, codes.OK, codes.NotFound)
}

// rest makes all volumes of the client that are not there, and leaves none published.
func (c *client) rest(ctx context.Context) error {
	for _, v := range c.volumes {
		for len(v.Pods) > 0 {
			if err := c.detach(ctx, v, v.Pods[0]); err != nil {
				return err
			}
		}
		if !v.there {
			if err := c.make(ctx, v); err != nil {
				return err
			}
		}
	}
	return nil
}

// release takes the volumes that others use too from the client's pods.
func (c *client) release(ctx context.Context) error {
	for i := range c.common {
		// Not all clients at the same one.
		v := c.common[(c.number+i)%len(c.common)]
		if err := drivertest.Repeat(ctx, func() error { return c.Unpublish(ctx, v.ID, c.commonPod(v)) }); err != nil {
			return err
		}
	}
	return nil
}

func (c *client) deleteAll(ctx context.Context) error {
	for _, v := range c.volumes {
		if err := drivertest.Repeat(ctx, func() error { return c.Delete(ctx, v.ID) }); err != nil {
			return err
		}
		v.there = false
	}
	return nil
}
