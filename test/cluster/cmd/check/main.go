// check says what this machine lacks for a cluster, before anything is built for one.
package main

import (
	"errors"
	"fmt"
	"os"

	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
)

func main() {
	if err := check(); err != nil {
		fmt.Fprintf(os.Stderr, "this machine cannot run a cluster:\n%v\n", err)
		os.Exit(1)
	}
}

func check() error {
	var root error
	if os.Geteuid() != 0 {
		root = errors.New("it needs root")
	}
	_, loop := os.Stat("/dev/loop-control")
	return errors.Join(root, loop, sandbox.CheckCgroups(), sandbox.CheckPaths())
}
