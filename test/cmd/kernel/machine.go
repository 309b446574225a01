package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"kubevirt.io/hostpath-provisioner/test/cmd/kernel/guest"
)

// A disk is a filesystem of the guest, named for its kind.
type disk struct {
	kind   string
	bytes  int64
	format []string
}

var disks = []disk{
	{"xfs", 4 << 30, []string{"mkfs.xfs", "-q"}},
	// A new file reads as zeros: the kernel need not write them while tests run.
	{"ext4", 2 << 30, []string{"mkfs.ext4", "-q", "-F", "-O", "quota,project",
		"-E", "quotatype=prjquota,assume_storage_prezeroed=1"}},
}

// boot makes a machine, runs it until it has carried out what the options say, and
// returns how the programs ended. With an error some results may be missing.
func boot(ctx context.Context, o options) ([]guest.Result, error) {
	if err := checkTools(); err != nil {
		return nil, err
	}
	k, err := findKernel(ctx, o.kernel)
	if err != nil {
		return nil, err
	}
	image, err := makeImage(ctx, o, k.modules)
	if err != nil {
		return nil, err
	}
	defer image.Close()

	ctx, cancel := timeout(ctx, o.timeout)
	defer cancel()
	m := newMachine(ctx, o, k.image, image)
	defer m.close()
	if err := m.addDisks(ctx); err != nil {
		return nil, err
	}
	return m.run(ctx, o)
}

// A machine is an emulator and its files.
type machine struct {
	emulator *exec.Cmd
	// ours are closed when the emulator has started, because it has them then.
	ours []*os.File
	// readers read what the guest sends, until the emulator ends.
	readers sync.WaitGroup
}

func newMachine(ctx context.Context, o options, kernel string, image *os.File) *machine {
	m := &machine{emulator: command(ctx, "qemu-system-x86_64")}
	parameters := []string{
		"console=ttyS0",
		// A broken kernel ends the machine, and is not a test that passes.
		"panic=-1", "oops=panic",
		// The rest is for speed, and patience with emulation.
		"mitigations=off", "nokaslr", "cryptomgr.notests", "nowatchdog", "random.trust_cpu=on",
		"init_on_alloc=0", "hardened_usercopy=off", "randomize_kstack_offset=off", "no5lvl",
		"rcupdate.rcu_expedited=1", "rcupdate.rcu_cpu_stall_suppress=1",
	}
	if !o.verbose {
		parameters = append(parameters, "quiet")
	}
	if o.selinux {
		parameters = append(parameters, "security=selinux", "enforcing=1")
	}
	if o.accel == "kvm" || o.accel == "auto" && kvmUsable() {
		m.add("-accel", "kvm", "-cpu", "host")
	} else {
		m.add("-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max")
		// Nothing that the emulated clock says of itself can be measured.
		parameters = append(parameters, "tsc=reliable", "no_timer_check", "lpj=4000000")
	}
	m.add("-machine", "q35", "-nodefaults", "-no-user-config", "-vga", "none", "-display", "none", "-no-reboot",
		"-smp", strconv.Itoa(o.cpus), "-m", strconv.Itoa(o.memory),
		"-kernel", kernel, "-initrd", inherit(m.emulator, image), "-append", strings.Join(parameters, " "))
	return m
}

func (m *machine) add(args ...string) { m.emulator.Args = append(m.emulator.Args, args...) }

// kvmUsable reports whether the processor can be lent to a guest. A /dev/kvm by itself
// says little: a machine that is virtual itself may have one, and a QEMU that tries
// it aborts.
func kvmUsable() bool {
	kvm, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer kvm.Close()
	processor, err := os.ReadFile("/proc/cpuinfo")
	return err == nil && regexp.MustCompile(`(?m)^flags.*\b(vmx|svm)\b`).Match(processor)
}

// addDisks makes the filesystems, in sparse files.
func (m *machine) addDisks(ctx context.Context) error {
	for _, d := range disks {
		file, err := nameless()
		if err != nil {
			return err
		}
		m.ours = append(m.ours, file)
		if err := file.Truncate(d.bytes); err != nil {
			return err
		}
		cmd := command(ctx, d.format[0], d.format[1:]...)
		cmd.Args = append(cmd.Args, inherit(cmd, file))
		if _, err := outputOf(cmd); err != nil {
			return because(ctx, err)
		}
		m.add("-drive", fmt.Sprintf("if=none,id=%s,format=raw,cache=unsafe,discard=unmap,file=%s", d.kind, inherit(m.emulator, file)),
			"-device", fmt.Sprintf("virtio-blk-pci,drive=%s,serial=%[1]s", d.kind))
	}
	return nil
}

// addStream lets read have what the guest writes to a port or the console, and
// returns QEMU's name for it.
func (m *machine) addStream(name string, read func(io.Reader)) (string, error) {
	from, to, err := os.Pipe()
	if err != nil {
		return "", err
	}
	m.ours = append(m.ours, to)
	m.add("-chardev", fmt.Sprintf("file,id=%s,path=%s", name, inherit(m.emulator, to)))
	m.readers.Go(func() {
		defer from.Close()
		read(from)
		// The guest must not wait for a reader that gave up.
		_, _ = io.Copy(io.Discard, from)
	})
	return name, nil
}

func (m *machine) close() {
	for _, file := range m.ours {
		file.Close()
	}
	m.ours = nil
	m.readers.Wait()
}

// received is all that has come from a guest.
type received struct {
	messages []guest.Message
	console  tail
	// errs is why something could not be received or stored.
	errs [4]error
}

// run starts the machine and reads what it sends until it has ended.
func (m *machine) run(ctx context.Context, o options) ([]guest.Result, error) {
	var got received
	m.add("-device", "virtio-serial-pci")
	streams := map[string]func(io.Reader){
		guest.Stdout: func(r io.Reader) { _, got.errs[0] = io.Copy(os.Stdout, r) },
		guest.Stderr: func(r io.Reader) { _, got.errs[1] = io.Copy(os.Stderr, r) },
		guest.Report: func(r io.Reader) { got.messages, got.errs[2] = readMessages(r) },
		guest.Archive: func(r io.Reader) {
			if o.out != "" {
				got.errs[3] = guest.Unpack(r, o.out)
			}
		},
	}
	for name, read := range streams {
		port, err := m.addStream(name, read)
		if err != nil {
			return nil, err
		}
		m.add("-device", fmt.Sprintf("virtserialport,chardev=%s,name=%[1]s", port))
	}
	console, err := m.addStream("console", func(r io.Reader) {
		var also io.Writer = &got.console
		if o.verbose {
			also = io.MultiWriter(also, os.Stderr)
		}
		_, _ = io.Copy(also, r) // of no use without the rest
	})
	if err != nil {
		return nil, err
	}
	m.add("-serial", "chardev:"+console)

	var complaint bytes.Buffer
	m.emulator.Stderr = &complaint
	if err := m.emulator.Start(); err != nil {
		return nil, err
	}
	m.close()
	err = m.emulator.Wait()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(complaint.Bytes()))
	}
	return got.outcome(ctx, err)
}

// outcome makes results of what was received, and an error if that is not all.
func (r *received) outcome(ctx context.Context, emulator error) ([]guest.Result, error) {
	var results []guest.Result
	var trouble []error
	done := false
	for _, m := range r.messages {
		switch {
		case m.Result != nil:
			results = append(results, *m.Result)
		case m.Trouble != "":
			trouble = append(trouble, errors.New(m.Trouble))
		}
		done = done || m.Done
	}
	if ctx.Err() != nil && !done {
		return results, context.Cause(ctx)
	}
	if done {
		return results, errors.Join(r.errs[:]...)
	}
	if emulator == nil {
		emulator = errors.New("exit status 0")
	}
	return results, errors.Join(append(trouble,
		fmt.Errorf("the machine ended before its time (emulator: %v); its console, which -v shows whole, said last:\n%s", emulator, r.console.String()))...)
}

func readMessages(r io.Reader) ([]guest.Message, error) {
	var all []guest.Message
	for decoder := json.NewDecoder(r); ; {
		var m guest.Message
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return all, err
		}
		all = append(all, m)
	}
}

// A tail keeps the last kilobytes written to it.
type tail struct{ text []byte }

func (t *tail) Write(p []byte) (int, error) {
	const most = 4 << 10
	t.text = append(t.text, p...)
	if over := len(t.text) - most; over > 0 {
		t.text = t.text[over:]
	}
	return len(p), nil
}

func (t *tail) String() string {
	return strings.TrimSpace(strings.ToValidUTF8(string(t.text), "?"))
}

// summarize prints how each program ended.
func summarize(w io.Writer, runs []program, results []guest.Result) {
	for i, r := range runs {
		ended := "did not end"
		for _, result := range results {
			if result.Run == i {
				ended = fmt.Sprintf("%6.1f s  %s", result.Duration.Seconds(), words(result.Status))
			}
		}
		fmt.Fprintf(w, "kernel: %-29s %s\n", ended, r)
	}
}

func words(status int) string {
	if status == 0 {
		return "passed"
	}
	if status > 128 {
		return fmt.Sprintf("ended by %v", syscall.Signal(status-128))
	}
	return fmt.Sprintf("exit status %d", status)
}
