package load

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
)

// A call is under way on a volume.
type call struct {
	volume string
	target string // of one that publishes or unpublishes; all others need the volume alone
	met    bool   // one that excludes it was under way at some time meanwhile
}

func (c *call) excludes(other *call) bool {
	return c.volume == other.volume && (c.target == other.target || c.target == "" || other.target == "")
}

// calls are those under way, of all clients.
type calls struct {
	mu  sync.Mutex
	all []*call
}

func (u *calls) begin(volume, target string) *call {
	u.mu.Lock()
	defer u.mu.Unlock()
	c := &call{volume: volume, target: target}
	for _, other := range u.all {
		if c.excludes(other) {
			c.met, other.met = true, true
		}
	}
	u.all = append(u.all, c)
	return c
}

func (u *calls) end(c *call) (met bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.all = slices.DeleteFunc(u.all, func(one *call) bool { return one == c })
	return c.met
}

// exclusive makes a call, which may be ABORTED only if another was under way at the same target, or on the same volume if one of
// the two neither publishes nor unpublishes. If it is for no reason, the error has another code.
func exclusive[T any](h *harness, volume, target string, do func() (T, error)) (T, error) {
	c := h.calls.begin(volume, target)
	answer, err := do()
	if met := h.calls.end(c); status.Code(err) == codes.Aborted && !met {
		return answer, fmt.Errorf("no call that excludes this one was under way: %v", err)
	}
	return answer, err
}

func refusable(h *harness, volume, target string, do func() error) error {
	_, err := exclusive(h, volume, target, func() (struct{}, error) { return struct{}{}, do() })
	return err
}

// Create is the driver's.
func (h *harness) Create(ctx context.Context, v drivertest.Volume) (*csi.CreateVolumeResponse, error) {
	return exclusive(h, v.ID, "", func() (*csi.CreateVolumeResponse, error) { return h.Driver.Create(ctx, v) })
}

// Delete is the driver's.
func (h *harness) Delete(ctx context.Context, id string) error {
	return refusable(h, id, "", func() error { return h.Driver.Delete(ctx, id) })
}

// Publish is the driver's.
func (h *harness) Publish(ctx context.Context, v drivertest.Volume, pod string) error {
	return refusable(h, v.ID, pod, func() error { return h.Driver.Publish(ctx, v, pod) })
}

// PublishReadOnly is the driver's.
func (h *harness) PublishReadOnly(ctx context.Context, v drivertest.Volume, pod string) error {
	return refusable(h, v.ID, pod, func() error { return h.Driver.PublishReadOnly(ctx, v, pod) })
}

// Unpublish is the driver's.
func (h *harness) Unpublish(ctx context.Context, id, pod string) error {
	return refusable(h, id, pod, func() error { return h.Driver.Unpublish(ctx, id, pod) })
}

// Expand is the driver's.
func (h *harness) Expand(ctx context.Context, v drivertest.Volume, pod string) (*csi.NodeExpandVolumeResponse, error) {
	return exclusive(h, v.ID, "", func() (*csi.NodeExpandVolumeResponse, error) { return h.Driver.Expand(ctx, v, pod) })
}
