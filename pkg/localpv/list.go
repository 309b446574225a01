package localpv

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/devices"
)

// A list is what the API server had when it was asked.
type list struct {
	number  int
	volumes []devices.Volume
	names   map[string]bool
	err     error
}

// lists has one list of all volumes be made at a time, whose answer all get that had asked before it was begun: each takes a request for
// each 500 volumes, of which the client makes 20 a second.
type lists struct {
	turn sync.Mutex

	mu      sync.Mutex
	asking  int
	started int
	last    list
}

// ask returns the last list if that was begun after it was called, and otherwise what make does.
func (l *lists) ask(ctx context.Context, listAll func() list) list {
	l.mu.Lock()
	l.asking++
	before := l.started
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.asking--; l.asking == 0 {
			l.last = list{} // it may be large
		}
	}()
	l.turn.Lock()
	defer l.turn.Unlock()
	l.mu.Lock()
	last := l.last
	if last.number <= before {
		l.started++
	}
	number := l.started
	l.mu.Unlock()
	if last.number > before {
		return last
	}
	found := listAll()
	if found.err != nil && ctx.Err() != nil { // who asked has gone, and not the API server
		return found
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	found.number = number
	l.last = found
	return found
}

// Volumes implements devices.API.
func (c *controller) Volumes(ctx context.Context) (volumes []devices.Volume, names map[string]bool, err error) {
	found := c.lists.ask(ctx, func() list { return c.listVolumes(ctx) })
	return found.volumes, found.names, found.err
}

func (c *controller) listVolumes(ctx context.Context) list {
	node := nodeMetadata(c.Node)
	if err := c.Get(ctx, client.ObjectKey{Name: c.Node}, node); err != nil {
		return list{err: err}
	}
	found := list{names: make(map[string]bool)}
	// Those that others have made have no label of ours, and PersistentVolumes cannot be selected by anything else.
	for page := (client.ListOptions{Limit: pageSize}); ; {
		pvs, err := c.page(ctx, &page)
		if err != nil {
			return list{err: err}
		}
		for n := range pvs.Items {
			found.names[pvs.Items[n].Name] = true
			if v, ok := volumeFor(node, &pvs.Items[n]); ok {
				found.volumes = append(found.volumes, v)
			}
		}
		if page.Continue = pvs.Continue; page.Continue == "" {
			return found
		}
	}
}

func (c *controller) page(ctx context.Context, options *client.ListOptions) (pvs corev1.PersistentVolumeList, err error) {
	ctx, cancel := context.WithTimeout(ctx, answer)
	defer cancel()
	return pvs, c.fresh.List(ctx, &pvs, options)
}
