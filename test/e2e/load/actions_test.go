package load

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

func (c *client) create(ctx context.Context) error {
	v := c.pick(absent)
	if v == nil {
		return c.get(ctx)
	}
	c.size(v)
	return c.make(ctx, v)
}

// createTogether makes a call several times at once, as external-provisioner does whose
// first attempt ran out of time. All that succeed have the same answer.
func (c *client) createTogether(ctx context.Context) error {
	v := c.pick(whichever)
	const times = 3
	answers, errs := make([]*csi.CreateVolumeResponse, times), make([]error, times)
	var calls sync.WaitGroup
	for i := range times {
		calls.Go(func() { answers[i], errs[i] = c.Create(ctx, v.Volume) })
	}
	calls.Wait()
	if err := c.make(ctx, v); err != nil {
		return err
	}
	var first *csi.CreateVolumeResponse
	for i := range times {
		if err := want("create "+v.ID+" several times at once", errs[i], codes.OK, codes.Aborted); err != nil {
			return err
		}
		switch {
		case errs[i] != nil:
		case first == nil:
			first = answers[i]
		case !proto.Equal(answers[i], first):
			return fmt.Errorf("create %s several times at once: %v and %v", v.ID, answers[i], first)
		}
	}
	if first == nil {
		return nil
	}
	return c.same(first.GetVolume(), v)
}

// remove deletes a volume, which is refused while it is in use.
func (c *client) remove(ctx context.Context) error {
	v := c.pick(there)
	if v == nil {
		return nil
	}
	err := drivertest.Repeat(ctx, func() error { return c.Delete(ctx, v.ID) })
	if len(v.pods) > 0 {
		return want("delete "+v.ID+" in use", err, codes.FailedPrecondition)
	}
	v.there = err != nil
	return want("delete "+v.ID, err, codes.OK)
}

func (c *client) publications() (n int) {
	for _, v := range c.volumes {
		n += len(v.pods)
	}
	return n
}

func (c *client) publish(ctx context.Context) error {
	v := c.pick(there)
	if v == nil || c.publications() >= published {
		return c.unpublish(ctx)
	}
	return c.attach(ctx, v, c.newPod(), c.flip())
}

// publishAgain repeats a call, as kubelet does each time that it starts.
func (c *client) publishAgain(ctx context.Context) error {
	v := c.pick(inUse)
	if v == nil {
		return nil
	}
	pod := c.pod(v)
	errs := make([]error, 2)
	var calls sync.WaitGroup
	for i := range errs {
		calls.Go(func() { errs[i] = c.mount(ctx, v.Volume, pod, v.pods[pod]) })
	}
	calls.Wait()
	for _, err := range errs {
		if err := want("publish "+v.ID+" twice at once", err, codes.OK, codes.Aborted); err != nil {
			return err
		}
	}
	return c.attach(ctx, v, pod, v.pods[pod])
}

func (c *client) unpublish(ctx context.Context) error {
	v := c.pick(inUse)
	if v == nil {
		return nil
	}
	pod := c.pod(v)
	if v.stamp != "" {
		if err := v.wantStamp(v.inside(c.Target(pod))); err != nil {
			return err
		}
	}
	return c.detach(ctx, v, pod)
}

func (c *client) stats(ctx context.Context) error {
	v := c.pick(inUse)
	if v == nil {
		v = c.pick(whichever)
		_, err := c.Stats(ctx, v.ID, c.newPod())
		return want("stats of "+v.ID+", which is not published", err, codes.NotFound)
	}
	got, err := c.Stats(ctx, v.ID, c.pod(v))
	if err != nil {
		return fmt.Errorf("stats of %s: %w", v.ID, err)
	}
	bytes := got.GetUsage()[0]
	kept := v.Block || c.place(v.Pool).kept()
	if bytes.GetUnit() != csi.VolumeUsage_BYTES || kept && bytes.GetTotal() != v.Bytes || oldcsi.Condition(got).GetAbnormal() {
		return fmt.Errorf("stats of %s: %v, want %d bytes, in order", v.ID, got, v.Bytes)
	}
	return nil
}

func (c *client) expand(ctx context.Context) error {
	v := c.pick(inUse)
	if v == nil {
		return nil
	}
	grown := v.Volume
	grown.Bytes = min(most, grown.Bytes+c.random.Int64N(3)*unit)
	pod, allowed := c.pod(v), codes.OK
	switch c.random.IntN(4) {
	case 0:
		grown.Bytes, allowed = 1<<50, codes.FailedPrecondition
	case 1:
		pod, allowed = c.newPod(), codes.NotFound
	}
	got, err := ask(ctx, func() (*csi.NodeExpandVolumeResponse, error) { return c.Expand(ctx, grown, pod) })
	if err := want(fmt.Sprintf("expand %s at %s from %d to %d bytes", v.ID, pod, v.Bytes, grown.Bytes), err, allowed); err != nil || allowed != codes.OK {
		return err
	}
	if v.Bytes = got.GetCapacityBytes(); v.Bytes != grown.Bytes {
		return fmt.Errorf("expand %s: %d bytes, want %d", v.ID, v.Bytes, grown.Bytes)
	}
	return nil
}

func (c *client) get(ctx context.Context) error {
	v := c.pick(whichever)
	got, err := c.Get(ctx, v.ID)
	if !v.there {
		return want("get "+v.ID+", which is not there", err, codes.NotFound)
	}
	if err != nil {
		return fmt.Errorf("get %s: %w", v.ID, err)
	}
	return errors.Join(c.same(got.GetVolume(), v), v.sameStatus(got.GetStatus().GetPublishedNodeIds(), oldcsi.Condition(got.GetStatus())))
}

// listPage asks for the next page of the list, and expects the client's own volumes to be
// on it that belong there.
func (c *client) listPage(ctx context.Context) error {
	request := &csi.ListVolumesRequest{MaxEntries: 1 + c.random.Int32N(500), StartingToken: c.token}
	page, err := c.Controller().ListVolumes(ctx, request)
	if err != nil {
		return fmt.Errorf("list after %s: %w", c.after, err)
	}
	listed := make(map[string]*csi.ListVolumesResponse_Entry)
	last := c.after
	for _, e := range page.GetEntries() {
		at := e.GetVolume().GetVolumeId()
		if at <= last {
			return fmt.Errorf("list: %s comes after %s", at, last)
		}
		last, listed[at] = at, e
	}
	if len(listed) > int(request.GetMaxEntries()) {
		return fmt.Errorf("list: a page of %d, want at most %d", len(listed), request.GetMaxEntries())
	}
	for _, v := range c.volumes {
		if v.ID <= c.after || v.ID > last && page.GetNextToken() != "" {
			continue
		}
		e := listed[v.ID]
		if (e != nil) != v.there {
			return fmt.Errorf("list from %s to %s: %s is %v, want that it is there: %v", c.after, last, v.ID, e, v.there)
		}
		if e == nil {
			continue
		}
		if err := errors.Join(c.same(e.GetVolume(), v), v.sameStatus(e.GetStatus().GetPublishedNodeIds(), oldcsi.Condition(e.GetStatus()))); err != nil {
			return fmt.Errorf("list: %w", err)
		}
	}
	c.token, c.after = page.GetNextToken(), last
	if c.token == "" {
		c.after = ""
	}
	return nil
}

// inline has a volume as long as a pod.
func (c *client) inline(ctx context.Context) error {
	pod := c.newPod()
	v := drivertest.Volume{ID: id("inline-"+pod, 0), Pool: c.places[c.random.IntN(len(c.places))].Name, Bytes: unit, Inline: true}
	if err := drivertest.Repeat(ctx, func() error { return c.Publish(ctx, v, pod) }); err != nil {
		return fmt.Errorf("publish %s inline: %w", v.ID, err)
	}
	if err := os.WriteFile(c.Target(pod)+"/file", []byte(v.ID), 0o600); err != nil {
		return err
	}
	got, err := c.Get(ctx, v.ID)
	if err != nil || got.GetVolume().GetCapacityBytes() != v.Bytes || len(got.GetStatus().GetPublishedNodeIds()) != 1 {
		return fmt.Errorf("get %s, which is inline: %v, %w", v.ID, got, err)
	}
	if err := drivertest.Repeat(ctx, func() error { return c.Unpublish(ctx, v.ID, pod) }); err != nil {
		return fmt.Errorf("unpublish %s, which is inline: %w", v.ID, err)
	}
	_, err = c.Get(ctx, v.ID)
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
