package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
)

// manifestFlags are flags of deploy/csi that take memory. The port is any: there are several
// drivers.
var manifestFlags = []string{"--v=2", "--metrics-address=127.0.0.1:0"}

// scrapes are so many that the driver's memory has seen what each of them takes.
const scrapes = 20

// isWatched has done to a driver what is done to it all day: external-health-monitor asks
// for all volumes, in pages as large as the driver likes, and Prometheus for the metrics.
func (a *actor) isWatched(ctx context.Context) error {
	if _, err := a.List(ctx, 0); err != nil {
		return err
	}
	for range scrapes {
		if err := a.scrape(ctx); err != nil {
			return err
		}
	}
	return nil
}

var metricsAddress = regexp.MustCompile(`"Serving metrics" address="([^"]+)"`)

// scrape asks for the metrics at where the driver said last that they are.
func (a *actor) scrape(ctx context.Context) error {
	found := metricsAddress.FindAllStringSubmatch(a.Process.Log(), -1)
	if found == nil {
		return errors.New("the driver does not say where it serves metrics")
	}
	// The certificate is the driver's own.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // see above
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+found[len(found)-1][1]+"/metrics", http.NoBody)
	if err != nil {
		return err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the metrics are answered by %s", response.Status)
	}
	_, err = io.Copy(io.Discard, response.Body)
	return err
}

// memory is a size that the kernel reports of the driver's process (proc_pid_status(5)).
func (a *actor) memory(field string) measureFunc {
	return func(context.Context) (float64, error) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.Process.Pid()))
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, field+":"); ok {
				var kib float64
				_, err := fmt.Sscanf(value, "%f kB", &kib)
				return kib / 1024, err
			}
		}
		return 0, fmt.Errorf("the kernel reports no %s of process %d", field, a.Process.Pid())
	}
}
