package volumes

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// Pods that share a claim start together: kubelet publishes its volume at all their targets at
// once. None is refused, since kubelet would come back half a second later.
func TestPublishAtSeveralTargetsAtOnce(t *testing.T) {
	driver := drivertest.Built(t)
	pool := drivertest.Pool{PoolConfig: drivertest.PoolConfig{Name: "local", Path: testenv.LoopFS(t, "ext4", 256*mib)}}
	d := drivertest.Start(t, drivertest.Config{Binary: driver, Pools: []drivertest.PoolConfig{pool.PoolConfig}})
	pool.Driver = d
	for name, block := range map[string]bool{"directory": false, "block": true} {
		for _, count := range []int{2, 16} {
			t.Run(fmt.Sprintf("%s, %d targets", name, count), func(t *testing.T) {
				d.TB = t
				v := volume("pvc-"+name, 16*mib)
				v.Block = block
				d.Must(second(d.Create(t.Context(), v)))
				var pods []string
				for i := range count {
					pods = append(pods, fmt.Sprintf("pod-%d", i))
				}
				publish := func(pod string) error { return d.Publish(t.Context(), v, pod) }
				undo := func() {
					d.Must(pool.MountedAndAttached([]drivertest.Kept{{Volume: v, Pods: pods}}))
					unpublishAll(d, v, pods)
				}
				inTurn, atOnce := shortest(func() {
					for _, pod := range pods {
						d.Must(publish(pod))
					}
				}, func() { d.Together(pods, publish) }, undo)
				ratio := float64(atOnce) / float64(inTurn)
				t.Logf("%d targets at once take %.2f times as long as one after another (%v)", count, ratio, inTurn)
				if ratio > mostAtOnce {
					t.Errorf("%d targets at once take %.2f times as long as one after another, want at most %v times", count, ratio, mostAtOnce)
				}
				d.Must(d.Delete(t.Context(), v.ID))
			})
			d.TB = t
		}
	}
}

// TestPublicationsDoNotExcludeEachOther has 16 pods of 4 claims begin and end, each again and again.
func TestPublicationsDoNotExcludeEachOther(t *testing.T) {
	const volumes, pods, times = 4, 16, 16
	pool := drivertest.PoolConfig{Name: "local", Path: testenv.LoopFS(t, "ext4", 256*mib)}
	d := drivertest.Start(t, drivertest.Config{Binary: drivertest.Built(t), Pools: []drivertest.PoolConfig{pool}})
	for _, block := range []bool{false, true} {
		var all []drivertest.Volume
		for n := range volumes {
			v := volume(fmt.Sprint("pvc-", n), 16*mib)
			v.Block = block
			d.Must(second(d.Create(t.Context(), v)))
			all = append(all, v)
		}
		of := make(map[string]drivertest.Volume)
		for n := range pods {
			of[fmt.Sprint("pod-", n)] = all[n%volumes]
		}
		d.Together(slices.Collect(maps.Keys(of)), func(pod string) error {
			for range times {
				if err := d.Publish(t.Context(), of[pod], pod); err != nil {
					return err
				}
				if err := d.Unpublish(t.Context(), of[pod].ID, pod); err != nil {
					return err
				}
			}
			return nil
		})
		for _, v := range all {
			d.Must(d.Delete(t.Context(), v.ID))
		}
		d.AwaitNoTrash(pool.Path)
	}
}

// mostAtOnce is how much longer publications may take that get in each other's way, on a busy machine too. Kubelet comes
// back to one that is refused after half a second, which is hundreds of times as long.
const mostAtOnce = 10.0

// shortest are the times of the fastest of some runs of each way, in turns, so that a machine that is busy meets both. While
// they differ by too much there are more.
func shortest(inTurn, atOnce, undo func()) (fastestInTurn, fastestAtOnce time.Duration) {
	const least, most = 5, 50
	timed := func(run func()) time.Duration {
		began := time.Now()
		run()
		took := time.Since(began)
		undo()
		return took
	}
	fastestInTurn, fastestAtOnce = time.Hour, time.Hour
	for i := 0; i < least || i < most && float64(fastestAtOnce) > mostAtOnce*float64(fastestInTurn); i++ {
		fastestInTurn, fastestAtOnce = min(fastestInTurn, timed(inTurn)), min(fastestAtOnce, timed(atOnce))
	}
	return fastestInTurn, fastestAtOnce
}

func unpublishAll(d *drivertest.Driver, v drivertest.Volume, pods []string) {
	d.Helper()
	for _, pod := range pods {
		d.Must(d.Unpublish(d.Context(), v.ID, pod))
	}
}

func second[T any](_ T, err error) error { return err }
