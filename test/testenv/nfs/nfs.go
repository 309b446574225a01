// Package nfs has the kernel of the guest of test/cmd/kernel serve a directory to itself, and cuts it off.
package nfs

import (
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/devices/devicestest"
	"kubevirt.io/hostpath-provisioner/test/must"
)

const control = "/proc/fs/nfsd"

// A Server exports a directory with NFSv4 on the loopback.
type Server struct {
	testing.TB
	Exported string
}

// Serve serves a directory until the test ends. It takes the place of rpc.nfsd and rpc.mountd, which write to the same files.
func Serve(t testing.TB) *Server {
	t.Helper()
	s := &Server{TB: t, Exported: t.TempDir()}
	devicestest.Run(t, "modprobe", "-a", "nfsd", "nfsv4")
	must.Succeed(t, unix.Mount("nfsd", control, "nfsd", 0, ""))
	t.Cleanup(func() { must.Succeed(t, unix.Unmount(control, 0)) })
	s.write(control+"/versions", "-3 +4 +4.2")
	// The shortest there is: until then nothing is opened.
	s.write(control+"/nfsv4leasetime", "10")
	s.write(control+"/nfsv4gracetime", "10")
	s.write(control+"/portlist", "tcp 2049")
	s.write(control+"/threads", "2")
	t.Cleanup(func() { s.write(control+"/threads", "0") })

	// Which clients are let in, what is exported to them with which flags, and that it is the root of NFSv4.
	// https://docs.kernel.org/filesystems/nfs/rpc-cache.html, and NFSEXP_* of linux/nfsd/export.h: async, no_subtree_check, fsid.
	const client, flags = "guest", 0x10 | 0x400 | 0x2000
	end := time.Now().Add(time.Hour).Unix()
	cache := func(name, format string, args ...any) {
		s.write("/proc/net/rpc/"+name+"/channel", fmt.Sprintf(format, args...))
	}
	cache("auth.unix.ip", "nfsd 127.0.0.1 %d %s", end, client)
	cache("nfsd.export", "%s %s %d %d 65534 65534 0", client, s.Exported, end, flags)
	cache("nfsd.fh", `%s 1 \x00000000 %d %s`, client, end, s.Exported)
	return s
}

func (s *Server) write(file, line string) {
	s.Helper()
	must.Succeed(s, os.WriteFile(file, []byte(line+"\n"), 0))
}

// Cut has no request reach the server, nor an answer the client, until the test ends.
func (s *Server) Cut() {
	s.Helper()
	s.loopback(false)
	s.Cleanup(func() { s.loopback(true) })
}

func (s *Server) loopback(up bool) {
	s.Helper()
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	must.Succeed(s, err)
	defer func() { must.Succeed(s, unix.Close(socket)) }()
	request, err := unix.NewIfreq("lo")
	must.Succeed(s, err, unix.IoctlIfreq(socket, unix.SIOCGIFFLAGS, request))
	flags := request.Uint16() &^ unix.IFF_UP
	if up {
		flags |= unix.IFF_UP
	}
	request.SetUint16(flags)
	must.Succeed(s, unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request))
}

// Mount mounts a directory of the export, not to be shared with a mount that is there. Attributes are asked for anew each time.
func (s *Server) Mount(directory, at string) {
	s.Helper()
	must.Succeed(s, unix.Mount("127.0.0.1:/"+directory, at, "nfs4", 0, "vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1,nosharecache,actimeo=0,timeo=100,retrans=3"))
}
