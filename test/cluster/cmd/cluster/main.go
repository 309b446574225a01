// cluster starts a Kubernetes cluster on this machine, with the product
// installed, for a person to play with or for one program, and ends it again.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"kubevirt.io/hostpath-provisioner/test/cluster"
	"kubevirt.io/hostpath-provisioner/test/cluster/control"
	"kubevirt.io/hostpath-provisioner/test/cluster/process"
	"kubevirt.io/hostpath-provisioner/test/cluster/progress"
	"kubevirt.io/hostpath-provisioner/test/cluster/sandbox"
)

// kustomizations are what is installed on a cluster: the product, what it needs for snapshots, and the operator's webhook.
type kustomizations struct{ product, snapshots, restores string }

func main() {
	programs := flag.String("programs", "bin/cluster", "directory with the programs of the cluster")
	var install kustomizations
	flag.StringVar(&install.product, "install", "test/cluster/overlay", "kustomization to install; empty for none")
	flag.StringVar(&install.snapshots, "snapshots", "test/cluster/overlay/snapshot-controller", "kustomization with the snapshot-controller, installed before it")
	flag.StringVar(&install.restores, "restores", "", "kustomization with the operator and its webhook for restores, installed after it; empty for none")
	state := flag.String("state", "", "directory for what is to be found of a cluster that is up; run below that of the programs if not given")
	while := flag.Int("while", 0, "number of a process with whose end a cluster that is up ends too; 0 for none")
	logs := flag.String("logs", "", "directory for the logs of a cluster for one program, which is emptied; logs below that of the programs if not given")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: cluster [flags] up|down|run PROGRAM ARGUMENT...|images DIRECTORY")
		flag.PrintDefaults()
	}
	flag.Parse()
	dir, err := filepath.Abs(*programs)
	if err != nil {
		fatal(err)
	}
	// Absolute, because kubectl and people use them from elsewhere.
	run, err := filepath.Abs(cmp.Or(*state, filepath.Join(dir, "run")))
	if err != nil {
		fatal(err)
	}
	logsOfOne, err := filepath.Abs(cmp.Or(*logs, filepath.Join(dir, "logs")))
	if err != nil {
		fatal(err)
	}
	for _, path := range []string{dir, run, logsOfOne} {
		if err := sandbox.Shared(path); err != nil {
			fatal(err)
		}
	}
	up := files{dir: run, programs: dir}
	switch flag.Arg(0) {
	case "up":
		err = up.up(os.Args[1:])
	case "down":
		err = up.down()
	case "serve":
		err = up.serve(install, *while)
	case "run":
		err = runOne(dir, logsOfOne, install, flag.Args()[1:])
	case "images":
		err = writeImages(dir, flag.Arg(1))
	default:
		flag.Usage()
		os.Exit(2)
	}
	if err != nil {
		fatal(err)
	}
}

// writeImages makes the images of a cluster's nodes, for one that is to be started
// elsewhere.
func writeImages(programs, dir string) error {
	if dir == "" {
		return errors.New("name the directory for the images")
	}
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return err
	}
	archives, err := cluster.MakeImages(context.Background(), programs, dir)
	if err != nil {
		return err
	}
	// That of the driver is elsewhere.
	return os.Link(archives[0], filepath.Join(dir, filepath.Base(archives[0])))
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "cluster:", err)
	os.Exit(1)
}

// files are what is to be found of a running cluster, and the programs that it is of.
type files struct{ dir, programs string }

func (f files) file(name string) string { return filepath.Join(f.dir, name) }
func (f files) kubeconfig() string      { return f.file("kubeconfig") }
func (f files) logs() string            { return f.file("logs") }
func (f files) output() string          { return f.file("output") }
func (f files) pid() string             { return f.file("pid") }

// up starts this program again in the background, where it serves the cluster,
// and returns when that is up.
func (f files) up(args []string) error {
	if pid, ok := f.running(); ok {
		return fmt.Errorf("a cluster is up already (process %d); end it with make cluster-down", pid)
	}
	if err := errors.Join(os.RemoveAll(f.dir), os.MkdirAll(f.dir, 0o755)); err != nil {
		return err
	}
	output, err := os.Create(f.output())
	if err != nil {
		return err
	}
	defer output.Close()
	args[len(args)-1] = "serve"
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	if err := os.WriteFile(f.pid(), []byte(strconv.Itoa(cmd.Process.Pid)), 0o644); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := f.follow(ctx, cmd); err != nil {
		return errors.Join(err, f.down())
	}
	fmt.Printf(welcome, f.kubeconfig(), f.programs, f.logs())
	return nil
}

const welcome = `
The cluster is up, and the driver is installed on its two nodes.

  export KUBECONFIG=%s PATH=$PATH:%s
  kubectl get nodes,csistoragecapacities -A
  kubectl kustomize deploy/csi/example | sed 's|image: .*|image: localhost/busybox:test|' | kubectl apply -f -
  make cluster-down

Logs are in %s
`

// follow prints what the serving process prints, until it is up or has ended.
func (f files) follow(ctx context.Context, cmd *exec.Cmd) error {
	output, err := os.Open(f.output())
	if err != nil {
		return err
	}
	defer output.Close()
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		_, up := os.Stat(f.kubeconfig())
		if _, err := io.Copy(os.Stdout, output); err != nil {
			return err
		}
		if up == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.New("interrupted")
		case err := <-exited:
			_, _ = io.Copy(os.Stdout, output) // the last words
			return fmt.Errorf("the cluster did not start: %w", err)
		}
	}
}

// running reports whether a cluster is up, and which process serves it.
func (f files) running() (int, bool) {
	text, err := os.ReadFile(f.pid())
	if err != nil {
		return 0, false
	}
	pid, err := strconv.Atoi(string(text))
	if err != nil {
		return 0, false
	}
	// The number may be another process's by now.
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return pid, err == nil && strings.HasSuffix(string(args), "\x00serve\x00")
}

// down ends the cluster and waits until nothing of it is left.
func (f files) down() error {
	pid, ok := f.running()
	if !ok {
		fmt.Println("no cluster is up")
		return nil
	}
	found, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	if err := found.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	log := progress.New(os.Stdout)
	err = log.Until(context.Background(), 2*time.Minute, "the cluster to end", func(context.Context) (string, error) {
		if _, ok := f.running(); ok {
			return "still there", nil
		}
		return "", nil
	})
	if err == nil {
		log.Printf("the cluster is gone; its logs are in %s", f.logs())
	}
	return err
}

// serve runs the cluster until it is asked to end, or a process ends.
func (f files) serve(install kustomizations, while int) error {
	// Made outside, so that it listens in the network of the machine.
	var outside []*os.File
	if sandbox.Outside() {
		if while != 0 {
			if err := process.OnEnd(while, func() { _ = syscall.Kill(os.Getpid(), syscall.SIGTERM) }); err != nil {
				return err
			}
		}
		listener, err := listen()
		if err != nil {
			return err
		}
		outside = append(outside, listener)
	}
	box := sandbox.Enter(outside...)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	c, err := start(ctx, box, f.programs, f.logs(), install)
	if err != nil {
		return err
	}
	if len(box.Files) == 0 {
		return errors.New("no socket to serve the API on")
	}
	listener, err := net.FileListener(box.Files[0])
	if err != nil {
		return err
	}
	go forward(listener, net.JoinHostPort("127.0.0.1", control.Port))
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		return err
	}
	// Complete when it is seen: it says that the cluster is up.
	if err := c.WriteKubeconfig(f.kubeconfig()+".new", "https://localhost:"+port); err != nil {
		return err
	}
	if err := os.Rename(f.kubeconfig()+".new", f.kubeconfig()); err != nil {
		return err
	}
	<-ctx.Done()
	return os.Remove(f.kubeconfig())
}

// start starts a cluster inside a sandbox, with what is to be installed.
func start(ctx context.Context, box *sandbox.Sandbox, programs, logs string, install kustomizations) (*cluster.Cluster, error) {
	c, err := cluster.Up(ctx, cluster.Options{
		Sandbox:  box,
		Programs: programs,
		Logs:     logs,
		Nodes:    []string{"node-a", "node-b"},
		Pools:    cluster.Pools("btrfs"),
		Log:      progress.New(os.Stdout),
	})
	if err == nil {
		err = install.on(ctx, c)
	}
	if err != nil {
		c.Summarize(context.WithoutCancel(ctx), os.Stdout)
	}
	return c, err
}

// on installs them on a cluster.
func (install kustomizations) on(ctx context.Context, c *cluster.Cluster) error {
	if install.product == "" {
		return nil
	}
	if err := c.InstallSnapshotController(ctx, install.snapshots); err != nil {
		return err
	}
	if err := c.Install(ctx, install.product); err != nil || install.restores == "" {
		return err
	}
	return c.InstallRestores(ctx, install.restores)
}

// runOne runs a program inside, with a cluster of its own that $KUBECONFIG leads
// to.
func runOne(programs, logs string, install kustomizations, args []string) error {
	if len(args) == 0 {
		return errors.New("name the program to run")
	}
	box := sandbox.Enter()
	if err := os.RemoveAll(logs); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	c, err := start(ctx, box, programs, logs, install)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w; logs: %s", args[0], err, logs)
	}
	return os.RemoveAll(logs)
}

// listen opens a port that is free on this machine.
func listen() (*os.File, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	return listener.(*net.TCPListener).File()
}

// forward passes each connection on.
func forward(listener net.Listener, to string) {
	for {
		from, err := listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer from.Close()
			target, err := net.Dial("tcp", to)
			if err != nil {
				return
			}
			defer target.Close()
			go func() {
				_, _ = io.Copy(target, from)
				_ = target.(*net.TCPConn).CloseWrite()
			}()
			_, _ = io.Copy(from, target)
		}()
	}
}
