package metrics_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"kubevirt.io/hostpath-provisioner/pkg/health"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
	"kubevirt.io/hostpath-provisioner/pkg/metrics"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/ledger"
	"kubevirt.io/hostpath-provisioner/pkg/tlsprofile"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
	"kubevirt.io/hostpath-provisioner/test/must"
)

// serve serves metrics with TLS until the test ends, and answers the address.
func serve(t *testing.T, m *metrics.Metrics, config metrics.TLS) (address string) {
	t.Helper()
	listener := listen(t)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	served := make(chan error, 1)
	go func() { served <- m.Serve(ctx, listener, config) }()
	t.Cleanup(func() {
		stop()
		must.Succeed(t, <-served)
	})
	return listener.Addr().String()
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	return listener
}

func wantClosed(t *testing.T, listener net.Listener) {
	t.Helper()
	if _, err := listener.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener answers %v, want it closed", err)
	}
}

func noPools() []pool.Status { return nil }

// anyCertificate is a client's configuration that checks no certificate.
func anyCertificate() *tls.Config { return &tls.Config{InsecureSkipVerify: true} }

// get asks for a path with a connection of its own.
func get(t *testing.T, address, path string, config *tls.Config) (*http.Response, string) {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+path, http.NoBody)
	must.Succeed(t, err)
	response, err := transport.RoundTrip(request)
	must.Succeed(t, err)
	body, err := io.ReadAll(response.Body)
	must.Succeed(t, err)
	must.Succeed(t, response.Body.Close())
	return response, string(body)
}

// scrape is what Prometheus gets.
func scrape(t *testing.T, address string) string {
	t.Helper()
	response, body := get(t, address, "/metrics", anyCertificate())
	if response.StatusCode != http.StatusOK {
		t.Fatalf("the scrape is answered with %s: %s", response.Status, body)
	}
	return body
}

// series are the lines that begin with a name, sorted.
func series(scraped, name string) []string {
	var lines []string
	for line := range strings.Lines(scraped) {
		if strings.HasPrefix(line, name) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	slices.Sort(lines)
	return lines
}

func poolName(name string) volume.PoolName {
	parsed, err := volume.ParsePoolName(name)
	if err != nil {
		panic(err)
	}
	return parsed
}

func volumeID(name string) volume.ID {
	parsed, err := volume.ParseID(name)
	if err != nil {
		panic(err)
	}
	return parsed
}

// local is a pool of which all is known, and away one that does not serve.
var (
	local = pool.Status{
		Name: poolName("local"), Enforced: true, Volumes: 3, Promised: 5 << 30,
		Space: &dir.Space{SizeBytes: 10 << 30, FreeBytes: 4 << 30, Inodes: 1000, InodesFree: 900}, Errors: 2,
		Available: 3 << 30, Counted: pool.Counted{Used: 1 << 30, Unlimited: 1, Unused: 2 << 30, Upstream: 5},
		Trash:      ledger.TrashSum{Pieces: 2, Stuck: 1, Bytes: 1 << 20, Since: time.Unix(1700000000, 5e8)},
		SharesWith: []volume.PoolName{poolName("bare")}, Restored: 4, Erased: pool.Erased{Files: 70, Volumes: 6}, LastError: time.Unix(1600000000, 0),
		Abnormal:  map[health.Reason]int{"NoSpace": 1, "DirectoryMissing": 0},
		Snapshots: ledger.SnapshotSum{Count: 7, Lost: 2, Promised: 4096, PointInTime: 2, CrashConsistent: 1, Unverified: 3},
		Copies: pool.Copies{Running: 1, Done: map[volume.CopyMethod]pool.CopySum{
			volume.ByReference: {Count: 6, Failed: 2, Took: 1500 * time.Millisecond, Stalled: 250 * time.Millisecond},
		}},
	}
	away = pool.Status{Name: poolName("away"), Err: volume.ErrUnavailable, Trash: ledger.TrashSum{Bytes: volume.Unknown},
		Counted: pool.Counted{Used: volume.Unknown, Unlimited: volume.Unknown, Unused: volume.Unknown, Upstream: volume.Unknown}}
)

func TestPools(t *testing.T) {
	var pools []pool.Status
	address := serve(t, metrics.New(metrics.Options{Pools: func() []pool.Status { return pools }}), metrics.TLS{})
	// bare is on a filesystem that is read-only, and counts no inodes and no errors.
	bare := pool.Status{
		Name: poolName("bare"), SystemDisk: true, Counted: pool.Counted{Used: volume.Unknown, Upstream: volume.Unknown},
		Space: &dir.Space{SizeBytes: 1024, FreeBytes: 512, ReadOnly: true}, Errors: volume.Unknown,
	}
	all := []string{
		`hostpath_pool_abnormal_volumes{pool="local",reason="DirectoryMissing"} 0`,
		`hostpath_pool_abnormal_volumes{pool="local",reason="NoSpace"} 1`,
		`hostpath_pool_available_bytes{pool="local"} 3.221225472e+09`,
		`hostpath_pool_copies_in_progress{pool="local"} 1`,
		`hostpath_pool_copy_duration_seconds_count{method="copy",pool="local"} 0`,
		`hostpath_pool_copy_duration_seconds_count{method="reflink",pool="local"} 6`,
		`hostpath_pool_copy_duration_seconds_count{method="subvolume",pool="local"} 0`,
		`hostpath_pool_copy_duration_seconds_sum{method="copy",pool="local"} 0`,
		`hostpath_pool_copy_duration_seconds_sum{method="reflink",pool="local"} 1.5`,
		`hostpath_pool_copy_duration_seconds_sum{method="subvolume",pool="local"} 0`,
		`hostpath_pool_copy_stall_seconds_count{method="copy",pool="local"} 0`,
		`hostpath_pool_copy_stall_seconds_count{method="reflink",pool="local"} 6`,
		`hostpath_pool_copy_stall_seconds_count{method="subvolume",pool="local"} 0`,
		`hostpath_pool_copy_stall_seconds_sum{method="copy",pool="local"} 0`,
		`hostpath_pool_copy_stall_seconds_sum{method="reflink",pool="local"} 0.25`,
		`hostpath_pool_copy_stall_seconds_sum{method="subvolume",pool="local"} 0`,
		`hostpath_pool_failed_copies_total{method="copy",pool="local"} 0`,
		`hostpath_pool_failed_copies_total{method="reflink",pool="local"} 2`,
		`hostpath_pool_failed_copies_total{method="subvolume",pool="local"} 0`,
		`hostpath_pool_filesystem_errors{pool="local"} 2`,
		`hostpath_pool_filesystem_promised_bytes{pool="local"} 5.36870912e+09`,
		`hostpath_pool_filesystem_promised_unused_bytes{pool="local"} 2.147483648e+09`,
		`hostpath_pool_filesystem_unlimited_volumes{pool="local"} 1`,
		`hostpath_pool_free_bytes{pool="local"} 4.294967296e+09`,
		`hostpath_pool_free_inodes{pool="local"} 900`,
		`hostpath_pool_inodes{pool="local"} 1000`,
		`hostpath_pool_last_error_timestamp_seconds{pool="local"} 1.6e+09`,
		`hostpath_pool_limits_restored_total{pool="local"} 4`,
		`hostpath_pool_lost_snapshots{pool="local"} 2`,
		`hostpath_pool_promised_bytes{pool="local"} 5.36870912e+09`,
		`hostpath_pool_promised_unused_bytes{pool="local"} 2.147483648e+09`,
		`hostpath_pool_quota_enforced{pool="local"} 1`,
		`hostpath_pool_read_only{pool="local"} 0`,
		`hostpath_pool_reaper_removed_files_total{pool="local"} 70`,
		`hostpath_pool_reaper_removed_volumes_total{pool="local"} 6`,
		`hostpath_pool_serving{pool="local"} 1`,
		`hostpath_pool_shared_with_os{pool="local"} 0`,
		`hostpath_pool_shares_filesystem{pool="local",with="bare"} 1`,
		`hostpath_pool_size_bytes{pool="local"} 1.073741824e+10`,
		`hostpath_pool_snapshot_promised_bytes{pool="local"} 4096`,
		`hostpath_pool_snapshots{consistency="crash-consistent",pool="local"} 1`,
		`hostpath_pool_snapshots{consistency="point-in-time",pool="local"} 2`,
		`hostpath_pool_snapshots{consistency="unverified",pool="local"} 3`,
		`hostpath_pool_trash_bytes{pool="local"} 1.048576e+06`,
		`hostpath_pool_trash_entries{pool="local"} 2`,
		`hostpath_pool_trash_oldest_timestamp_seconds{pool="local"} 1.7000000005e+09`,
		`hostpath_pool_trash_stuck_entries{pool="local"} 1`,
		`hostpath_pool_unlimited_volumes{pool="local"} 1`,
		`hostpath_pool_upstream_snapshots{pool="local"} 5`,
		`hostpath_pool_used_bytes{pool="local"} 1.073741824e+09`,
		`hostpath_pool_volumes{pool="local"} 3`,
		"kubevirt_hpp_pool_path_shared_with_os 0",
	}
	for name, c := range map[string]struct {
		pools []pool.Status
		want  []string
	}{
		"none":                         {nil, []string{"kubevirt_hpp_pool_path_shared_with_os 0"}},
		"a pool of which all is known": {[]pool.Status{local}, all},
		"a missing pool, of which little is known, and not reported as 0": {[]pool.Status{away}, zeroes(all, "away", []string{
			"abnormal_volumes", "filesystem_errors", "filesystem_promised_unused_bytes", "filesystem_unlimited_volumes", "free_bytes",
			"free_inodes", "inodes", "last_error_timestamp_seconds", "promised_unused_bytes", "read_only", "shared_with_os",
			"shares_filesystem", "size_bytes", "trash_bytes", "trash_oldest_timestamp_seconds", "unlimited_volumes", "upstream_snapshots", "used_bytes",
		}, nil)},
		"one that shares its filesystem with the system": {[]pool.Status{bare}, zeroes(all, "bare", []string{
			"abnormal_volumes", "filesystem_errors", "free_inodes", "inodes", "last_error_timestamp_seconds", "shares_filesystem",
			"trash_oldest_timestamp_seconds", "upstream_snapshots", "used_bytes",
		}, map[string]string{
			"hostpath_pool_free_bytes": "512", "hostpath_pool_read_only": "1", "hostpath_pool_serving": "1", "hostpath_pool_shared_with_os": "1",
			"hostpath_pool_size_bytes": "1024", "kubevirt_hpp_pool_path_shared_with_os": "1",
		})},
	} {
		t.Run(name, func(t *testing.T) {
			pools = c.pools
			scraped := scrape(t, address)
			got := slices.Concat(series(scraped, "hostpath_pool_"), series(scraped, "kubevirt_"))
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("the series of pools (-want +got):\n%s", diff)
			}
		})
	}
}

// zeroes are series for another pool than the one named "local", but for those that are missing of it: each is 0 unless
// its name has another value.
func zeroes(all []string, of string, missing []string, values map[string]string) []string {
	var some []string
	for _, line := range all {
		key, _, _ := strings.Cut(line, " ")
		name, _, _ := strings.Cut(key, "{")
		if slices.Contains(missing, strings.TrimPrefix(name, "hostpath_pool_")) {
			continue
		}
		value, other := values[name]
		if !other {
			value = "0"
		}
		some = append(some, strings.Replace(key, `"local"`, strconv.Quote(of), 1)+" "+value)
	}
	return some
}

// What all pools on a filesystem owe is reported of each. Of one that does not serve only promises are known.
func TestPoolsOnOneFilesystem(t *testing.T) {
	pools := func() []pool.Status {
		return []pool.Status{
			{Name: poolName("a"), SharesWith: []volume.PoolName{poolName("b")}, Promised: 60, Counted: pool.Counted{Unlimited: 1, Unused: 20}},
			{Name: poolName("b"), SharesWith: []volume.PoolName{poolName("a")}, Promised: 60, Counted: pool.Counted{Unlimited: 2, Unused: 30}},
			{Name: poolName("c"), SharesWith: []volume.PoolName{poolName("d")}, Promised: 1},
			{Name: poolName("d"), SharesWith: []volume.PoolName{poolName("c")}, Promised: 2, Counted: pool.Counted{Unlimited: volume.Unknown, Unused: volume.Unknown}},
		}
	}
	address := serve(t, metrics.New(metrics.Options{Pools: pools}), metrics.TLS{})
	var want []string
	for _, name := range []string{"promised_bytes", "promised_unused_bytes", "unlimited_volumes"} {
		sums := map[string]int{"promised_bytes": 120, "promised_unused_bytes": 50, "unlimited_volumes": 3}
		for _, p := range []string{"a", "b"} {
			want = append(want, fmt.Sprintf("hostpath_pool_filesystem_%s{pool=%q} %d", name, p, sums[name]))
		}
		if name == "promised_bytes" {
			want = append(want, `hostpath_pool_filesystem_promised_bytes{pool="c"} 3`, `hostpath_pool_filesystem_promised_bytes{pool="d"} 3`)
		}
	}
	got := slices.DeleteFunc(series(scrape(t, address), "hostpath_pool_filesystem_"), func(s string) bool { return strings.Contains(s, "_errors") })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the series of filesystems (-want +got):\n%s", diff)
	}
}

func TestVolumes(t *testing.T) {
	volumes := func() []pool.Surveyed {
		return []pool.Surveyed{
			{Pool: poolName("local"), ID: volumeID("pvc-1"), Bytes: 4096, Used: 1024, Inodes: 7},
			{Pool: poolName("local"), ID: volumeID("pvc-2"), Bytes: 8192, Used: volume.Unknown, Inodes: volume.Unknown, Condition: health.Condition{Abnormal: true}},
		}
	}
	for name, c := range map[string]struct {
		volumes func() []pool.Surveyed
		want    []string
	}{
		"by default": {nil, nil},
		"each volume": {volumes, []string{
			`hostpath_volume_abnormal{pool="local",volume="pvc-1"} 0`,
			`hostpath_volume_abnormal{pool="local",volume="pvc-2"} 1`,
			`hostpath_volume_capacity_bytes{pool="local",volume="pvc-1"} 4096`,
			`hostpath_volume_capacity_bytes{pool="local",volume="pvc-2"} 8192`,
			`hostpath_volume_inodes_used{pool="local",volume="pvc-1"} 7`,
			`hostpath_volume_used_bytes{pool="local",volume="pvc-1"} 1024`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			address := serve(t, metrics.New(metrics.Options{Pools: noPools, Volumes: c.volumes}), metrics.TLS{})
			if diff := cmp.Diff(c.want, series(scrape(t, address), "hostpath_volume_")); diff != "" {
				t.Errorf("the series of volumes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCalls(t *testing.T) {
	m := metrics.New(metrics.Options{Version: "v1.2.3", Revision: "0123abc", Pools: noPools})
	address := serve(t, m, metrics.TLS{})
	m.Call("NodeGetVolumeStats", "OK", 40*time.Microsecond)
	m.Call("NodeGetVolumeStats", "OK", 60*time.Microsecond)
	m.Call("CreateVolume", "ResourceExhausted", time.Minute)
	m.Panic("NodePublishVolume")
	m.Panic("NodePublishVolume")

	scraped := scrape(t, address)
	for _, c := range []struct {
		name string
		want []string
	}{
		{`hostpath_csi_call_duration_seconds_bucket{code="OK",method="NodeGetVolumeStats",le="5e-05"}`, []string{"1"}},
		{`hostpath_csi_call_duration_seconds_bucket{code="OK",method="NodeGetVolumeStats",le="0.0001"}`, []string{"2"}},
		{`hostpath_csi_call_duration_seconds_bucket{code="ResourceExhausted",method="CreateVolume",le="30"}`, []string{"0"}},
		{`hostpath_csi_call_duration_seconds_bucket{code="ResourceExhausted",method="CreateVolume",le="+Inf"}`, []string{"1"}},
		{"hostpath_csi_call_duration_seconds_count", []string{
			`{code="OK",method="NodeGetVolumeStats"} 2`, `{code="ResourceExhausted",method="CreateVolume"} 1`,
		}},
		{"hostpath_csi_panics_total", []string{`{method="NodePublishVolume"} 2`}},
		{"hostpath_build_info", []string{`{goversion="` + runtime.Version() + `",revision="0123abc",version="v1.2.3"} 1`}},
	} {
		var got []string
		for _, line := range series(scraped, c.name) {
			got = append(got, strings.TrimSpace(strings.TrimPrefix(line, c.name)))
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
	first := `hostpath_csi_call_duration_seconds_bucket{code="OK",method="NodeGetVolumeStats",le="`
	for line := range strings.Lines(scraped) {
		if rest, ok := strings.CutPrefix(line, first); ok {
			if !strings.HasPrefix(rest, `5e-05"`) {
				t.Errorf("the buckets begin with %s, not at 50 µs", line)
			}
			break
		}
	}
}

func TestAbandonedCalls(t *testing.T) {
	address := serve(t, metrics.New(metrics.Options{Pools: noPools}), metrics.TLS{})
	want := func(want string) {
		t.Helper()
		if got := series(scrape(t, address), "hostpath_abandoned_calls"); !slices.Equal(got, []string{"hostpath_abandoned_calls " + want}) {
			t.Errorf("%q, want %s", got, want)
		}
	}
	want("0")
	answer, returned := make(chan struct{}), make(chan struct{})
	_, err := hang.Run(t.Context(), time.Millisecond, func() (bool, error) {
		<-answer
		return true, nil
	}, func(bool, error) { close(returned) })
	must.ErrorIs(t, err, hang.ErrTimeout)
	want("1")
	close(answer)
	<-returned
	want("0")
}

func TestNamesFollowConventions(t *testing.T) {
	m := metrics.New(metrics.Options{
		Version: "v1",
		Pools:   func() []pool.Status { return []pool.Status{local} },
		Volumes: func() []pool.Surveyed { return []pool.Surveyed{{Pool: poolName("local"), ID: volumeID("pvc-1")}} },
	})
	address := serve(t, m, metrics.TLS{})
	m.Call("Probe", "OK", time.Millisecond)
	m.Panic("Probe")
	scraped := scrape(t, address)
	problems, err := promlint.New(strings.NewReader(scraped)).Lint()
	must.Succeed(t, err)
	for _, problem := range problems {
		t.Errorf("%s: %s", problem.Metric, problem.Text)
	}
	for _, name := range []string{"go_goroutines", "go_gc_heap_live_bytes", "process_resident_memory_bytes"} {
		if len(series(scraped, name)) == 0 {
			t.Errorf("%s is not shown", name)
		}
	}
}

func TestOnlyMetricsAreServed(t *testing.T) {
	address := serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{})
	for path, want := range map[string]int{"/metrics": http.StatusOK, "/": http.StatusNotFound, "/debug/pprof/": http.StatusNotFound} {
		if response, _ := get(t, address, path, anyCertificate()); response.StatusCode != want {
			t.Errorf("%s is answered with %s, want %d", path, response.Status, want)
		}
	}
}

func TestMinimumTLSVersion(t *testing.T) {
	for name, c := range map[string]struct {
		server, client uint16 // the client has no other version
		taken          bool
	}{
		"1.3 takes 1.3":         {tls.VersionTLS13, tls.VersionTLS13, true},
		"1.3 does not take 1.2": {tls.VersionTLS13, tls.VersionTLS12, false},
		"1.2 takes 1.2":         {tls.VersionTLS12, tls.VersionTLS12, true},
		"1.2 takes 1.3":         {tls.VersionTLS12, tls.VersionTLS13, true},
		"1.2 does not take 1.1": {tls.VersionTLS12, tls.VersionTLS11, false},
		"1.1 takes 1.1":         {tls.VersionTLS11, tls.VersionTLS11, true},
		"1.1 does not take 1.0": {tls.VersionTLS11, tls.VersionTLS10, false},
	} {
		t.Run(name, func(t *testing.T) {
			address := serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{Accepted: tlsprofile.Profile{MinVersion: c.server}})
			dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, MinVersion: c.client, MaxVersion: c.client}}
			connection, err := dialer.DialContext(t.Context(), "tcp", address)
			if err == nil {
				connection.Close()
			}
			if (err == nil) != c.taken {
				t.Errorf("the handshake ends with %v, want it taken: %v", err, c.taken)
			}
		})
	}
}

// A client that has only suites which are not accepted does not get in with TLS 1.2.
func TestCipherSuites(t *testing.T) {
	const accepted, other = tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256
	profile := tlsprofile.Profile{MinVersion: tls.VersionTLS12, CipherSuites: []uint16{accepted}}
	address := serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{Accepted: profile})
	for suite, taken := range map[uint16]bool{accepted: true, other: false} {
		dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{suite}}}
		connection, err := dialer.DialContext(t.Context(), "tcp", address)
		if err == nil {
			connection.Close()
		}
		if (err == nil) != taken {
			t.Errorf("the handshake with %s ends with %v, want it taken: %v", tls.CipherSuiteName(suite), err, taken)
		}
	}
}

// shown is the certificate that a server presents.
func shown(t *testing.T, address string) *x509.Certificate {
	t.Helper()
	response, _ := get(t, address, "/metrics", anyCertificate())
	return response.TLS.PeerCertificates[0]
}

func TestSelfSignedCertificate(t *testing.T) {
	t.Setenv("POD_IP", "192.0.2.7")
	t.Setenv("SERVICE_NAME", "driver-metrics")
	t.Setenv("POD_NAMESPACE", "storage")
	address := serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{})
	certificate := shown(t, address)
	trusted := x509.NewCertPool()
	trusted.AddCert(certificate)
	for _, name := range []string{"127.0.0.1", "::1", "192.0.2.7", "localhost", "driver-metrics.storage.svc"} {
		if _, err := certificate.Verify(x509.VerifyOptions{DNSName: name, Roots: trusted}); err != nil {
			t.Errorf("it is not good for %s: %v", name, err)
		}
	}
	if err := certificate.VerifyHostname("example.com"); err == nil {
		t.Error("it is good for example.com")
	}
	named := shown(t, serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{Namespace: "other"}))
	if err := named.VerifyHostname("driver-metrics.other.svc"); err != nil {
		t.Errorf("with another namespace: %v", err)
	}
	if again := shown(t, address); !again.Equal(certificate) {
		t.Error("the second connection sees another certificate")
	}
	if other := shown(t, serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{})); other.SerialNumber.Cmp(certificate.SerialNumber) == 0 {
		t.Error("two servers have certificates of one serial number")
	}
}

// pair are the files of a certificate.
type pair struct{ cert, key string }

// writePair makes a certificate, in files that were changed at that time.
func writePair(t *testing.T, files pair, changed time.Time) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	must.Succeed(t, err)
	template := &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must.Succeed(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(files.cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	must.Succeed(t, os.WriteFile(files.key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600))
	for _, file := range []string{files.cert, files.key} {
		must.Succeed(t, os.Chtimes(file, changed, changed))
	}
	certificate, err := x509.ParseCertificate(der)
	must.Succeed(t, err)
	return certificate
}

func TestCertificateIsReloaded(t *testing.T) {
	dir := t.TempDir()
	files := pair{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")}
	now := time.Now()
	first := writePair(t, files, now)
	address := serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{CertFile: files.cert, KeyFile: files.key})
	for range 2 {
		if got := shown(t, address); !got.Equal(first) {
			t.Errorf("the certificate shown is %v, want %v", got.SerialNumber, first.SerialNumber)
		}
	}
	// Also one that is older than the one before it.
	for _, changed := range []time.Time{now.Add(time.Hour), now.Add(-time.Hour)} {
		next := writePair(t, files, changed)
		if got := shown(t, address); !got.Equal(next) {
			t.Errorf("the certificate shown after a change is %v, want %v", got.SerialNumber, next.SerialNumber)
		}
	}
}

func TestCertificateIsReloaded_keyWrittenLater(t *testing.T) {
	dir := t.TempDir()
	files, prepared := pair{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")}, pair{filepath.Join(dir, "new.crt"), filepath.Join(dir, "new.key")}
	now := time.Now()
	first := writePair(t, files, now)
	address := serve(t, metrics.New(metrics.Options{Version: "v1", Pools: noPools}), metrics.TLS{CertFile: files.cert, KeyFile: files.key})
	if got := shown(t, address); !got.Equal(first) {
		t.Errorf("the certificate shown is %v, want %v", got.SerialNumber, first.SerialNumber)
	}
	next := writePair(t, prepared, now.Add(time.Hour))
	must.Succeed(t, os.Rename(prepared.cert, files.cert))
	// What this handshake gives does not matter, what it leaves does.
	if connection, err := (&tls.Dialer{Config: anyCertificate()}).DialContext(t.Context(), "tcp", address); err == nil {
		connection.Close()
	}
	must.Succeed(t, os.Rename(prepared.key, files.key))
	if got := shown(t, address); !got.Equal(next) {
		t.Errorf("the certificate shown is %v, want %v", got.SerialNumber, next.SerialNumber)
	}
}

func TestBadCertificateFiles(t *testing.T) {
	dir := t.TempDir()
	good, other := pair{filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")}, pair{filepath.Join(dir, "other.crt"), filepath.Join(dir, "other.key")}
	writePair(t, good, time.Now())
	writePair(t, other, time.Now())
	garbage, missing := filepath.Join(dir, "garbage"), filepath.Join(dir, "missing")
	must.Succeed(t, os.WriteFile(garbage, []byte("garbage"), 0o600))
	for name, files := range map[string]pair{
		"a certificate that is missing":  {missing, good.key},
		"a key that is missing":          {good.cert, missing},
		"a certificate that is garbage":  {garbage, good.key},
		"a key that is garbage":          {good.cert, garbage},
		"a key of another certificate":   {good.cert, other.key},
		"a certificate and key mixed up": {good.key, good.cert},
		"a certificate without a key":    {good.cert, ""},
	} {
		t.Run(name, func(t *testing.T) {
			listener := listen(t)
			err := metrics.New(metrics.Options{Version: "v1", Pools: noPools}).Serve(t.Context(), listener, metrics.TLS{CertFile: files.cert, KeyFile: files.key})
			if err == nil || !strings.Contains(err.Error(), "metrics certificate") || !strings.Contains(err.Error(), dir) {
				t.Errorf("Serve answers %v, want an error that names the files", err)
			}
			wantClosed(t, listener)
		})
	}
}

func TestServe_contextCancelled(t *testing.T) {
	for name, before := range map[string]bool{"before it begins": true, "while it serves": false} {
		t.Run(name, func(t *testing.T) {
			listener := listen(t)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			if before {
				stop()
			}
			served := make(chan error, 1)
			go func() {
				served <- metrics.New(metrics.Options{Version: "v1", Pools: noPools}).Serve(ctx, listener, metrics.TLS{})
			}()
			if !before {
				scrape(t, listener.Addr().String())
				stop()
			}
			must.Succeed(t, <-served)
			wantClosed(t, listener)
		})
	}
}

func TestServe_cancelsScrapesInFlight(t *testing.T) {
	asked, answer := make(chan struct{}), make(chan struct{})
	m := metrics.New(metrics.Options{Pools: func() []pool.Status {
		close(asked)
		<-answer
		return nil
	}})
	listener := listen(t)
	ctx, stop := context.WithCancel(t.Context())
	served, scraped := make(chan error, 1), make(chan error, 1)
	go func() { served <- m.Serve(ctx, listener, metrics.TLS{}) }()
	transport := &http.Transport{TLSClientConfig: anyCertificate()}
	defer transport.CloseIdleConnections()
	go func() {
		response, err := (&http.Client{Transport: transport}).Get("https://" + listener.Addr().String() + "/metrics")
		if err == nil {
			response.Body.Close()
		}
		scraped <- err
	}()
	<-asked
	stop()
	must.Succeed(t, <-served)
	if err := <-scraped; err == nil {
		t.Error("the scrape was answered after the end")
	}
	close(answer)
}
