package metrics_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kubevirt.io/hostpath-provisioner/pkg/metrics"
)

// What Prometheus waits for, but for the network.
func BenchmarkScrape(b *testing.B) {
	for _, volumes := range []int{0, 10_000} {
		b.Run(fmt.Sprintf("%d volumes shown", volumes), func(b *testing.B) {
			shown := make([]metrics.Volume, volumes)
			for i := range shown {
				shown[i] = metrics.Volume{Pool: "local", Name: fmt.Sprintf("pvc-%05d", i), Capacity: 1 << 30, Used: 1 << 20, Inodes: 7}
			}
			m := metrics.New(metrics.Options{
				Pools:   func() []metrics.Pool { return []metrics.Pool{local} },
				Volumes: func() []metrics.Volume { return shown },
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
