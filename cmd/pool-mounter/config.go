package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/exec"

	"kubevirt.io/hostpath-provisioner/pkg/mounter"
)

const (
	mountCommand   = "mount"
	probeCommand   = "probe"
	lookCommand    = "look"
	unmountCommand = "unmount"
)

var commands = []string{mountCommand, probeCommand, lookCommand, unmountCommand}

const usage = `usage: pool-mounter mount|probe|look|unmount --target PATH [--volume PATH | --device PATH] [flags]

  mount    mount the claim at the target, keep it mounted and grow its filesystem with the device;
           SIGTERM ends the program and leaves the mount
  probe    exit with 0 if the claim is mounted at the target, and otherwise print why not and exit with 1;
           takes the flags of mount
  look     exit with 0 once no volume of the pool is published, mounted or not; the claim may be left out
  unmount  unmount the pool, and exit with 0 once it is unmounted. What was not mounted by a mounter, and is
           not the claim, stays. The claim may be left out

flags:
`

// A command is the command line, found to be good.
type command struct {
	name    string
	mounter *mounter.Mounter
}

// parse reports all that is wrong with the command line.
func parse(args []string, output io.Writer) (command, error) {
	var c command
	var target, volume, device, kind, options string
	var interval, patience time.Duration
	flags := flag.NewFlagSet("pool-mounter", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&target, "target", "", "where to mount the claim, an absolute path in this container (required); its parent is the pool's path on the host, mounted with mountPropagation Bidirectional")
	flags.StringVar(&volume, "volume", "", "the claim, if its volumeMode is Filesystem: where it is mounted in this container")
	flags.StringVar(&device, "device", "", "the claim, if its volumeMode is Block: where its device is in this container")
	flags.StringVar(&kind, "fs-type", mounter.Filesystems[0], "filesystem that a blank device gets: "+strings.Join(mounter.Filesystems, ", "))
	flags.StringVar(&options, "mount-options", "", "options for the filesystem of a device as in mount(8), separated by commas; project quotas are switched on where possible unless an option names quotas")
	flags.DurationVar(&interval, "check-interval", 30*time.Second, "how often to check the size of the device; a mount that went away is noticed at once")
	flags.DurationVar(&patience, "patience", time.Minute, "how long to try again before exiting with 1 and the reason")
	klog.InitFlags(flags)

	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		c.name, args = args[0], args[1:]
	}
	err := flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) || c.name == "help" {
		fmt.Fprint(output, usage)
		flags.SetOutput(output)
		flags.PrintDefaults()
		return command{}, flag.ErrHelp
	}
	problems := []error{err}
	if !slices.Contains(commands, c.name) {
		problems = append(problems, fmt.Errorf("%q is not a command; give %s first, or --help", c.name, strings.Join(commands, ", ")))
	}
	if flags.NArg() > 0 {
		problems = append(problems, fmt.Errorf("unexpected argument %q", flags.Arg(0)))
	}
	problems = append(problems, checkPath("target", target, false), checkPath("volume", volume, true), checkPath("device", device, true))
	problems = append(problems, checkClaim(c.name, volume, device), checkFilesystem(kind, options))
	if interval <= 0 || patience < 0 {
		problems = append(problems, errors.New("--check-interval and --patience: give a positive duration such as 30s"))
	}
	if err := errors.Join(problems...); err != nil {
		return command{}, err
	}
	log := klog.Background()
	c.mounter = &mounter.Mounter{Target: target, Interval: interval, Patience: patience, Log: log}
	switch {
	case volume != "":
		c.mounter.Claim = mounter.Volume{Path: volume}
	case device != "":
		c.mounter.Claim = &mounter.Device{Path: device, Type: kind, Options: splitOptions(options), Exec: exec.New(), Log: log}
	}
	return c, nil
}

func checkPath(name, p string, optional bool) error {
	if p == "" && optional {
		return nil
	}
	if !path.IsAbs(p) || path.Clean(p) != p || p == "/" {
		return fmt.Errorf("--%s: %q is not an absolute path without . and .., below the root", name, p)
	}
	return nil
}

func checkClaim(command, volume, device string) error {
	switch {
	case volume != "" && device != "":
		return errors.New("--volume and --device: a claim is one of them; leave one out")
	case volume == "" && device == "" && command != unmountCommand && command != lookCommand:
		return errors.New("--volume or --device is missing: give where the claim is in this container")
	}
	return nil
}

func splitOptions(options string) []string {
	if options == "" {
		return nil
	}
	return strings.Split(options, ",")
}

func checkFilesystem(kind, options string) error {
	var problems []error
	if !slices.Contains(mounter.Filesystems, kind) {
		problems = append(problems, fmt.Errorf("--fs-type: %q is none of %s", kind, strings.Join(mounter.Filesystems, ", ")))
	}
	for _, option := range splitOptions(options) {
		switch option {
		case "":
			problems = append(problems, fmt.Errorf("--mount-options: %q has an empty option", options))
		case "ro":
			problems = append(problems, errors.New("--mount-options: ro is not possible, a pool is written to"))
		}
	}
	return errors.Join(problems...)
}
