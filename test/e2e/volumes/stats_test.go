package volumes

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// statsAreCheap compares NodeGetVolumeStats with a call that does nothing, one after
// the other. The volume has so many files that a walk would take a multiple of the bound.
// The fastest of each are compared: what else the machine does slows calls, which wait for
// two processes in turn, more than a walk.
func statsAreCheap(b *bench) {
	const (
		files  = 3000
		rounds = 101
		bound  = 5
	)
	b.create("full-of-files", 64*mib)
	path := b.publish("full-of-files", "pod")
	for i := range files {
		b.Must(os.WriteFile(filepath.Join(path, strconv.Itoa(i)), nil, 0o600))
	}
	identity := b.Identity()
	var empty, measured, walked []time.Duration
	for i := range rounds {
		empty = append(empty, b.duration(func() error {
			_, err := identity.Probe(b.Context(), &csi.ProbeRequest{})
			return err
		}))
		measured = append(measured, b.duration(func() error {
			_, err := b.Stats(b.Context(), "full-of-files", "pod")
			return err
		}))
		if i%50 == 0 {
			walked = append(walked, b.duration(func() error {
				return filepath.WalkDir(path, func(_ string, d os.DirEntry, err error) error {
					if err == nil {
						_, err = d.Info()
					}
					return err
				})
			}))
		}
	}
	least, got, walk := slices.Min(empty), slices.Min(measured), slices.Min(walked)
	b.Logf("Probe %v, NodeGetVolumeStats %v, a walk over %d files %v", least, got, files, walk)
	if got > bound*least {
		b.Errorf("NodeGetVolumeStats takes %v, more than %d times as long as Probe, %v", got, bound, least)
	}
	if walk < bound*least {
		b.Errorf("a walk over %d files takes %v: they are too few to show a difference from Probe, %v", files, walk, least)
	}
	b.unpublish("full-of-files", "pod")
}

func (b *bench) duration(call func() error) time.Duration {
	b.Helper()
	began := time.Now()
	b.Must(call())
	return time.Since(began)
}
