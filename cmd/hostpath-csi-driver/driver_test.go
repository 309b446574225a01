package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"debug/buildinfo"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// inTime is far above what a driver needs, and below the 15 s that it gives to
// calls in flight.
const inTime = 10 * time.Second

// build makes the program as it is shipped.
func build(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "hostpath-csi-driver")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the driver: %v\n%s", err, output)
	}
	return program
}

// All that needs the program is here, so that it is built once.
func TestDriver(t *testing.T) {
	program := build(t)
	t.Run("is small and knows no Kubernetes API", func(t *testing.T) { testBinary(t, program) })
	t.Run("prints its flags", func(t *testing.T) { testPrintsItsFlags(t, program) })
	t.Run("does not begin with a bad configuration", func(t *testing.T) { testBadConfiguration(t, program) })
	t.Run("does not begin where it cannot serve", func(t *testing.T) { testCannotServe(t, program) })
	t.Run("serves volumes and metrics until SIGTERM", func(t *testing.T) { testServes(t, program) })
	t.Run("shows each volume if it is told to", func(t *testing.T) { testVolumeMetrics(t, program) })
	t.Run("sends spans to a collector", func(t *testing.T) { testTraces(t, program) })
	t.Run("needs no collector to be there", func(t *testing.T) { testNoCollector(t, program) })
	t.Run("finishes the calls in flight", func(t *testing.T) { testCallsInFlight(t, program) })
	t.Run("ends at once with a second signal", func(t *testing.T) { testSecondSignal(t, program) })
	t.Run("does not share its socket", func(t *testing.T) { testOneSocket(t, program) })
	t.Run("replaces the socket of one that was killed", func(t *testing.T) { testStaleSocket(t, program) })
}

func testBinary(t *testing.T, program string) {
	info, err := os.Stat(program)
	must(t, err)
	if info.Size() > 16e6 {
		t.Errorf("the program has %d bytes, more than 16 MB", info.Size())
	}
	built, err := buildinfo.ReadFile(program)
	must(t, err)
	for _, dependency := range built.Deps {
		for _, unwanted := range []string{"k8s.io/client-go", "k8s.io/api", "sigs.k8s.io/", "github.com/kubernetes-csi/csi-test", "github.com/onsi/"} {
			if strings.HasPrefix(dependency.Path, unwanted) {
				t.Errorf("the program has %s in it", dependency.Path)
			}
		}
	}
}

func testPrintsItsFlags(t *testing.T, program string) {
	output, err := exec.CommandContext(t.Context(), program, "--help").Output()
	must(t, err)
	if !bytes.Contains(output, []byte("-nodeid")) {
		t.Errorf("its help is %q", output)
	}
}

// A place has all that a driver touches, in a directory of its own.
type place struct{ dir, socket, pool string }

func newPlace(t *testing.T) place {
	t.Helper()
	dir := testenv.SocketDir(t)
	return place{dir: dir, socket: filepath.Join(dir, "s"), pool: filepath.Join(dir, "pool")}
}

// flags are those of a driver in the place. Of those given twice the later counts.
func (p place) flags(more ...string) []string {
	return append([]string{
		"--endpoint=unix://" + p.socket, "--nodeid=node-a", "--version=v1.2.3",
		`--datadir=[{"name":"local","path":"` + p.pool + `"}]`, "--metrics-address=",
	}, more...)
}

// wantUntouched fails the test if the place has anything but these files.
func (p place) wantUntouched(t *testing.T, but ...string) {
	t.Helper()
	entries, err := os.ReadDir(p.dir)
	must(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if strings.Join(names, " ") != strings.Join(but, " ") {
		t.Errorf("in %s are %q, want %q", p.dir, names, but)
	}
}

func testBadConfiguration(t *testing.T, program string) {
	for name, c := range map[string]struct {
		flags []string
		says  []string
	}{
		"an unknown flag":       {[]string{"--colour=red", "--shape=round"}, []string{"-colour", "-shape"}},
		"no node, no version":   {[]string{"--nodeid=", "--version="}, []string{"--nodeid", "--version"}},
		"pools that are none":   {[]string{"--datadir=pool"}, []string{"--datadir", "JSON array"}},
		"a missing certificate": {[]string{"--metrics-address=127.0.0.1:0", "--metrics-cert-file=/no/such/cert", "--metrics-key-file=/no/such/key"}, []string{"/no/such/cert"}},
		"an address of nothing": {[]string{"--metrics-address=nowhere"}, []string{"--metrics-address", "nowhere"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			wantFailure(t, program, p.flags(c.flags...), append(c.says, "the configuration is not usable")...)
			p.wantUntouched(t)
		})
	}
}

func testCannotServe(t *testing.T, program string) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer busy.Close()
	t.Run("at a socket in no directory", func(t *testing.T) {
		p := newPlace(t)
		wantFailure(t, program, p.flags("--endpoint="+p.dir+"/no/such"), "/no/such")
		p.wantUntouched(t)
	})
	t.Run("at a socket that is a file", func(t *testing.T) {
		p := newPlace(t)
		must(t, os.WriteFile(p.socket, []byte("kept"), 0o600))
		wantFailure(t, program, p.flags(), p.socket, "no socket")
		p.wantUntouched(t, "s")
	})
	t.Run("metrics at an address that is taken", func(t *testing.T) {
		p := newPlace(t)
		wantFailure(t, program, p.flags("--metrics-address="+busy.Addr().String()), busy.Addr().String(), "--metrics-address")
		p.wantUntouched(t)
	})
}

// wantFailure runs the program and fails the test unless it ends with 1 and says
// all the words.
func wantFailure(t *testing.T, program string, flags []string, words ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), inTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, flags...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	err := cmd.Run()
	if cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("it ends with %v, want exit status 1", err)
	}
	wantWords(t, errors.New(stderr.String()), words...)
}

func testServes(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	d := start(t, program, p.flags("--metrics-address=127.0.0.1:0"))
	connection := d.connect(t, p.socket)
	ctx := t.Context()

	info, err := csi.NewIdentityClient(connection).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	must(t, err)
	if info.GetName() != "kubevirt.io.hostpath-provisioner" || info.GetVendorVersion() != "v1.2.3" {
		t.Errorf("the plugin is %v", info)
	}
	probe, err := csi.NewIdentityClient(connection).Probe(ctx, &csi.ProbeRequest{})
	must(t, err)
	if !probe.GetReady().GetValue() {
		t.Error("it serves and is not ready")
	}
	target := filepath.Join(p.dir, "target")
	_, err = csi.NewControllerClient(connection).CreateVolume(ctx, createRequest("vol"))
	must(t, err)
	_, err = csi.NewNodeClient(connection).NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: "vol", TargetPath: target, VolumeCapability: createRequest("vol").GetVolumeCapabilities()[0],
	})
	must(t, err)
	must(t, os.WriteFile(target+"/data", []byte("data"), 0o600))
	if _, err := os.Stat(p.pool + "/vol/data"); err != nil {
		t.Errorf("what was written is not in the volume: %v", err)
	}
	_, err = csi.NewNodeClient(connection).NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
	must(t, err)

	wantConfined(t, d)
	scraped := scrape(t, d.metricsAddress(t))
	for _, series := range []string{
		"kubevirt_hpp_pool_path_shared_with_os 1", // of the socket, that is
		`hostpath_pool_volumes{pool="local"} 1`,
		`hostpath_csi_call_duration_seconds_count{code="OK",method="CreateVolume"} 1`,
		`hostpath_pool_trash_bytes{pool="local"} 0`,
	} {
		if !strings.Contains(scraped, series+"\n") {
			t.Errorf("the metrics have no %q", series)
		}
	}
	for _, pattern := range []string{
		`hostpath_build_info\{goversion="go1\.[^"]+",(revision="[0-9a-f]{40}",)?version="v1\.2\.3"\} 1`,
		`hostpath_pool_size_bytes\{pool="local"\} [1-9]`,
		`hostpath_pool_free_bytes\{pool="local"\} [1-9]`,
		`hostpath_pool_available_bytes\{pool="local"\} [1-9]`,
	} {
		if !regexp.MustCompile(`(?m)^` + pattern).MatchString(scraped) {
			t.Errorf("the metrics have nothing like %s", pattern)
		}
	}

	must(t, d.Signal(syscall.SIGTERM))
	if err := d.wait(t); err != nil {
		t.Errorf("it ends with %v, want exit status 0", err)
	}
	if _, err := os.Lstat(p.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func testVolumeMetrics(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	must(t, os.MkdirAll(p.pool+"/came", 0o777))
	for name, c := range map[string]struct {
		flags []string
		shown bool
	}{
		"by default":    {nil, false},
		"by the option": {[]string{"--volume-metrics"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, program, p.flags(append(c.flags, "--metrics-address=127.0.0.1:0")...))
			scraped := scrapeUntil(t, d.metricsAddress(t), `hostpath_pool_abnormal_volumes{pool="local",reason="directory_missing"} 0`)
			for _, series := range []string{
				`hostpath_volume_abnormal{pool="local",volume="came"} 0`,
				`hostpath_volume_capacity_bytes{pool="local",volume="came"} `,
			} {
				if strings.Contains(scraped, "\n"+series) != c.shown {
					t.Errorf("the metrics have %q: %v, want %v", series, !c.shown, c.shown)
				}
			}
			must(t, d.Signal(syscall.SIGTERM))
			must(t, d.wait(t))
		})
	}
}

// scrapeUntil scrapes until a series is there.
func scrapeUntil(t *testing.T, address, series string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), inTime)
	defer cancel()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		if scraped := scrape(t, address); strings.Contains(scraped, series+"\n") {
			return scraped
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			t.Fatalf("the metrics have no %q", series)
		}
	}
}

// wantConfined fails the test if a thread of the driver may do more than it needs.
func wantConfined(t *testing.T, d *running) {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", d.cmd.Process.Pid))
	must(t, err)
	if len(threads) < 2 {
		t.Fatalf("the driver has the threads %q", threads)
	}
	needed := uint64(0)
	for _, c := range privilege.Needed {
		needed |= 1 << c
	}
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		// The latter is told of one that ended after its file was opened.
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // it has ended
		}
		must(t, err)
		for field, want := range map[string]uint64{"CapInh": 0, "CapPrm": needed, "CapEff": needed, "CapBnd": needed, "CapAmb": 0} {
			if line := fmt.Sprintf("%s:\t%016x\n", field, want); !strings.Contains(string(status), line) {
				t.Errorf("%s lacks %q:\n%s", thread, line, status)
			}
		}
		if !strings.Contains(string(status), "NoNewPrivs:\t1\n") {
			t.Errorf("%s may get privileges by execve:\n%s", thread, status)
		}
	}
}

// stuckCall makes a call that does not end before the returned function is called:
// another holds the lock of a shared pool.
func stuckCall(t *testing.T, p place, connection *grpc.ClientConn) (release func(), ended <-chan error) {
	t.Helper()
	own, err := dir.Open(filepath.Join(p.pool, ".hostpath-provisioner"))
	must(t, err)
	unlock, err := own.Lock(t.Context(), "lock")
	must(t, errors.Join(err, own.Close()))
	release = sync.OnceFunc(unlock)
	t.Cleanup(release)

	controller := csi.NewControllerClient(connection)
	done := make(chan error, 1)
	go func() {
		for {
			_, err := controller.CreateVolume(t.Context(), createRequest("vol"))
			if status.Code(err) != codes.Aborted { // by the calls below
				done <- err
				return
			}
		}
	}()
	// A call on the same volume is told when that one has begun.
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	bound := time.After(inTime)
	for {
		_, err := controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
		if status.Code(err) == codes.Aborted {
			return release, done
		}
		must(t, err)
		select {
		case <-again.C:
		case err := <-done:
			t.Fatalf("the call was not held: %v", err)
		case <-bound:
			t.Fatal("the call does not begin")
		}
	}
}

func sharedFlags(p place) []string {
	return p.flags(`--datadir=[{"name":"local","path":"` + p.pool + `","shared":true}]`)
}

func testCallsInFlight(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	d := start(t, program, sharedFlags(p))
	release, ended := stuckCall(t, p, d.connect(t, p.socket))
	must(t, d.Signal(syscall.SIGTERM))
	d.await(t, "terminated signal received")
	select {
	case <-d.exited:
		t.Fatal("it ended before the call in flight")
	default:
	}
	release()
	if err := <-ended; err != nil {
		t.Errorf("the call in flight is answered with %v", err)
	}
	if err := d.wait(t); err != nil {
		t.Errorf("it ends with %v, want exit status 0", err)
	}
}

func testSecondSignal(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	d := start(t, program, sharedFlags(p))
	_, ended := stuckCall(t, p, d.connect(t, p.socket))
	must(t, d.Signal(syscall.SIGTERM))
	d.await(t, "terminated signal received")
	// The default comes back a moment after the first: one of these meets it.
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	bound := time.After(inTime)
	for running := true; running; {
		select {
		case <-d.exited:
			running = false
		case <-again.C:
			_ = d.Signal(syscall.SIGTERM)
		case <-bound:
			t.Fatal("it does not end with a second signal")
		}
	}
	if state, ok := d.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !state.Signaled() || state.Signal() != syscall.SIGTERM {
		t.Errorf("it ends with %v, want the signal", d.cmd.ProcessState)
	}
	if err := <-ended; err == nil {
		t.Error("the call that hung was answered")
	}
}

func testOneSocket(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	d := start(t, program, p.flags())
	connection := d.connect(t, p.socket)
	other := newPlace(t)
	wantFailure(t, program, other.flags("--endpoint="+p.socket), p.socket, "another process serves it")
	other.wantUntouched(t)
	_, err := csi.NewControllerClient(connection).CreateVolume(t.Context(), createRequest("vol"))
	must(t, err)
	must(t, d.Signal(syscall.SIGINT))
	if err := d.wait(t); err != nil {
		t.Errorf("it ends with %v after SIGINT, want exit status 0", err)
	}
}

func testStaleSocket(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	first := start(t, program, p.flags())
	_, err := csi.NewControllerClient(first.connect(t, p.socket)).CreateVolume(t.Context(), createRequest("vol"))
	must(t, err)
	must(t, first.Signal(syscall.SIGKILL))
	<-first.exited
	if _, err := os.Lstat(p.socket); err != nil {
		t.Fatalf("a killed driver leaves its socket: %v", err)
	}
	second := start(t, program, p.flags())
	list, err := csi.NewControllerClient(second.connect(t, p.socket)).ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	if len(list.GetEntries()) != 1 {
		t.Errorf("the volumes after a restart are %v", list)
	}
	must(t, second.Signal(syscall.SIGTERM))
	must(t, second.wait(t))
}

func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:          name,
		CapacityRange: &csi.CapacityRange{RequiredBytes: 1 << 20},
		VolumeCapabilities: []*csi.VolumeCapability{{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		}},
	}
}

// A running is a driver that was started. It is killed at the end of the test.
type running struct {
	*os.Process
	cmd    *exec.Cmd
	exited chan struct{} // closed once it has ended
	err    error         // how, after that

	mu   sync.Mutex
	log  bytes.Buffer
	more chan struct{} // closed, and made anew, with each write
}

// start runs the program and waits until it serves.
func start(t *testing.T, program string, flags []string) *running {
	t.Helper()
	d := &running{exited: make(chan struct{}), more: make(chan struct{})}
	d.cmd = exec.Command(program, flags...)
	d.cmd.Stderr = d
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The death signal is tied to the thread that forks.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := d.cmd.Start()
		started <- err
		if err == nil {
			d.err = d.cmd.Wait()
			close(d.exited)
		}
	}()
	must(t, <-started)
	d.Process = d.cmd.Process
	t.Cleanup(func() {
		_ = d.Kill()
		<-d.exited
		if t.Failed() {
			t.Logf("what the driver wrote:\n%s", d)
		}
	})
	d.await(t, `"serving"`)
	return d
}

// Write takes what the driver writes to its standard error.
func (d *running) Write(p []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.more)
	d.more = make(chan struct{})
	return d.log.Write(p)
}

func (d *running) String() string {
	log, _ := d.written()
	return log
}

func (d *running) written() (log string, more <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.log.String(), d.more
}

// await waits until the driver has written some words.
func (d *running) await(t *testing.T, words string) {
	t.Helper()
	bound := time.After(inTime)
	for {
		log, more := d.written()
		if strings.Contains(log, words) {
			return
		}
		select {
		case <-more:
		case <-d.exited:
			t.Fatalf("it ended with %v before it wrote %q:\n%s", d.err, words, log)
		case <-bound:
			t.Fatalf("it has not written %q:\n%s", words, log)
		}
	}
}

// wait answers how the driver ended.
func (d *running) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-d.exited:
		return d.err
	case <-time.After(inTime):
		t.Fatal("it does not end in time")
		return nil
	}
}

func (d *running) connect(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { must(t, connection.Close()) })
	return connection
}

// metricsAddress is where the driver says that it serves metrics.
func (d *running) metricsAddress(t *testing.T) string {
	t.Helper()
	found := regexp.MustCompile(`"Serving metrics" address="([^"]+)"`).FindStringSubmatch(d.String())
	if found == nil {
		t.Fatalf("it does not say where it serves metrics:\n%s", d)
	}
	return found[1]
}

func scrape(t *testing.T, address string) string {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", http.NoBody)
	must(t, err)
	response, err := transport.RoundTrip(request)
	must(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must(t, err)
	return string(body)
}

// certificateFiles makes a certificate and its key.
func certificateFiles(t *testing.T) (cert, key string) {
	t.Helper()
	dir := t.TempDir()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	must(t, err)
	privateDER, err := x509.MarshalPKCS8PrivateKey(private)
	must(t, err)
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	must(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	must(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: privateDER}), 0o600))
	return cert, key
}
