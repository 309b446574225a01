package move

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/api/v1alpha1"
	"kubevirt.io/hostpath-provisioner/pkg/operator/move/measure"
)

// listing is how long a scrape waits for the cache, which answers at once unless it is being filled.
const listing = 2 * time.Second

var errNotElected = errors.New("another operator moves volumes")

// Metrics are of the VolumeMoves that a cache has at a scrape, once the channel is closed: of several operators one moves volumes.
func Metrics(moves client.Reader, elected <-chan struct{}, now func() time.Time) prometheus.Collector {
	var phases []string
	for _, phase := range v1alpha1.Phases {
		phases = append(phases, string(phase))
	}
	return measure.New(phases, func() ([]measure.Move, error) {
		select {
		case <-elected:
		default:
			return nil, errNotElected
		}
		ctx, cancel := context.WithTimeout(context.Background(), listing)
		defer cancel()
		all := &v1alpha1.VolumeMoveList{}
		if err := moves.List(ctx, all); err != nil {
			return nil, err
		}
		var found []measure.Move
		for i := range all.Items {
			found = append(found, measured(&all.Items[i], now()))
		}
		return found, nil
	})
}

func measured(m *v1alpha1.VolumeMove, now time.Time) measure.Move {
	found := measure.Move{
		Namespace: m.Namespace, Name: m.Name, Phase: string(cmp.Or(m.Status.Phase, v1alpha1.Pending)), Running: m.Underway(),
		Source: m.Status.SourceNode, Target: m.Status.TargetNode, Remaining: m.Status.BytesToGo,
	}
	if since := fencedSince(m); since != nil {
		found.Fenced = ptr.To(max(0, now.Sub(since.Time)))
	}
	if last := m.Status.LastProgressTime; last != nil {
		found.Idle = ptr.To(max(0, now.Sub(last.Time)))
	}
	return found
}
