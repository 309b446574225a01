package privilege

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/mover"
	"kubevirt.io/hostpath-provisioner/test/drivertest"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// What the operator gives to movers that copy (pkg/operator/move, TestWordsOfMovers). Those that do another step have no capability.
var (
	reading = privilege.Needed
	writing = slices.Concat(privilege.Needed, privilege.ForCopies)
)

// A volume moves that has what each capability of movers is for. Without one of them that fails; with all of them, and the driver's mounts but
// for those that show on the host (TestMoverPod), it does not.
func TestRightsOfMovers(t *testing.T) {
	testenv.NeedRoot(t)
	if testenv.Guest() {
		t.Skip("make test has it: filesystems of the guest change nothing of it")
	}
	driver, err := program()
	must.Succeed(t, err)
	v := drivertest.Volume{ID: "moved", Bytes: 16 * mib}
	keys := t.TempDir()
	authority := must.Value(drivertest.NewAuthority(keys))(t)
	out := newSide(t, driver, place{name: "ext4", mount: func(t *testing.T) string { return testenv.LoopFS(t, "ext4", 512*mib) }}, "move-out", keys)
	in := newSide(t, driver, place{name: "btrfs", mount: func(t *testing.T) string { return testenv.CountingBtrfs(t, 512*mib) }, enforced: true}, "move-in", keys)
	out.identify(t, authority, mover.SourceName, x509.ExtKeyUsageClientAuth)
	in.identify(t, authority, mover.TargetName, x509.ExtKeyUsageServerAuth)
	must.Succeed(t, out.serving(v), in.serving(v), out.create(v), fill(out.inPool(v)))
	for _, c := range reading {
		t.Run("reading without "+c.String(), func(t *testing.T) {
			wantFailure(t, out, in, v, slices.DeleteFunc(slices.Clone(reading), is(c)), writing)
		})
	}
	for _, c := range writing {
		t.Run("writing without "+c.String(), func(t *testing.T) {
			wantFailure(t, out, in, v, reading, slices.DeleteFunc(slices.Clone(writing), is(c)))
		})
	}
	fence, err := copyVolume(t, out, in, v, reading, writing)
	must.Succeed(t, err, in.step(t, "confirm", "--fence="+fence))
	address := "--address=" + testenv.FreeAddress(t)
	vouch := in.start(t, nil, "vouch", "--fence="+fence, address)
	vouch.until(mover.Listening)
	must.Succeed(t, out.step(t, "remove", address), out.erased(v), vouch.cmd.Process.Kill())
	if _, err := vouch.end(); err == nil {
		t.Error("a mover that vouches ended by itself")
	}
	must.Succeed(t, in.publish(v), in.measure(v), in.unpublish(v), in.remove(v), in.erased(v))
}

// wantFailure expects a copy to fail, or to lack something, and undoes it.
func wantFailure(t *testing.T, out, in *side, v drivertest.Volume, reading, writing []privilege.Capability) {
	t.Helper()
	_, err := copyVolume(t, out, in, v, reading, writing)
	if err == nil {
		t.Error("it is not needed")
	}
	t.Log(err)
	must.Succeed(t, in.step(t, "abort"), out.step(t, "undo", "--target-aborted"), in.erased(v))
}

// A side is a node of a move, with the mover in a container of its own.
type side struct {
	*host
	command string
	within  container
	args    []string
	move    int // the number of the move that it takes part in
}

func newSide(t *testing.T, driver string, p place, command, keys string) *side {
	t.Helper()
	// The driver keeps what copies need, too.
	h := newHost(t, driver, p, p.mount(t), lack{takeAway: func(c *container) { c.Capabilities = append(c.Capabilities, privilege.ForCopies...) }})
	mounts := slices.DeleteFunc(h.mounts(), func(m mount) bool { return m.Propagation == bidirectional })
	mounts = append(mounts, mount{Name: "certificates", Host: keys, Path: keys, Propagation: none, ReadOnly: true})
	pools := must.Value(json.Marshal([]drivertest.PoolConfig{{Name: "local", Path: h.pool}}))(t)
	return &side{
		host: h, command: command,
		within: container{Driver: driver, Root: t.TempDir(), Mounts: mounts, Cgroup: nodesGroup(t)},
		args:   []string{"--endpoint=" + h.Process.Endpoint(), "--datadir=" + string(pools), "--volume=moved", "--peer=other"},
	}
}

// identify has the mover have a certificate.
func (s *side) identify(t *testing.T, a drivertest.Authority, name string, use x509.ExtKeyUsage) {
	t.Helper()
	certificate, key, err := a.Issue(name, use)
	must.Succeed(t, err)
	s.args = append(s.args, "--cert-file="+certificate, "--key-file="+key, "--ca-file="+a.File)
}

// A moverRun is one run of a mover.
type moverRun struct {
	cmd    *exec.Cmd
	events *json.Decoder
	stderr bytes.Buffer
}

func (s *side) start(t *testing.T, can []privilege.Capability, step string, more ...string) *moverRun {
	t.Helper()
	c := s.within
	c.Capabilities = can
	encoded := must.Value(json.Marshal(c))(t)
	self := must.Value(os.Executable())(t) // which becomes the mover
	r := &moverRun{cmd: exec.CommandContext(t.Context(), self, slices.Concat([]string{s.command, "--step=" + step, fmt.Sprintf("--move=move-%d", s.move)}, s.args, more)...)}
	r.cmd.Env = append(os.Environ(), containerVariable+"="+string(encoded))
	r.cmd.Stderr = &r.stderr
	said := must.Value(r.cmd.StdoutPipe())(t)
	must.Succeed(t, r.cmd.Start())
	r.events = json.NewDecoder(said)
	return r
}

// until reads what a mover says, to an event or to the last one.
func (r *moverRun) until(event string) (last mover.Event) {
	for last.Event == "" || last.Event != event {
		var next mover.Event
		if r.events.Decode(&next) != nil {
			break
		}
		last = next
	}
	return last
}

// end waits for a mover to end.
func (r *moverRun) end() (last mover.Event, err error) {
	last = r.until("")
	if err = r.cmd.Wait(); err != nil {
		err = fmt.Errorf("%w: %s", err, &r.stderr)
	}
	return last, err
}

// step does one that copies nothing, and needs no capability.
func (s *side) step(t *testing.T, step string, more ...string) error {
	t.Helper()
	return must.Err(s.start(t, nil, step, more...).end())
}

// copyVolume copies the volume for a move of its own, because one that was undone never goes on, and hands it over. It returns an error if the copy is another.
func copyVolume(t *testing.T, out, in *side, v drivertest.Volume, reading, writing []privilege.Capability) (fence string, err error) {
	t.Helper()
	out.move++
	in.move++
	must.Succeed(t, unread(out.inPool(v)))
	want := must.Value(describe(out.inPool(v)))(t)
	address := "--address=" + testenv.FreeAddress(t)
	receiver := in.start(t, writing, "copy", address)
	receiver.until(mover.Listening)
	last, err := out.start(t, reading, "copy", address).end()
	if err != nil {
		_ = receiver.cmd.Process.Kill() // it may have ended
		_, ended := receiver.end()
		return "", errors.Join(err, ended)
	}
	if _, err = receiver.end(); err != nil {
		return "", err
	}
	got, err := describe(in.inPool(v))
	for path := range want {
		if got[path] != want[path] && err == nil {
			err = fmt.Errorf("%s is %s, want %s", path, got[path], want[path])
		}
	}
	return last.Fence, err
}

// fill makes what each capability is for.
func fill(volume string) error {
	at := func(name string) string { return filepath.Join(volume, name) }
	capability := []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00") // cap_net_raw+ep
	return errors.Join(
		os.Mkdir(at("closed"), 0o700), os.WriteFile(at("closed/file"), []byte("content"), 0), os.Chown(at("closed/file"), user, user),
		os.Chown(at("closed"), user, user), os.Chmod(at("closed"), 0),
		os.WriteFile(at("setgid"), []byte("program"), 0o700), os.Chown(at("setgid"), user, user), os.Chmod(at("setgid"), 0o755|os.ModeSetgid),
		os.WriteFile(at("capable"), []byte("program"), 0o700), unix.Setxattr(at("capable"), "security.capability", capability, 0),
		os.WriteFile(at("trusted"), nil, 0o600), unix.Setxattr(at("trusted"), "trusted.t", []byte("value"), 0),
		os.WriteFile(at("unread"), []byte("content"), 0o600), os.Chown(at("unread"), user, user),
		unix.Mknod(at("null"), unix.S_IFCHR|0o640, int(unix.Mkdev(1, 3))),
	)
}

// unread has a file of a user be one that was not read since it was written: the next to read it is noted, unless it may ask for no note.
func unread(volume string) error {
	written := time.Unix(1_000_000_000, 0)
	return os.Chtimes(filepath.Join(volume, "unread"), written.Add(-time.Hour), written)
}

// describe says what each entry of a tree is.
func describe(root string) (map[string]string, error) {
	all := make(map[string]string)
	return all, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err := errors.Join(err, unix.Lstat(path, &st)); err != nil {
			return err
		}
		is := fmt.Sprintf("of mode %o, of %d:%d, the device %d, written at %d", st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Nano())
		if entry.Type().IsRegular() {
			content, err := content(path)
			if err != nil {
				return err
			}
			is += fmt.Sprintf(", read at %d, with %q", st.Atim.Nano(), content)
		}
		for _, name := range []string{"security.capability", "trusted.t"} {
			value := make([]byte, 64)
			if n, err := unix.Lgetxattr(path, name, value); err == nil {
				is += fmt.Sprintf(", with the attribute %s %x", name, value[:n])
			}
		}
		relative, err := filepath.Rel(root, path)
		all[relative] = is
		return err
	})
}

// content reads a file without a note of that.
func content(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOATIME, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}
