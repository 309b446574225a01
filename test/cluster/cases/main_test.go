// Package cases_test does on a real cluster what users do, and looks at the
// cluster and at the disks of its nodes for what has come of it.
package cases_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/cluster/progress"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
)

const (
	nodeA = "node-a"
	nodeB = "node-b"

	kustomization = "../overlay"
)

// c is the cluster of all cases.
var c *cluster.Cluster

func TestMain(m *testing.M) {
	box := sandbox.Enter()
	programs := flag.String("programs", "../../../bin/cluster", "directory with the programs of the cluster")
	flag.Parse()
	os.Exit(run(m, box, *programs))
}

func run(m *testing.M, box *sandbox.Sandbox, programs string) int {
	programs, err := filepath.Abs(programs)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	logs := filepath.Join(programs, "logs")
	if err := os.RemoveAll(logs); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("logs while it runs, and after a failure:", logs)
	// The sandbox takes everything down when this process ends, however it does.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		fmt.Printf("%v; logs: %s\n", <-signals, logs)
		os.Exit(130)
	}()

	ctx := context.Background()
	status := start(ctx, box, programs, logs)
	if status == 0 {
		status = m.Run()
	}
	if status != 0 {
		c.Summarize(ctx, os.Stdout)
		fmt.Println("logs of all programs and containers:", logs)
		return status
	}
	if err := os.RemoveAll(logs); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func start(ctx context.Context, box *sandbox.Sandbox, programs, logs string) int {
	begin := time.Now()
	var err error
	c, err = cluster.Up(ctx, cluster.Options{
		Sandbox:  box,
		Programs: programs,
		Logs:     logs,
		Nodes:    []string{nodeA, nodeB},
		Pools:    cluster.Pools(),
		Log:      progress.New(os.Stdout),
	})
	if err == nil {
		c.Log.Printf("the cluster is up after %.1f s", time.Since(begin).Seconds())
		err = c.Install(ctx, kustomization)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	c.Log.Printf("the driver is installed after %.1f s", time.Since(begin).Seconds())
	return 0
}
