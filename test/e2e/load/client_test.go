package load

import (
	"context"
	"errors"
	"fmt"
	"maps"
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
	// token is where its walk over the list goes on, and after the last id that it met there.
	token, after string
}

// A volume is what its client knows of one.
type volume struct {
	drivertest.Volume // as it would be made, and with the size that it has
	there             bool
	pods              map[string]bool // where it is published, and whether that is read-only
	stamp             string          // what was written in it
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
	count := h.volumes / h.callers
	if number < h.volumes%h.callers {
		count++
	}
	for i := range count {
		v := &volume{pods: make(map[string]bool)}
		v.ID = id(fmt.Sprintf("c%02d", number), i)
		switch {
		case i == 0:
			v.Block = true
			v.Pool = h.places[number%len(h.places)].Name
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

// actions are what a client does, and how often of a hundred and some times.
var actions = []struct {
	name  string
	often int
	do    func(*client, context.Context) error
}{
	{"create", 10, (*client).create},
	{"create several times at once", 3, (*client).createTogether},
	{"delete", 10, (*client).remove},
	{"publish", 12, (*client).publish},
	{"publish again", 3, (*client).publishAgain},
	{"unpublish", 10, (*client).unpublish},
	{"stats", 15, (*client).stats},
	{"expand", 4, (*client).expand},
	{"get", 10, (*client).get},
	{"list", 2, (*client).listPage},
	{"inline", 2, (*client).inline},
	{"what others use too", 10, (*client).collide},
}

// act does one of them.
func (c *client) act(ctx context.Context) error {
	total := 0
	for _, a := range actions {
		total += a.often
	}
	at := c.random.IntN(total)
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

// ask makes a call until it is not in the way of another one.
func ask[T any](ctx context.Context, call func() (T, error)) (answer T, err error) {
	err = drivertest.Repeat(ctx, func() (err error) { answer, err = call(); return err })
	return answer, err
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
func absent(v *volume) bool  { return !v.there }
func inUse(v *volume) bool   { return len(v.pods) > 0 }

// pod is one of those that have a volume.
func (c *client) pod(v *volume) string {
	pods := slices.Sorted(maps.Keys(v.pods))
	return pods[c.random.IntN(len(pods))]
}

// newPod is one that has no volume yet.
func (c *client) newPod() string { return fmt.Sprintf("pod-%d-%d", c.number, c.done) }

func (c *client) flip() bool { return c.random.IntN(2) == 0 }

// make makes a volume, or repeats what made it.
func (c *client) make(ctx context.Context, v *volume) error {
	made, err := ask(ctx, func() (*csi.CreateVolumeResponse, error) { return c.Create(ctx, v.Volume) })
	if err != nil {
		return fmt.Errorf("create %s: %w", v.ID, err)
	}
	if !v.there {
		v.there, v.stamp = true, ""
	}
	return c.same(made.GetVolume(), v)
}

// same compares what is reported of a volume with what its client knows.
func (c *client) same(got *csi.Volume, v *volume) error {
	kept := v.Block || c.place(v.Pool).kept()
	if got.GetVolumeId() != v.ID || got.GetCapacityBytes() != v.Bytes ||
		got.GetVolumeContext()["storagePool"] != v.Pool || got.GetVolumeContext()["sizeEnforced"] != fmt.Sprint(kept) {
		return fmt.Errorf("reported is %v, want %s in %s with %d bytes, enforced: %v", got, v.ID, v.Pool, v.Bytes, kept)
	}
	return nil
}

// sameStatus is same for where a volume is published, and how it is.
func (v *volume) sameStatus(nodes []string, condition *oldcsi.VolumeCondition) error {
	if (len(nodes) > 0) != (len(v.pods) > 0) || condition.GetAbnormal() {
		return fmt.Errorf("%s is published on %q, want that it is: %v; %v", v.ID, nodes, len(v.pods) > 0, condition)
	}
	return nil
}

// attach publishes a volume for a pod and searches for what was written in it.
func (c *client) attach(ctx context.Context, v *volume, pod string, readOnly bool) error {
	if err := drivertest.Repeat(ctx, func() error { return c.mount(ctx, v.Volume, pod, readOnly) }); err != nil {
		return fmt.Errorf("publish %s for %s, read-only %v: %w", v.ID, pod, readOnly, err)
	}
	v.pods[pod] = readOnly
	if v.stamp != "" {
		return v.wantStamp(v.inside(c.Target(pod)))
	}
	if !readOnly {
		return v.write(v.inside(c.Target(pod)), fmt.Sprintf("%s %d", v.ID, c.done))
	}
	return nil
}

func (c *client) mount(ctx context.Context, v drivertest.Volume, pod string, readOnly bool) error {
	if readOnly {
		return c.PublishReadOnly(ctx, v, pod)
	}
	return c.Publish(ctx, v, pod)
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
	if v.Block {
		err = errors.Join(err, file.Sync()) // a device that reads has a cache of its own
	}
	if err = errors.Join(err, file.Close()); err == nil {
		v.stamp = stamp
	}
	return err
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

// detach takes a volume from a pod.
func (c *client) detach(ctx context.Context, v *volume, pod string) error {
	if err := drivertest.Repeat(ctx, func() error { return c.Unpublish(ctx, v.ID, pod) }); err != nil {
		return fmt.Errorf("unpublish %s from %s: %w", v.ID, pod, err)
	}
	delete(v.pods, pod)
	if _, err := os.Lstat(c.Target(pod)); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s was unpublished, and %s is there: %v", v.ID, c.Target(pod), err)
	}
	return nil
}

func (c *client) createAll(ctx context.Context) error {
	for _, v := range c.volumes {
		if v.there {
			continue
		}
		if err := c.make(ctx, v); err != nil {
			return err
		}
	}
	return nil
}

func (c *client) unpublishAll(ctx context.Context) error {
	for _, v := range c.volumes {
		for pod := range v.pods {
			if err := c.detach(ctx, v, pod); err != nil {
				return err
			}
		}
	}
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
