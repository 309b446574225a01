package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"debug/buildinfo"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
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
	t.Run("second signal kills", func(t *testing.T) { testSecondSignal(t, program) })
	t.Run("socket in use is refused", func(t *testing.T) { testOneSocket(t, program) })
}

func testBinary(t *testing.T, program string) {
	info, err := os.Stat(program)
	must.Succeed(t, err)
	if info.Size() > drivertest.MostBytes {
		t.Errorf("the program has %d bytes, more than %d", info.Size(), drivertest.MostBytes)
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

// A harness is a temporary directory with the driver's socket and pool.
type harness struct{ dir, socket, pool string }

func newHarness(t *testing.T) harness {
	t.Helper()
	dir := testenv.SocketDir(t)
	return harness{dir: dir, socket: filepath.Join(dir, "s"), pool: filepath.Join(dir, "pool")}
}

// flags are those of a driver in the harness; more override the defaults.
func (h harness) flags(more ...string) []string {
	return append([]string{
		"--endpoint=unix://" + h.socket, "--nodeid=node-a", "--version=v1.2.3",
		`--datadir=[{"name":"local","path":"` + h.pool + `"}]`, "--metrics-address=",
	}, more...)
}

// wantUntouched fails the test if the directory contains anything.
func (h harness) wantUntouched(t *testing.T) {
	t.Helper()
	entries, err := os.ReadDir(h.dir)
	must.Succeed(t, err)
	if len(entries) > 0 {
		t.Errorf("%s contains %v", h.dir, entries)
	}
}

func testBadConfiguration(t *testing.T, program string) {
	for name, c := range map[string]struct {
		flags []string
		says  []string
	}{
		"an unknown flag":       {[]string{"--colour=red", "--shape=round"}, []string{"-colour", "-shape"}},
		"a missing certificate": {[]string{"--metrics-address=127.0.0.1:0", "--metrics-cert-file=/no/such/cert", "--metrics-key-file=/no/such/key"}, []string{"/no/such/cert"}},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t)
			wantFailure(t, program, h.flags(c.flags...), append(c.says, "invalid configuration")...)
			h.wantUntouched(t)
		})
	}
}

func testCannotServe(t *testing.T, program string) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer busy.Close()
	h := newHarness(t)
	wantFailure(t, program, h.flags("--metrics-address="+busy.Addr().String()), busy.Addr().String(), "--metrics-address")
	h.wantUntouched(t)
}

// start runs the program on a pool that it makes.
func start(t *testing.T, program string, flags ...string) *drivertest.Driver {
	t.Helper()
	return drivertest.Start(t, local(t, program, flags...))
}

func local(t *testing.T, program string, flags ...string) drivertest.Config {
	t.Helper()
	testenv.NeedRoot(t)
	return drivertest.Config{
		Binary: program, Version: "v1.2.3", Flags: flags,
		Pools: []drivertest.PoolConfig{{Name: "local", Path: filepath.Join(t.TempDir(), "pool")}},
	}
}

// vol is the volume that calls are made for.
var vol = drivertest.Volume{ID: "vol", Bytes: 1 << 20}

// create makes it.
func create(d *drivertest.Driver) {
	d.Helper()
	d.Must(must.Err(d.Create(d.Context(), vol)))
}

// awaitSignal waits until the driver has received a SIGTERM.
func awaitSignal(d *drivertest.Driver) {
	d.Helper()
	d.Eventually("the driver logs the signal", func() bool { return strings.Contains(d.Process.Log(), "terminated signal received") })
}

// wantFailure runs the program and fails the test unless it exits with 1 and prints
// all the words.
func wantFailure(t *testing.T, program string, flags []string, words ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), drivertest.Patience)
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
	d := start(t, program, drivertest.ServeMetrics)
	create(d)
	wantConfined(t, d.Process.Pid())
	scraped, err := d.Metrics(t.Context())
	must.Succeed(t, err)
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

	must.Succeed(t, d.Process.Stop())
	if _, err := os.Lstat(strings.TrimPrefix(d.Process.Endpoint(), "unix://")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func testVolumeMetrics(t *testing.T, program string) {
	for name, c := range map[string]struct {
		flags []string
		shown bool
	}{
		"default": {nil, false},
		"enabled": {[]string{"--volume-metrics"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			config := local(t, program, append(c.flags, drivertest.ServeMetrics)...)
			must.Succeed(t, os.MkdirAll(filepath.Join(config.Pools[0].Path, "came"), 0o777))
			d := drivertest.Start(t, config)
			var scraped string
			d.Eventually("the volumes are checked", func() bool {
				var err error
				scraped, err = d.Metrics(t.Context())
				must.Succeed(t, err)
				return strings.Contains(scraped, `hostpath_pool_abnormal_volumes{pool="local",reason="DirectoryMissing"} 0`+"\n")
			})
			for _, series := range []string{
				`hostpath_volume_abnormal{pool="local",volume="came"} 0`,
				`hostpath_volume_capacity_bytes{pool="local",volume="came"} `,
			} {
				if strings.Contains(scraped, "\n"+series) != c.shown {
					t.Errorf("metrics contain %q: %v, want %v", series, !c.shown, c.shown)
				}
			}
		})
	}
}

// wantConfined fails the test if a thread of the driver has more capabilities than needed.
func wantConfined(t *testing.T, pid int) {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	must.Succeed(t, err)
	if len(threads) < 2 {
		t.Fatalf("driver has threads %q", threads)
	}
	needed, permitted := uint64(0), uint64(0)
	for _, c := range privilege.Needed {
		needed |= 1 << c
	}
	for _, c := range slices.Concat(privilege.ForErasing, privilege.ForCopies) {
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
func stuckCall(t *testing.T, d *drivertest.Driver, pool string) (release func(), ended <-chan error) {
	t.Helper()
	own, err := dir.Open(filepath.Join(pool, ".hostpath-provisioner"))
	must.Succeed(t, err)
	unlock, err := dir.Lock(t.Context(), own, "lock")
	must.Succeed(t, errors.Join(err, own.Close()))
	release = sync.OnceFunc(unlock)
	t.Cleanup(release)

	done := make(chan error, 1)
	go func() {
		for {
			_, err := d.Create(t.Context(), vol)
			if status.Code(err) != codes.Aborted { // by the calls below
				done <- err
				return
			}
		}
	}()
	// Another call on the same volume gets ABORTED once the first one has begun.
	d.Eventually("the call begins", func() bool {
		err := d.Delete(t.Context(), vol.ID)
		if status.Code(err) == codes.Aborted {
			return true
		}
		must.Succeed(t, err)
		select {
		case err := <-done:
			t.Fatalf("the call did not block: %v", err)
		default:
		}
		return false
	})
	return release, done
}

// sharing is start on a shared pool.
func sharing(t *testing.T, program string) (d *drivertest.Driver, pool string) {
	t.Helper()
	config := local(t, program)
	config.Pools[0].Shared = true
	return drivertest.Start(t, config), config.Pools[0].Path
}

func testSecondSignal(t *testing.T, program string) {
	d, pool := sharing(t, program)
	_, ended := stuckCall(t, d, pool)
	must.Succeed(t, d.Process.Signal(syscall.SIGTERM))
	awaitSignal(d)
	// The default action is restored a moment after the first signal: repeat until it is.
	d.Eventually("the driver exits", func() bool {
		_ = d.Process.Signal(syscall.SIGTERM)
		return !d.Process.Running()
	})
	var exit *exec.ExitError
	err := d.Process.Wait(inTime)
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("exited with %v, want the signal", err)
	}
	if err := <-ended; err == nil {
		t.Error("the blocked call returned")
	}
}

func testOneSocket(t *testing.T, program string) {
	d := start(t, program)
	socket := strings.TrimPrefix(d.Process.Endpoint(), "unix://")
	other := newHarness(t)
	wantFailure(t, program, other.flags("--endpoint="+socket), socket, "another process serves it")
	other.wantUntouched(t)
	create(d)
	must.Succeed(t, d.Process.Signal(syscall.SIGINT))
	must.Succeed(t, d.Process.Wait(inTime))
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
