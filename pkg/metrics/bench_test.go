package metrics_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
)

// What Prometheus waits for, but for the network.
func BenchmarkScrape(b *testing.B) {
	for _, volumes := range []int{0, 10_000} {
		b.Run(fmt.Sprintf("%d volumes shown", volumes), func(b *testing.B) {
			shown := make([]pool.Surveyed, volumes)
			for i := range shown {
				shown[i] = pool.Surveyed{Pool: poolName("local"), ID: volumeID(fmt.Sprintf("pvc-%05d", i)), Bytes: 1 << 30, Used: 1 << 20, Inodes: 7}
			}
			m := metrics.New(metrics.Options{
				Pools:   func() []pool.Status { return []pool.Status{local} },
				Volumes: func() []pool.Surveyed { return shown },
			})
			handler := promhttp.HandlerFor(m.Gatherer(), promhttp.HandlerOpts{})
			for b.Loop() {
				response := httptest.NewRecorder()
				handler.ServeHTTP(response, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
				if response.Code != http.StatusOK {
					b.Fatal(response.Body.String())
				}
			}
		})
	}
}
