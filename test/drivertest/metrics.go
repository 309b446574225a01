package drivertest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
)

// ServeMetrics has the driver serve its metrics. The port is any: there may be several drivers.
const ServeMetrics = "--metrics-address=127.0.0.1:0"

var metricsAddress = regexp.MustCompile(`"Serving metrics" address="([^"]+)"`)

// Scraper is what Prometheus connects with. The driver's certificate is its own.
func Scraper() *http.Transport {
	return &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} //nolint:gosec // see above
}

// Metrics is what Prometheus gets of a driver with ServeMetrics, over a connection of its own.
func (c *Client) Metrics(ctx context.Context) (string, error) {
	scraper := Scraper()
	defer scraper.CloseIdleConnections()
	return c.Scrape(ctx, scraper)
}

// Scrape is Metrics over a connection that is kept.
func (c *Client) Scrape(ctx context.Context, scraper *http.Transport) (string, error) {
	found := metricsAddress.FindAllStringSubmatch(c.Process.Log(), -1) // of each start
	if found == nil {
		return "", errors.New("the driver does not say where it serves metrics")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+found[len(found)-1][1]+"/metrics", http.NoBody)
	if err != nil {
		return "", err
	}
	response, err := scraper.RoundTrip(request)
	if err != nil {
		return "", err
	}
	body, err := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK {
		err = errors.Join(err, fmt.Errorf("the metrics are answered by %s", response.Status))
	}
	return string(body), errors.Join(err, response.Body.Close())
}
