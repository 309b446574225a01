package main

import (
	"errors"
	"flag"
	"io"
	"strings"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/mounter"
	"kubevirt.io/hostpath-provisioner/test/must"
)

func TestCommandLine(t *testing.T) {
	c, err := parse(strings.Fields("mount --target /pool/csi --device /dev/pool --fs-type ext4 --mount-options noatime,discard"), io.Discard)
	must.Succeed(t, err)
	device, ok := c.mounter.Claim.(*mounter.Device)
	if c.name != mountCommand || !ok || device.Type != "ext4" || strings.Join(device.Options, " ") != "noatime discard" {
		t.Errorf("parsed %+v, %+v", c, device)
	}
	if c, err = parse(strings.Fields("unmount --target /pool/csi"), io.Discard); err != nil || c.mounter.Claim != nil {
		t.Errorf("unmount without a claim: %+v, %v", c, err)
	}
}

func TestCommandLineReportsAllProblems(t *testing.T) {
	_, err := parse(strings.Fields("remount --target pool/../csi --volume /a --device /b --fs-type zfs --mount-options ro,,noatime --check-interval 0s rest"), io.Discard)
	for _, want := range []string{
		`"remount" is not a command`, `unexpected argument "rest"`, `--target: "pool/../csi"`, "--volume and --device", `--fs-type: "zfs"`,
		"ro is not possible", "has an empty option", "--check-interval",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
	_, err = parse([]string{mountCommand}, io.Discard)
	for _, want := range []string{"--target", "--volume or --device is missing"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not say %s", err, want)
		}
	}
}

func TestHelpNamesEveryCommand(t *testing.T) {
	for _, arg := range []string{"--help", "help"} {
		var output strings.Builder
		if _, err := parse([]string{arg}, &output); !errors.Is(err, flag.ErrHelp) {
			t.Errorf("%s: %v", arg, err)
		}
		for _, want := range []string{mountCommand, probeCommand, unmountCommand, "-patience"} {
			if !strings.Contains(output.String(), want) {
				t.Errorf("%s does not name %s", arg, want)
			}
		}
	}
}
