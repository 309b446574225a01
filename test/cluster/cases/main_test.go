// Package cases_test does on a real cluster what users do, and checks the
// cluster and at the disks of its nodes for what has come of it.
package cases_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/cluster/progress"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
	"kubevirt.io/hostpath-provisioner/test/testenv/trap"
)

const (
	nodeA = "node-a"
	nodeB = "node-b"

	kustomization      = "../overlay"
	snapshotController = "../overlay/snapshot-controller"
)

// c is the cluster of all cases.
var c *cluster.Cluster

// quietTime is how long the operator is to write nothing.
var quietTime time.Duration

// poolKind is the filesystem of the pools whose sizes the kernel enforces.
var poolKind string

func TestMain(m *testing.M) {
	trap.Launch()
	box := sandbox.Enter()
	programs := flag.String("programs", "../../../bin/cluster", "directory with the programs of the cluster")
	logs := flag.String("logs", "", "directory for the logs of the cluster, which is emptied; logs below that of the programs if not given")
	nodes := flag.String("nodes", nodeA+","+nodeB, "names of the nodes; many cases want both")
	healthOn := flag.String("health-on", nodeA, "names of the nodes whose kubelet shows the health of volumes, by a feature gate")
	slower := flag.Int("slower", 1, "everything may take so many times as long as on a real machine")
	images := flag.String("images", "", "directory with the images, as cluster images makes it; they are made if not given")
	flag.StringVar(&poolKind, "pools", "btrfs", "filesystem of the pools with quotas: btrfs or xfs")
	flag.IntVar(&killEvery, "kill-every", 24, "kill programs before each so many of their steps, or four times as often where that is fast; 1 for all")
	flag.DurationVar(&quietTime, "quiet", 15*time.Second, "how long to see that the operator writes nothing while nothing changes")
	flag.Parse()
	if *logs == "" {
		*logs = filepath.Join(*programs, "logs")
	}
	var archives []string
	if *images != "" {
		var err error
		if archives, err = filepath.Glob(filepath.Join(*images, "*.tar")); err != nil || len(archives) == 0 {
			fmt.Fprintf(os.Stderr, "no images in %s (%v)\n", *images, err)
			os.Exit(1)
		}
	}
	os.Exit(run(m, *logs, cluster.Options{
		Sandbox:  box,
		Programs: *programs,
		Images:   archives,
		Nodes:    strings.Split(*nodes, ","),
		Pools:    cluster.Pools(poolKind),
		HealthOn: strings.Split(*healthOn, ","),
		Log:      progress.New(os.Stdout).Slower(*slower),
	}))
}

func run(m *testing.M, logs string, options cluster.Options) int {
	programs, err := filepath.Abs(options.Programs)
	if err == nil {
		logs, err = filepath.Abs(logs)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	options.Programs, options.Logs = programs, logs
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
	status := start(ctx, options)
	if status == 0 {
		status = m.Run()
	}
	// Only all cases together use all rights.
	if status == 0 && slices.Contains([]string{"", "."}, flag.Lookup("test.run").Value.String()) {
		if err := rights(ctx, logs); err != nil {
			fmt.Printf("rights of the programs:\n%v\nFAIL\n", err)
			status = 1
		}
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

func start(ctx context.Context, options cluster.Options) int {
	begin := time.Now()
	var err error
	c, err = cluster.Up(ctx, options)
	if err == nil {
		c.Log.Printf("the cluster is up after %.1f s", time.Since(begin).Seconds())
		err = c.InstallSnapshotController(ctx, snapshotController)
	}
	if err == nil {
		err = c.Install(ctx, kustomization)
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	c.Log.Printf("the driver is installed after %.1f s", time.Since(begin).Seconds())
	return 0
}
