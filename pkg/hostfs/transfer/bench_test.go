package transfer_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/clone"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/transfer"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// overTLS is a TLS connection through a TCP socket of this machine.
func overTLS(t testing.TB) (here, there *tls.Conn) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must.Succeed(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"target"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must.Succeed(t, err)
	certificate, err := x509.ParseCertificate(der)
	must.Succeed(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(certificate)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	defer func() { _ = listener.Close() }()
	client, err := net.Dial("tcp", listener.Addr().String())
	must.Succeed(t, err)
	server, err := listener.Accept()
	must.Succeed(t, err)
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	here = tls.Client(client, &tls.Config{RootCAs: pool, ServerName: "target", MinVersion: tls.VersionTLS13})
	there = tls.Server(server, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS13})
	done := make(chan error, 1)
	go func() { done <- there.Handshake() }()
	must.Succeed(t, here.Handshake(), <-done)
	return here, there
}

// onDisk has an empty source and an empty target on one filesystem.
func onDisk(b *testing.B, bytes int64) (src, dst string) {
	root := testenv.LoopFS(b, "xfs", bytes)
	src, dst = filepath.Join(root, "src"), filepath.Join(root, "dst")
	must.Succeed(b, os.Mkdir(src, 0o755))
	return src, dst
}

// timed empties the target, and tells how long something takes that fills it, with making it durable.
func timed(b *testing.B, dst string, fill func()) time.Duration {
	b.Helper()
	must.Succeed(b, os.RemoveAll(dst), os.Mkdir(dst, 0o755), clone.Sync(open(b, filepath.Dir(dst))))
	began := time.Now()
	fill()
	must.Succeed(b, clone.Sync(open(b, dst)))
	return time.Since(began)
}

func transferOverTLS(b *testing.B, src, dst string, p transfer.Pass) transfer.Result {
	b.Helper()
	here, there := overTLS(b)
	received := make(chan error, 1)
	into := open(b, dst)
	go func() { received <- transfer.Receive(b.Context(), there, into, transfer.Options{}) }()
	s := transfer.NewSender(here, transfer.Options{})
	result, err := s.Pass(b.Context(), open(b, src), p)
	must.Succeed(b, err, s.Finish(b.Context()), <-received)
	return result
}

// BenchmarkLargeFile compares a file with io.Copy over a TLS connection of the same kind: of 10 GiB on a machine that has the
// room.
func BenchmarkLargeFile(b *testing.B) {
	size := int64(1 << 30)
	if testenv.Guest() {
		size = 10 << 30
	}
	src, dst := onDisk(b, 3*size)
	f, err := os.Create(filepath.Join(src, "disk.img"))
	must.Succeed(b, err)
	_, err = io.CopyN(f, rand.Reader, size)
	must.Succeed(b, err, f.Close())
	var plain, ours time.Duration
	for b.Loop() {
		plain += timed(b, dst, func() {
			here, there := overTLS(b)
			done := make(chan error, 1)
			go func() {
				to, err := os.Create(filepath.Join(dst, "disk.img"))
				if err == nil {
					_, err = io.Copy(to, there)
				}
				done <- err
			}()
			from, err := os.Open(filepath.Join(src, "disk.img"))
			must.Succeed(b, err)
			_, err = io.Copy(here, from)
			must.Succeed(b, err, here.CloseWrite(), <-done)
		})
		ours += timed(b, dst, func() { transferOverTLS(b, src, dst, transfer.Pass{Still: true}) })
	}
	b.ReportMetric(plain.Seconds()/ours.Seconds(), "of-io.Copy")
	b.ReportMetric(float64(size)*float64(b.N)/ours.Seconds()/1e6, "MB/s")
}

// BenchmarkSmallFiles compares 50,000 files of 4 KiB with tar over a TLS connection.
func BenchmarkSmallFiles(b *testing.B) {
	testenv.NeedPrograms(b, "tar")
	const files = 50_000
	src, dst := onDisk(b, 2<<30)
	content := make([]byte, 4096)
	for i := range files {
		d := filepath.Join(src, fmt.Sprint(i/500))
		if i%500 == 0 {
			must.Succeed(b, os.Mkdir(d, 0o755))
		}
		_, _ = rand.Read(content)
		must.Succeed(b, os.WriteFile(filepath.Join(d, fmt.Sprint(i)), content, 0o644))
	}
	var plain, ours, again time.Duration
	for b.Loop() {
		plain += timed(b, dst, func() {
			here, there := overTLS(b)
			pack := exec.CommandContext(b.Context(), "tar", "--create", "--directory="+src, ".")
			unpack := exec.CommandContext(b.Context(), "tar", "--extract", "--directory="+dst)
			out, err := pack.StdoutPipe()
			must.Succeed(b, err)
			in, err := unpack.StdinPipe()
			must.Succeed(b, err, pack.Start(), unpack.Start())
			done := make(chan error, 1)
			go func() {
				_, err := io.Copy(in, there)
				_ = in.Close()
				done <- err
			}()
			_, err = io.Copy(here, out)
			must.Succeed(b, err, here.CloseWrite(), <-done, pack.Wait(), unpack.Wait())
		})
		ours += timed(b, dst, func() { transferOverTLS(b, src, dst, transfer.Pass{Still: true}) })
		began := time.Now()
		transferOverTLS(b, src, dst, transfer.Pass{Still: true, Since: began})
		again += time.Since(began)
	}
	b.ReportMetric(plain.Seconds()/ours.Seconds(), "of-tar")
	b.ReportMetric(files*float64(b.N)/ours.Seconds(), "files/s")
	b.ReportMetric(again.Seconds()/float64(b.N), "s-unchanged")
}
