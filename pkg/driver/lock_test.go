package driver_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// later makes a call that may be held; its error comes through the channel.
func later(call func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	return done
}

func TestSecondCallOnVolumeIsAborted(t *testing.T) {
	held := newGate("held")
	h := newHarness(t, setup{hooks: hooks{publish: held.publish}})
	h.create(t, "vol", "")
	h.create(t, "second", "")
	first := later(func() error {
		return must.Err(h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("held"))))
	})
	<-held.entered

	for name, call := range map[string]func() error{
		"CreateVolume": func() error { return must.Err(h.CreateVolume(t.Context(), createRequest("vol"))) },
		"DeleteVolume": func() error { return must.Err(h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})) },
		"NodePublishVolume at the same target": func() error {
			return must.Err(h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("held"))))
		},
		"NodePublishVolume that allows no other target": func() error {
			return must.Err(h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("free"), singleWriter)))
		},
		"NodeExpandVolume": func() error {
			return must.Err(h.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: "vol", VolumePath: h.target("held")}))
		},
		"NodeUnpublishVolume at the same target": func() error {
			return must.Err(h.NodeUnpublishVolume(t.Context(), unpublishRequest("vol", h.target("held"))))
		},
	} {
		t.Run(name, func(t *testing.T) { wantCode(t, call(), codes.Aborted, "vol") })
	}
	t.Run("another volume at the same target", func(t *testing.T) {
		_, err := h.NodePublishVolume(t.Context(), publishRequest("second", h.target("held")))
		wantCode(t, err, codes.Aborted, h.target("held"))
	})
	t.Run("the volume at another target", func(t *testing.T) {
		h.publish(t, "vol", h.target("sibling"))
		wantEqual(t, "where it is published", h.mounts.published(t, h.path("local", ""), "vol"), []string{h.target("sibling")})
		h.publish(t, "vol", h.target("ending"))
		h.unpublish(t, "vol", h.target("ending"))
		wantEqual(t, "where it is published", h.mounts.published(t, h.path("local", ""), "vol"), []string{h.target("sibling")})
	})
	t.Run("other volumes do not wait", func(t *testing.T) {
		h.create(t, "third", "")
		h.publish(t, "second", h.target("free"))
		h.unpublish(t, "second", h.target("free"))
		must.Succeed(t, must.Err(h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "third"})))
	})
	t.Run("calls that change nothing do not wait", func(t *testing.T) {
		wantEqual(t, "all volumes", h.ids(t), []string{"second", "vol"})
		if h.volume(t, "vol") == nil {
			t.Error("the volume is not found")
		}
		_, err := h.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
		must.Succeed(t, err)
		_, err = h.ValidateVolumeCapabilities(t.Context(), validateRequest("vol", writer()))
		must.Succeed(t, err)
		_, err = h.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol", VolumePath: h.target("held")})
		wantCode(t, err, codes.NotFound)
	})

	close(held.open)
	must.Succeed(t, <-first)
	h.publish(t, "vol", h.target("held"))
	h.unpublish(t, "vol", h.target("held"))
	h.unpublish(t, "vol", h.target("sibling"))
}

func singleWriter(req *csi.NodePublishVolumeRequest) {
	req.VolumeCapability = capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER)
}

func TestExclusivePublishLocksOutOtherTargets(t *testing.T) {
	held := newGate("held")
	h := newHarness(t, setup{hooks: hooks{publish: held.publish}})
	h.create(t, "vol", "")
	first := later(func() error {
		return must.Err(h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("held"), singleWriter)))
	})
	<-held.entered
	_, err := h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("free")))
	wantCode(t, err, codes.Aborted, "vol")
	close(held.open)
	must.Succeed(t, <-first)
}

// The mark of a node in a shared pool stays while another publication needs it.
func TestFailedPublicationKeepsMarkOfOther(t *testing.T) {
	held := newGate("held")
	pools := `[{"name":"everywhere","path":"` + t.TempDir() + `","shared":true}]`
	a := newHarness(t, setup{pools: pools, node: "node-a", hooks: hooks{publish: held.publish}})
	b := newHarness(t, setup{pools: pools, node: "node-b"})
	a.create(t, "vol", "")
	first := later(func() error {
		return must.Err(a.NodePublishVolume(t.Context(), publishRequest("vol", a.target("held"))))
	})
	<-held.entered
	_, err := a.NodePublishVolume(t.Context(), publishRequest("vol", a.target("missing/target")))
	wantCode(t, err, codes.InvalidArgument)
	_, err = b.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	wantCode(t, err, codes.FailedPrecondition, "node-a")
	close(held.open)
	must.Succeed(t, <-first)
	a.unpublish(t, "vol", a.target("held"))
	_, err = a.NodePublishVolume(t.Context(), publishRequest("vol", a.target("missing/target")))
	wantCode(t, err, codes.InvalidArgument)
	_, err = b.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	must.Succeed(t, err)
}

// A pod ends while another begins: the mark stays for that, which nothing shows yet.
func TestUnpublishKeepsMarkOfPublicationUnderWay(t *testing.T) {
	held := newGate("held")
	pools := `[{"name":"everywhere","path":"` + t.TempDir() + `","shared":true}]`
	a := newHarness(t, setup{pools: pools, node: "node-a", hooks: hooks{publish: held.publish}})
	b := newHarness(t, setup{pools: pools, node: "node-b"})
	a.create(t, "vol", "")
	a.publish(t, "vol", a.target("ending"))
	first := later(func() error {
		return must.Err(a.NodePublishVolume(t.Context(), publishRequest("vol", a.target("held"))))
	})
	<-held.entered
	a.unpublish(t, "vol", a.target("ending"))
	_, err := b.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	wantCode(t, err, codes.FailedPrecondition, "node-a")
	close(held.open)
	must.Succeed(t, <-first)
	_, err = b.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	wantCode(t, err, codes.FailedPrecondition, "node-a")
	a.unpublish(t, "vol", a.target("held"))
	_, err = b.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	must.Succeed(t, err)
}

// Pods of one claim begin and end at the same time, while checks of the pool are under way all the time: no call is refused.
func TestCallsAtDifferentTargetsDoNotExcludeEachOther(t *testing.T) {
	testenv.NeedTime(t)
	always := func(o *pool.Options) { o.CheckEvery, o.SyncEvery = time.Millisecond, time.Millisecond }
	for kind, c := range map[string]struct {
		pool       string
		capability *csi.VolumeCapability
	}{"directories": {"local", writer()}, "directories of several nodes": {"everywhere", writer()}, "block devices": {"local", block()}} {
		t.Run(kind, func(t *testing.T) {
			h := newHarness(t, setup{pools: severalPool, options: always})
			const volumes, inFlight = 4, 16
			create := func(name string) error {
				req := createRequest(name, inPool(c.pool))
				req.VolumeCapabilities = []*csi.VolumeCapability{c.capability}
				return must.Err(h.CreateVolume(t.Context(), req))
			}
			for n := range volumes {
				must.Succeed(t, create(fmt.Sprint("vol-", n)))
			}
			for calling, run := range map[string]struct {
				calls int
				both  func(n int) error
			}{
				"publish and unpublish": {512, func(n int) error {
					id, target := fmt.Sprint("vol-", n%volumes), h.target(fmt.Sprint("pod-", n))
					err := must.Err(h.NodePublishVolume(t.Context(), publishRequest(id, target, func(req *csi.NodePublishVolumeRequest) { req.VolumeCapability = c.capability })))
					if err == nil {
						_, err = h.NodeUnpublishVolume(t.Context(), unpublishRequest(id, target))
					}
					return err
				}},
				"create and delete": {128, func(n int) error {
					name := fmt.Sprint("new-", n)
					err := create(name)
					if err == nil {
						_, err = h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: name})
					}
					return err
				}},
			} {
				t.Run(calling, func(t *testing.T) {
					var refused atomic.Int64
					var workers sync.WaitGroup
					for n := range inFlight {
						workers.Go(func() {
							for range run.calls / inFlight / 2 {
								if err := run.both(n); err != nil {
									t.Error(err)
									refused.Add(1)
								}
							}
						})
					}
					workers.Wait()
					t.Logf("%d of %d calls with %d in flight were refused", refused.Load(), run.calls, inFlight)
				})
			}
		})
	}
}
