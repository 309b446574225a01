// health-monitor stands in for csi-external-health-monitor-controller: it lists
// the driver's volumes now and then, and says on the claim of each abnormal one
// what is wrong with it.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kubevirt.io/hostpath-provisioner/test/cluster/standin/sidecar"
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
	m := monitor{driver: name, cluster: cluster, connection: connection}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		if err := m.look(ctx, timeout); err != nil {
			log.Print(err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

type monitor struct {
	driver     string
	cluster    kubernetes.Interface
	connection *grpc.ClientConn
}

// look lists the volumes once.
func (m monitor) look(ctx context.Context, timeout time.Duration) error {
	abnormal, err := m.abnormal(ctx, timeout)
	if err != nil || len(abnormal) == 0 {
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
		if message, ok := abnormal[source.VolumeHandle]; ok {
			if err := m.tell(ctx, *claim, message); err != nil {
				return err
			}
		}
	}
	return nil
}

// abnormal is what is wrong with each volume with which something is.
func (m monitor) abnormal(ctx context.Context, timeout time.Duration) (map[string]string, error) {
	found := map[string]string{}
	for token := ""; ; {
		call, cancel := context.WithTimeout(ctx, timeout)
		page, err := csi.NewControllerClient(m.connection).ListVolumes(call, &csi.ListVolumesRequest{StartingToken: token})
		cancel()
		if err != nil {
			return nil, fmt.Errorf("list the volumes: %w", err)
		}
		for _, entry := range page.GetEntries() {
			if condition := entry.GetStatus().GetVolumeCondition(); condition.GetAbnormal() {
				found[entry.GetVolume().GetVolumeId()] = condition.GetMessage()
			}
		}
		if token = page.GetNextToken(); token == "" {
			return found, nil
		}
	}
}

func (m monitor) tell(ctx context.Context, claim corev1.ObjectReference, message string) error {
	now := metav1.Now()
	_, err := m.cluster.CoreV1().Events(claim.Namespace).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: claim.Name + "-", Namespace: claim.Namespace},
		InvolvedObject: claim,
		Type:           corev1.EventTypeWarning,
		Reason:         "VolumeConditionAbnormal",
		Message:        message,
		Source:         corev1.EventSource{Component: "csi-pv-monitor-controller-" + m.driver},
		FirstTimestamp: now,
		LastTimestamp:  now,
		Count:          1,
	}, metav1.CreateOptions{})
	return err
}
