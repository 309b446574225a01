// health-monitor stands in for csi-external-health-monitor-controller: it lists
// the driver's volumes now and then, says on the claim of each abnormal one what is
// wrong with it, and says so of those that are well again. It goes by what
// docs/decisions/0017-health-monitor.md describes the real one, and proves nothing of that. Like that
// it is a client of CSI v1.12, and ends without the capability VOLUME_CONDITION.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"slices"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"

	"kubevirt.io/hostpath-provisioner/test/cluster/standin/sidecar"
	"kubevirt.io/hostpath-provisioner/test/oldcsi"
)

func main() {
	address := flag.String("csi-address", "/run/csi/socket", "socket of the driver")
	interval := flag.Duration("list-volumes-interval", 5*time.Minute, "how often to list the volumes")
	timeout := flag.Duration("timeout", 15*time.Second, "for a call to the driver")
	endpoint := flag.String("http-endpoint", "", "address to answer at /healthz on")
	flag.Int("v", 0, "how much is logged; without effect")
	flag.Parse()

	sidecar.Main(func(ctx context.Context) error {
		go func() {
			err := sidecar.ServeHealth(ctx, *endpoint, func(context.Context) error { return nil })
			if err != nil {
				log.Fatal(err)
			}
		}()
		return run(ctx, *address, *interval, *timeout)
	})
}

func run(ctx context.Context, address string, interval, timeout time.Duration) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	cluster, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	connection, err := sidecar.Dial(address)
	if err != nil {
		return err
	}
	name, err := sidecar.DriverName(ctx, connection)
	if err != nil {
		return err
	}
	can, err := oldcsi.Call(ctx, connection, "Controller", "ControllerGetCapabilities", "")
	if err != nil {
		return err
	}
	if !slices.Contains(oldcsi.Capabilities(can), "VOLUME_CONDITION") {
		return fmt.Errorf("driver %s has no VOLUME_CONDITION", name)
	}
	// Events that are the same are counted up, and not repeated.
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	defer broadcaster.Shutdown()
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: cluster.CoreV1().Events("")})
	m := monitor{driver: name, cluster: cluster, connection: connection}
	m.events = broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: m.component()})
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if err := m.check(ctx, timeout); err != nil {
			log.Print(err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// The reasons of the events.
const (
	abnormal = "VolumeConditionAbnormal"
	normal   = "VolumeConditionNormal"
)

type monitor struct {
	driver     string
	cluster    kubernetes.Interface
	connection *grpc.ClientConn
	events     record.EventRecorder
}

func (m monitor) component() string { return "csi-pv-monitor-controller-" + m.driver }

// check lists the volumes once. Those that are not in the list are passed over: they are
// other nodes'.
func (m monitor) check(ctx context.Context, timeout time.Duration) error {
	conditions, err := m.conditions(ctx, timeout)
	if err != nil || len(conditions) == 0 {
		return err
	}
	reported, err := m.reported(ctx)
	if err != nil {
		return err
	}
	volumes, err := m.cluster.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, volume := range volumes.Items {
		source, claim := volume.Spec.CSI, volume.Spec.ClaimRef
		if source == nil || source.Driver != m.driver || claim == nil {
			continue
		}
		condition, listed := conditions[source.VolumeHandle]
		switch {
		case !listed:
		case condition.GetAbnormal():
			m.events.Event(claim, corev1.EventTypeWarning, abnormal, condition.GetMessage())
		case reported[claim.UID]:
			m.events.Event(claim, corev1.EventTypeNormal, normal, "the volume is well again")
		}
	}
	return nil
}

// conditions are those of the driver's volumes, by their handle.
func (m monitor) conditions(ctx context.Context, timeout time.Duration) (map[string]*oldcsi.VolumeCondition, error) {
	found := map[string]*oldcsi.VolumeCondition{}
	for token := ""; ; {
		call, cancel := context.WithTimeout(ctx, timeout)
		next, err := oldcsi.List(call, m.connection, token, found)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("list the volumes: %w", err)
		}
		if token = next; token == "" {
			return found, nil
		}
	}
}

// reported are the claims of which it was said that their volume is abnormal, as long as that
// event is there.
func (m monitor) reported(ctx context.Context) (map[types.UID]bool, error) {
	events, err := m.cluster.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "reason=" + abnormal})
	if err != nil {
		return nil, err
	}
	claims := map[types.UID]bool{}
	for _, event := range events.Items {
		if event.Source.Component == m.component() {
			claims[event.InvolvedObject.UID] = true
		}
	}
	return claims, nil
}
