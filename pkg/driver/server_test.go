package driver_test

import (
	"context"
	"io"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"kubevirt.io/hostpath-provisioner/pkg/driver"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestPanicFailsOneCall(t *testing.T) {
	log := &logged{}
	h := newHarness(t, setup{log: log.logger(2), hooks: hooks{publish: func(target bind.Target) {
		if filepath.Base(target.String()) == "cursed" {
			panic("a curse")
		}
	}}})
	h.create(t, "vol", "")
	for range 2 {
		_, err := h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("cursed")))
		wantCode(t, err, codes.Internal, "NodePublishVolume panicked")
	}
	answered, panicked := h.calls.seen()
	wantEqual(t, "the panics counted", panicked, []string{"NodePublishVolume", "NodePublishVolume"})
	wantEqual(t, "the calls counted", answered, []string{"CreateVolume OK", "NodePublishVolume Internal", "NodePublishVolume Internal"})
	line := log.line(t, "a curse")
	wantContains(t, line, `method="NodePublishVolume"`, `volume="vol"`)
	wantContains(t, log.String(), "server_test.go") // where it was

	h.publish(t, "vol", h.target("vol"))
	h.unpublish(t, "vol", h.target("vol"))
}

func TestStuckCallIsAnsweredAndKeepsLock(t *testing.T) {
	stuck := newGate("stuck")
	h := newHarness(t, setup{hooks: hooks{publish: stuck.publish}})
	h.create(t, "vol", "")
	hasty := *h
	hasty.serve(t, setup{config: driver.Config{CallLimit: time.Millisecond}}, time.Minute)

	_, err := hasty.NodePublishVolume(t.Context(), publishRequest("vol", h.target("stuck")))
	wantCode(t, err, codes.DeadlineExceeded)
	// It may be answered before it has begun.
	<-stuck.entered
	_, err = h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("stuck")))
	wantCode(t, err, codes.Aborted, "vol")

	close(stuck.open)
	hasty.stop()
	must.Succeed(t, <-hasty.served) // once the call has ended
	h.publish(t, "vol", h.target("stuck"))
}

func TestCallOutlivesItsCaller(t *testing.T) {
	held := newGate("held")
	h := newHarness(t, setup{hooks: hooks{publish: held.publish}})
	h.create(t, "vol", "")
	ctx, giveUp := context.WithCancel(t.Context())
	call := later(func() error { return must.Err(h.NodePublishVolume(ctx, publishRequest("vol", h.target("held")))) })
	<-held.entered
	giveUp()
	wantCode(t, <-call, codes.Canceled)
	_, err := h.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
	wantCode(t, err, codes.Aborted, "vol")
	close(held.open)
	h.stop()
	must.Succeed(t, <-h.served)
	wantEqual(t, "where it is published", h.mounts.published(t, h.path("local", ""), "vol"), []string{h.target("held")})
}

func TestShutdownWaitsForCalls(t *testing.T) {
	held := newGate("held")
	h := newHarness(t, setup{hooks: hooks{publish: held.publish}})
	h.create(t, "vol", "")
	call := later(func() error {
		return must.Err(h.NodePublishVolume(t.Context(), publishRequest("vol", h.target("held"))))
	})
	<-held.entered
	h.stop()
	refused(t, h.socket)
	select {
	case err := <-h.served:
		t.Fatalf("Serve answered %v before the call in flight had ended", err)
	default:
	}
	close(held.open)
	must.Succeed(t, <-call)
	must.Succeed(t, <-h.served)
	wantGone(t, h.socket)
}

// A connection on which nothing was ever sent, or only the beginning of HTTP/2, must not hold
// up the end of the process: kubelet's patience is 30 s for all of the pod.
func TestShutdownIgnoresIdleConnections(t *testing.T) {
	testenv.NeedTime(t)
	for name, sent := range map[string]string{"nothing sent": "", "preface sent": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, setup{})
			connection, err := net.Dial("unix", h.socket)
			must.Succeed(t, err)
			defer connection.Close()
			_, err = io.WriteString(connection, sent)
			must.Succeed(t, err)
			// The server writes its settings to a connection that it has accepted (RFC 9113, 3.4).
			_, err = io.ReadFull(connection, make([]byte, 1))
			must.Succeed(t, err)
			start := time.Now()
			h.stop()
			must.Succeed(t, <-h.served)
			if took := time.Since(start); took > 30*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

func TestShutdownTimeout(t *testing.T) {
	held := newGate("held")
	log := &logged{}
	h := newHarness(t, setup{hooks: hooks{publish: held.publish}})
	h.create(t, "vol", "")
	brief := *h
	brief.serve(t, setup{log: log.logger(0)}, time.Millisecond)
	call := later(func() error {
		return must.Err(brief.NodePublishVolume(t.Context(), publishRequest("vol", h.target("held"))))
	})
	<-held.entered
	brief.stop()
	must.Succeed(t, <-brief.served)
	wantCode(t, <-call, codes.Unavailable)
	wantContains(t, log.String(), "abandoned", "1ms")
	close(held.open)
}

func TestServeWithCanceledContext(t *testing.T) {
	h := newHarness(t, setup{})
	listener := must.Value(driver.Listen(t.Context(), filepath.Join(testenv.SocketDir(t), "s")))(t)
	server := driver.NewServer(driver.Config{Node: node(t, nodeName)}, h.set, h.calls, logger())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Succeed(t, server.Serve(ctx, listener, time.Minute))
	refused(t, listener.Addr().String())
}

func TestServeReportsSocketError(t *testing.T) {
	h := newHarness(t, setup{})
	listener, err := driver.Listen(t.Context(), filepath.Join(testenv.SocketDir(t), "s"))
	must.Succeed(t, err)
	must.Succeed(t, listener.Close())
	server := driver.NewServer(driver.Config{Node: node(t, nodeName)}, h.set, h.calls, logger())
	err = server.Serve(t.Context(), listener, time.Minute)
	if err == nil {
		t.Fatal("it served a socket that was closed")
	}
	wantContains(t, err.Error(), listener.Addr().String())
}
