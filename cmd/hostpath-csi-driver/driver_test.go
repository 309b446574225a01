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
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// inTime is far above what a driver needs, and below its 15 s of grace for in-flight
// calls.
const inTime = 10 * time.Second

// build builds the program with the flags of a release.
func build(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "hostpath-csi-driver")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-tags", "grpcnotrace", "-ldflags", "-s -w", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the driver: %v\n%s", err, output)
	}
	return program
}

// TestDriver holds all tests of the program, so that it is built once.
func TestDriver(t *testing.T) {
	program := build(t)
	t.Run("small binary without Kubernetes client", func(t *testing.T) { testBinary(t, program) })
	t.Run("help", func(t *testing.T) { testPrintsItsFlags(t, program) })
	t.Run("bad configuration is refused", func(t *testing.T) { testBadConfiguration(t, program) })
	t.Run("unusable address is refused", func(t *testing.T) { testCannotServe(t, program) })
	t.Run("serves volumes and metrics until SIGTERM", func(t *testing.T) { testServes(t, program) })
	t.Run("volume metrics", func(t *testing.T) { testVolumeMetrics(t, program) })
	t.Run("exports traces", func(t *testing.T) { testTraces(t, program) })
	t.Run("collector unreachable", func(t *testing.T) { testNoCollector(t, program) })
	t.Run("drains in-flight calls", func(t *testing.T) { testCallsInFlight(t, program) })
	t.Run("second signal kills", func(t *testing.T) { testSecondSignal(t, program) })
	t.Run("socket in use is refused", func(t *testing.T) { testOneSocket(t, program) })
	t.Run("stale socket is replaced", func(t *testing.T) { testStaleSocket(t, program) })
}

func testBinary(t *testing.T, program string) {
	info, err := os.Stat(program)
	must.Succeed(t, err)
	if info.Size() > 18e6 {
		t.Errorf("the program has %d bytes, more than 18 MB", info.Size())
	}
	built, err := buildinfo.ReadFile(program)
	must.Succeed(t, err)
	for _, dependency := range built.Deps {
		for _, unwanted := range []string{"k8s.io/client-go", "k8s.io/api", "sigs.k8s.io/", "github.com/kubernetes-csi/csi-test", "github.com/onsi/"} {
			if strings.HasPrefix(dependency.Path, unwanted) {
				t.Errorf("the program links %s", dependency.Path)
			}
		}
	}
}

func testPrintsItsFlags(t *testing.T, program string) {
	output, err := exec.CommandContext(t.Context(), program, "--help").Output()
	must.Succeed(t, err)
	if !bytes.Contains(output, []byte("-nodeid")) {
		t.Errorf("help is %q", output)
	}
}

// A place is a temporary directory with the driver's socket and pool.
type place struct{ dir, socket, pool string }

func newPlace(t *testing.T) place {
	t.Helper()
	dir := testenv.SocketDir(t)
	return place{dir: dir, socket: filepath.Join(dir, "s"), pool: filepath.Join(dir, "pool")}
}

// flags are those of a driver in the place; more override the defaults.
func (p place) flags(more ...string) []string {
	return append([]string{
		"--endpoint=unix://" + p.socket, "--nodeid=node-a", "--version=v1.2.3",
		`--datadir=[{"name":"local","path":"` + p.pool + `"}]`, "--metrics-address=",
	}, more...)
}

// wantUntouched fails the test if the place contains anything but these files.
func (p place) wantUntouched(t *testing.T, but ...string) {
	t.Helper()
	entries, err := os.ReadDir(p.dir)
	must.Succeed(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	if strings.Join(names, " ") != strings.Join(but, " ") {
		t.Errorf("%s contains %q, want %q", p.dir, names, but)
	}
}

func testBadConfiguration(t *testing.T, program string) {
	for name, c := range map[string]struct {
		flags []string
		says  []string
	}{
		"an unknown flag":         {[]string{"--colour=red", "--shape=round"}, []string{"-colour", "-shape"}},
		"no node, no version":     {[]string{"--nodeid=", "--version="}, []string{"--nodeid", "--version"}},
		"pools that are not JSON": {[]string{"--datadir=pool"}, []string{"--datadir", "JSON array"}},
		"a missing certificate":   {[]string{"--metrics-address=127.0.0.1:0", "--metrics-cert-file=/no/such/cert", "--metrics-key-file=/no/such/key"}, []string{"/no/such/cert"}},
		"a bad address":           {[]string{"--metrics-address=nowhere"}, []string{"--metrics-address", "nowhere"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlace(t)
			wantFailure(t, program, p.flags(c.flags...), append(c.says, "invalid configuration")...)
			p.wantUntouched(t)
		})
	}
}

func testCannotServe(t *testing.T, program string) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer busy.Close()
	t.Run("socket in a missing directory", func(t *testing.T) {
		p := newPlace(t)
		wantFailure(t, program, p.flags("--endpoint="+p.dir+"/no/such"), "/no/such")
		p.wantUntouched(t)
	})
	t.Run("socket is a regular file", func(t *testing.T) {
		p := newPlace(t)
		must.Succeed(t, os.WriteFile(p.socket, []byte("kept"), 0o600))
		wantFailure(t, program, p.flags(), p.socket, "no socket")
		p.wantUntouched(t, "s")
	})
	t.Run("metrics address in use", func(t *testing.T) {
		p := newPlace(t)
		wantFailure(t, program, p.flags("--metrics-address="+busy.Addr().String()), busy.Addr().String(), "--metrics-address")
		p.wantUntouched(t)
	})
}

// wantFailure runs the program and fails the test unless it exits with 1 and prints
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
		t.Errorf("exited with %v, want exit status 1", err)
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
	must.Succeed(t, err)
	if info.GetName() != "kubevirt.io.hostpath-provisioner" || info.GetVendorVersion() != "v1.2.3" {
		t.Errorf("the plugin is %v", info)
	}
	probe, err := csi.NewIdentityClient(connection).Probe(ctx, &csi.ProbeRequest{})
	must.Succeed(t, err)
	if !probe.GetReady().GetValue() {
		t.Error("serving, but Probe reports not ready")
	}
	target := filepath.Join(p.dir, "target")
	_, err = csi.NewControllerClient(connection).CreateVolume(ctx, createRequest("vol"))
	must.Succeed(t, err)
	_, err = csi.NewNodeClient(connection).NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: "vol", TargetPath: target, VolumeCapability: createRequest("vol").GetVolumeCapabilities()[0],
	})
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(target+"/data", []byte("data"), 0o600))
	if _, err := os.Stat(p.pool + "/vol/data"); err != nil {
		t.Errorf("written data is not in the volume: %v", err)
	}
	_, err = csi.NewNodeClient(connection).NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: "vol", TargetPath: target})
	must.Succeed(t, err)

	wantConfined(t, d)
	scraped := scrape(t, d.metricsAddress(t))
	for _, series := range []string{
		"kubevirt_hpp_pool_path_shared_with_os 1", // the filesystem of the socket
		`hostpath_pool_volumes{pool="local"} 1`,
		`hostpath_csi_call_duration_seconds_count{code="OK",method="CreateVolume"} 1`,
		`hostpath_pool_trash_bytes{pool="local"} 0`,
	} {
		if !strings.Contains(scraped, series+"\n") {
			t.Errorf("metrics lack %q", series)
		}
	}
	for _, pattern := range []string{
		`hostpath_build_info\{goversion="go1\.[^"]+",(revision="[0-9a-f]{40}",)?version="v1\.2\.3"\} 1`,
		`hostpath_pool_size_bytes\{pool="local"\} [1-9]`,
		`hostpath_pool_free_bytes\{pool="local"\} [1-9]`,
		`hostpath_pool_available_bytes\{pool="local"\} [1-9]`,
	} {
		if !regexp.MustCompile(`(?m)^` + pattern).MatchString(scraped) {
			t.Errorf("metrics have no match for %s", pattern)
		}
	}

	for _, sent := range []string{"", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"} {
		idle, err := net.Dial("unix", p.socket)
		must.Succeed(t, err)
		defer idle.Close()
		_, err = io.WriteString(idle, sent)
		must.Succeed(t, err)
		_, err = io.ReadFull(idle, make([]byte, 1)) // of the settings that the server begins with
		must.Succeed(t, err)
	}
	signalled := time.Now()
	must.Succeed(t, d.Signal(syscall.SIGTERM))
	if err := d.wait(t); err != nil {
		t.Errorf("exited with %v, want exit status 0", err)
	}
	if took := time.Since(signalled); took > 5*time.Second {
		t.Errorf("it took %v to exit beside connections on which nobody calls", took)
	}
	if _, err := os.Lstat(p.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func testVolumeMetrics(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	must.Succeed(t, os.MkdirAll(p.pool+"/came", 0o777))
	for name, c := range map[string]struct {
		flags []string
		shown bool
	}{
		"default": {nil, false},
		"enabled": {[]string{"--volume-metrics"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := start(t, program, p.flags(append(c.flags, "--metrics-address=127.0.0.1:0")...))
			scraped := scrapeUntil(t, d.metricsAddress(t), `hostpath_pool_abnormal_volumes{pool="local",reason="directory_missing"} 0`)
			for _, series := range []string{
				`hostpath_volume_abnormal{pool="local",volume="came"} 0`,
				`hostpath_volume_capacity_bytes{pool="local",volume="came"} `,
			} {
				if strings.Contains(scraped, "\n"+series) != c.shown {
					t.Errorf("metrics contain %q: %v, want %v", series, !c.shown, c.shown)
				}
			}
			must.Succeed(t, d.Signal(syscall.SIGTERM))
			must.Succeed(t, d.wait(t))
		})
	}
}

// scrapeUntil scrapes until a series appears.
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
			t.Fatalf("metrics lack %q", series)
		}
	}
}

// wantConfined fails the test if a thread of the driver has more capabilities than needed.
func wantConfined(t *testing.T, d *running) {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", d.cmd.Process.Pid))
	must.Succeed(t, err)
	if len(threads) < 2 {
		t.Fatalf("driver has threads %q", threads)
	}
	needed, permitted := uint64(0), uint64(0)
	for _, c := range privilege.Needed {
		needed |= 1 << c
	}
	for _, c := range privilege.ForCopies {
		permitted |= 1 << c
	}
	permitted |= needed
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		// ESRCH: the thread exited after its file was opened.
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // exited
		}
		must.Succeed(t, err)
		for field, want := range map[string]uint64{"CapInh": 0, "CapPrm": permitted, "CapEff": needed, "CapBnd": permitted, "CapAmb": 0} {
			if line := fmt.Sprintf("%s:\t%016x\n", field, want); !strings.Contains(string(status), line) {
				t.Errorf("%s lacks %q:\n%s", thread, line, status)
			}
		}
		if !strings.Contains(string(status), "NoNewPrivs:\t1\n") {
			t.Errorf("%s can gain privileges by execve:\n%s", thread, status)
		}
	}
}

// stuckCall starts a call that blocks until the returned function is called: the test holds
// the lock of a shared pool.
func stuckCall(t *testing.T, p place, connection *grpc.ClientConn) (release func(), ended <-chan error) {
	t.Helper()
	own, err := dir.Open(filepath.Join(p.pool, ".hostpath-provisioner"))
	must.Succeed(t, err)
	unlock, err := own.Lock(t.Context(), "lock")
	must.Succeed(t, errors.Join(err, own.Close()))
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
	// Another call on the same volume gets ABORTED once the first one has begun.
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	bound := time.After(inTime)
	for {
		_, err := controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "vol"})
		if status.Code(err) == codes.Aborted {
			return release, done
		}
		must.Succeed(t, err)
		select {
		case <-again.C:
		case err := <-done:
			t.Fatalf("the call did not block: %v", err)
		case <-bound:
			t.Fatal("the call did not begin")
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
	must.Succeed(t, d.Signal(syscall.SIGTERM))
	d.await(t, "terminated signal received")
	select {
	case <-d.exited:
		t.Fatal("exited before the in-flight call finished")
	default:
	}
	release()
	if err := <-ended; err != nil {
		t.Errorf("in-flight call returned %v", err)
	}
	if err := d.wait(t); err != nil {
		t.Errorf("exited with %v, want exit status 0", err)
	}
}

func testSecondSignal(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	d := start(t, program, sharedFlags(p))
	_, ended := stuckCall(t, p, d.connect(t, p.socket))
	must.Succeed(t, d.Signal(syscall.SIGTERM))
	d.await(t, "terminated signal received")
	// The default action is restored a moment after the first signal: repeat until it is.
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
			t.Fatal("did not exit after a second signal")
		}
	}
	if state, ok := d.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !state.Signaled() || state.Signal() != syscall.SIGTERM {
		t.Errorf("exited with %v, want the signal", d.cmd.ProcessState)
	}
	if err := <-ended; err == nil {
		t.Error("the blocked call returned")
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
	must.Succeed(t, err)
	must.Succeed(t, d.Signal(syscall.SIGINT))
	if err := d.wait(t); err != nil {
		t.Errorf("exited with %v after SIGINT, want exit status 0", err)
	}
}

func testStaleSocket(t *testing.T, program string) {
	testenv.NeedRoot(t)
	p := newPlace(t)
	first := start(t, program, p.flags())
	_, err := csi.NewControllerClient(first.connect(t, p.socket)).CreateVolume(t.Context(), createRequest("vol"))
	must.Succeed(t, err)
	must.Succeed(t, first.Signal(syscall.SIGKILL))
	<-first.exited
	if _, err := os.Lstat(p.socket); err != nil {
		t.Fatalf("a killed driver should leave its socket: %v", err)
	}
	second := start(t, program, p.flags())
	list, err := csi.NewControllerClient(second.connect(t, p.socket)).ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must.Succeed(t, err)
	if len(list.GetEntries()) != 1 {
		t.Errorf("volumes after a restart: %v", list)
	}
	must.Succeed(t, second.Signal(syscall.SIGTERM))
	must.Succeed(t, second.wait(t))
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

// A running is a started driver. It is killed at the end of the test.
type running struct {
	*os.Process
	cmd    *exec.Cmd
	exited chan struct{} // closed after exit
	err    error         // result of Wait, valid after exited is closed

	mu   sync.Mutex
	log  bytes.Buffer
	more chan struct{} // closed and replaced at each write
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
		// Pdeathsig is sent when the thread that forked exits (prctl(2)).
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := d.cmd.Start()
		started <- err
		if err == nil {
			d.err = d.cmd.Wait()
			close(d.exited)
		}
	}()
	must.Succeed(t, <-started)
	d.Process = d.cmd.Process
	t.Cleanup(func() {
		_ = d.Kill()
		<-d.exited
		if t.Failed() {
			t.Logf("driver log:\n%s", d)
		}
	})
	d.await(t, `"serving"`)
	return d
}

// Write collects the driver's standard error.
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

// await waits until the driver has logged some words.
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
			t.Fatalf("exited with %v before logging %q:\n%s", d.err, words, log)
		case <-bound:
			t.Fatalf("did not log %q:\n%s", words, log)
		}
	}
}

// wait waits for the driver to exit and returns its result.
func (d *running) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-d.exited:
		return d.err
	case <-time.After(inTime):
		t.Fatal("did not exit in time")
		return nil
	}
}

func (d *running) connect(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, connection.Close()) })
	return connection
}

// metricsAddress is the address of the metrics, from the driver's log.
func (d *running) metricsAddress(t *testing.T) string {
	t.Helper()
	found := regexp.MustCompile(`"Serving metrics" address="([^"]+)"`).FindStringSubmatch(d.String())
	if found == nil {
		t.Fatalf("the log lacks the metrics address:\n%s", d)
	}
	return found[1]
}

func scrape(t *testing.T, address string) string {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", http.NoBody)
	must.Succeed(t, err)
	response, err := transport.RoundTrip(request)
	must.Succeed(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	must.Succeed(t, err)
	return string(body)
}

// certificateFiles creates a certificate and its key.
func certificateFiles(t *testing.T) (cert, key string) {
	t.Helper()
	dir := t.TempDir()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	must.Succeed(t, err)
	privateDER, err := x509.MarshalPKCS8PrivateKey(private)
	must.Succeed(t, err)
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	must.Succeed(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	must.Succeed(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: privateDER}), 0o600))
	return cert, key
}
