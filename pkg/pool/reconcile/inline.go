package reconcile

import (
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/bind"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// leftBehindAfter is when an inline volume that is published nowhere counts as left behind.
// Kubelet publishes one right after its creation, unpublishing removes it, and after a reboot
// kubelet publishes it again or unpublishes it.
const leftBehindAfter = time.Hour

// LeftBehind reports whether a volume is inline, and neither a pod nor kubelet will come for
// it: kubelet knows pods by their directories on this node, and those are gone. The caller
// holds no lock.
func (l *Listing) LeftBehind(id volume.ID, e store.Entry) bool {
	// A clock that was far ahead when the volume was made says nothing of its age.
	if !e.Inline() || min(time.Since(e.Record.Created).Abs(), l.In.SinceBoot()) < leftBehindAfter {
		return false
	}
	if l.Published == nil && l.readPublished() != nil || l.isPublished(id) {
		return false
	}
	// Unpublishing unmounts a volume before it removes it, and holds the lock meanwhile.
	unlock, err := l.In.Lock(id)
	if err != nil {
		return false
	}
	defer unlock()
	exists, err := l.In.Store.Root().Exists(id.String())
	return err == nil && exists && l.readPublished() == nil && !l.isPublished(id)
}

// readPublished reads where the volumes of the pool are published.
func (l *Listing) readPublished() (err error) {
	if l.Published, err = l.In.Host.Mounts.Published(l.In.Store.Root()); err != nil {
		return err
	}
	if l.Published == nil {
		l.Published = make(map[string][]bind.Publication)
	}
	l.Elsewhere, err = l.In.Store.Nodes().PublishedElsewhere()
	return err
}

func (l *Listing) isPublished(id volume.ID) bool {
	return len(l.Published[id.String()])+len(l.Elsewhere[id.String()]) > 0
}

// SinceBoot is how long the node is up, suspension included (sysinfo(2)).
func SinceBoot() time.Duration {
	var info syscall.Sysinfo_t
	if err := syscall.Sysinfo(&info); err != nil {
		return 0
	}
	return time.Duration(info.Uptime) * time.Second
}
