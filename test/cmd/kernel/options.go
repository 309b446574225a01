package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cmd/kernel/guest"
)

const usage = `usage: kernel [option...] [--] program [argument...]
       kernel [option...] --run 'program argument...' --run '...'

A program whose name has a slash is a file of this machine and is brought along; any other is one that the
guest has. The exit status is the program's (the worst one, if there are several), 128 and a signal's number
if that killed it, 124 when the time is up, 125 when the machine failed.

`

// options are what the command line asks for.
type options struct {
	runs       []program
	adds       []addition
	env        []string
	out        string
	selinux    bool
	containers bool
	cpus       int
	memory     int // MiB
	timeout    time.Duration
	accel      string
	kernel     string
	verbose    bool
}

// A program is what to run in the guest.
type program struct {
	guest.Run
	// file is the program's file on this machine, or empty if the guest has it.
	file string
}

// String is what the command line had.
func (p program) String() string {
	words := slices.Concat(p.Env, p.Args)
	if p.file != "" {
		words[len(p.Env)] = p.file
	}
	return strings.Join(words, " ")
}

// An addition is a file or directory of this machine that goes into the guest.
type addition struct{ file, path string }

func parse(args []string, messages io.Writer) (options, error) {
	o := options{selinux: true}
	flags := flag.NewFlagSet("kernel", flag.ContinueOnError)
	flags.SetOutput(messages)
	flags.Usage = func() {
		fmt.Fprint(messages, usage)
		flags.PrintDefaults()
	}
	flags.Func("run", "run this `program` with its arguments, split at spaces; NAME=VALUE before it sets a variable; may be repeated", func(s string) error {
		return o.addRun(strings.Fields(s))
	})
	flags.Func("add", "put this `file or directory:path` into the guest, a program with its shared libraries; a relative path is below /work", o.addFile)
	flags.Func("env", "set `name=value` for the programs; a name without a value passes a variable on", o.addVariable)
	flags.StringVar(&o.out, "out", "", "copy what the programs leave in /out to this `directory`")
	flags.Func("selinux", "`on` (default) or off", func(s string) error {
		o.selinux = s == "on"
		return oneOf(s, "on", "off")
	})
	flags.BoolVar(&o.containers, "containers", false, "be a machine for containers, with a root filesystem that they can leave; goes with --selinux off")
	flags.IntVar(&o.cpus, "cpus", 2, "processors of the machine")
	flags.IntVar(&o.memory, "memory", 2048, "memory of the machine in `MiB`; half of it is for files outside of /mnt")
	flags.DurationVar(&o.timeout, "timeout", 15*time.Minute, "end the machine after this time")
	flags.StringVar(&o.accel, "accel", "auto", "kvm, tcg (emulation), or auto: KVM where it is usable")
	flags.StringVar(&o.kernel, "kernel", "linux-image-cloud-amd64", "Debian `package` with the kernel, or the file of one")
	flags.BoolVar(&o.verbose, "v", false, "show the machine's console on the standard error")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		if len(o.runs) > 0 {
			return o, fmt.Errorf("%q: with --run there is no other program", flags.Arg(0))
		}
		if err := o.addSingle(flags.Args()); err != nil {
			return o, err
		}
	}
	return o, o.check()
}

func (o *options) check() error {
	if len(o.runs) == 0 {
		return errors.New("no program to run (kernel --help says more)")
	}
	if o.containers && o.selinux {
		return errors.New("--containers goes with --selinux off")
	}
	if o.cpus < 1 || o.memory < 1 || o.timeout <= 0 {
		return errors.New("--cpus, --memory and --timeout have to be positive")
	}
	if err := oneOf(o.accel, "auto", "kvm", "tcg"); err != nil {
		return fmt.Errorf("--accel: %v", err)
	}
	files := map[string]string{}
	for _, r := range o.runs {
		name := filepath.Base(r.Args[0])
		if before, ok := files[name]; ok && before != r.file {
			return fmt.Errorf("%s and %s have the same name, and with it the same directory in the guest", before, r.file)
		}
		files[name] = r.file
	}
	return nil
}

// addRun takes the value of --run.
func (o *options) addRun(words []string) error {
	var env []string
	for len(words) > 0 && strings.Contains(words[0], "=") {
		env, words = append(env, words[0]), words[1:]
	}
	if len(words) == 0 {
		return errors.New("no program")
	}
	p := program{Run: guest.Run{Args: words, Env: env}}
	if strings.Contains(words[0], "/") {
		if err := executable(words[0]); err != nil {
			return err
		}
		p.file = words[0]
		p.Args = append([]string{path.Join(guest.Directory(words[0]), filepath.Base(words[0]))}, words[1:]...)
	}
	o.runs = append(o.runs, p)
	return nil
}

// addSingle takes the program that is the rest of the command line. It finds the
// testdata of the working directory in its own, which is what `go test -exec`
// needs.
func (o *options) addSingle(words []string) error {
	if strings.Contains(words[0], "=") {
		return fmt.Errorf("%q: use --env to set a variable", words[0])
	}
	if err := o.addRun(words); err != nil {
		return err
	}
	if info, err := os.Stat("testdata"); err == nil && info.IsDir() {
		o.adds = append(o.adds, addition{"testdata", path.Join(guest.Directory(words[0]), "testdata")})
	}
	return nil
}

func (o *options) addFile(s string) error {
	file, to, ok := strings.Cut(s, ":")
	if !ok || file == "" || to == "" {
		return errors.New("has to be FILE:PATH")
	}
	if _, err := os.Stat(file); err != nil {
		return err
	}
	if !path.IsAbs(to) {
		to = path.Join(guest.Work, to)
	}
	o.adds = append(o.adds, addition{file, to})
	return nil
}

func (o *options) addVariable(s string) error {
	name, _, given := strings.Cut(s, "=")
	if name == "" {
		return errors.New("has no name")
	}
	if !given {
		value, ok := os.LookupEnv(name)
		if !ok {
			return nil
		}
		s += "=" + value
	}
	o.env = append(o.env, s)
	return nil
}

func executable(file string) error {
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0 {
		return fmt.Errorf("%s is not a program", file)
	}
	return nil
}

func oneOf(value string, allowed ...string) error {
	for _, a := range allowed {
		if value == a {
			return nil
		}
	}
	return fmt.Errorf("%q is none of %s", value, strings.Join(allowed, ", "))
}
