package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"kubevirt.io/hostpath-provisioner/pkg/cmdline"
	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/migrate"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
)

const migrateCommand = "migrate"

// migration is the command line of migrate, found to be good.
type migration struct {
	migrate.Config
	socket     string
	kubeconfig string // empty inside a cluster
	// stay has the process wait for a signal after its work, so that its pod is there to run commands in.
	stay bool
}

// migrateMain runs the command and ends the process with status 1 if a claim cannot be migrated.
func migrateMain(args []string) {
	c, err := parseMigration(args, os.Getenv, os.Stdout)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "hostpath-provisioner %s: invalid command line:\n%v\n", migrateCommand, err)
		os.Exit(1)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	err = runMigration(ctx, c, os.Stdout)
	if err != nil {
		fmt.Fprintf(os.Stderr, "hostpath-provisioner %s: %v\n", migrateCommand, err)
	}
	if c.stay {
		<-ctx.Done()
		return
	}
	if err != nil {
		os.Exit(1)
	}
}

func runMigration(ctx context.Context, c migration, out io.Writer) (err error) {
	api, err := connect(c.kubeconfig)
	if err != nil {
		return fmt.Errorf("connect to the API server: %w", err)
	}
	driver, err := client.New(c.socket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, driver.Close()) }()
	return migrate.Run(ctx, c.Config, api, driver, out)
}

// parseMigration reads the command line and reports all that is wrong with it.
func parseMigration(args []string, getenv func(string) string, output io.Writer) (migration, error) {
	var c migration
	var pools string
	flags := flag.NewFlagSet("hostpath-provisioner "+migrateCommand, flag.ContinueOnError)
	flags.SetOutput(output)
	flags.Func("claim", "migrate this claim, namespace/name; can be given several times", addName(&c.Chosen.Claims))
	flags.StringVar(&c.Chosen.Namespace, "namespace", "", "migrate the claims of this namespace")
	flags.StringVar(&c.Chosen.Class, "from-class", "", "migrate the claims whose PersistentVolumes have this StorageClass")
	flags.BoolVar(&c.Chosen.All, "all", false, "migrate all claims of this node")
	flags.BoolVar(&c.Apply, "apply", false, "perform the steps; without this flag they are only listed")
	flags.BoolVar(&c.Undo, "undo", false, "restore the objects that were saved")
	flags.IntVar(&c.Steps, "steps", 0, "stop after this many steps of each claim; 0 for all")
	flags.DurationVar(&c.Timeout, "timeout", 2*time.Minute, "how long to wait for the cluster in one step")
	flags.StringVar(&c.Class, "to-class", getenv("TO_CLASS"), "StorageClass of the CSI driver for the new objects; it says the pool; default $TO_CLASS")
	flags.StringVar(&pools, "datadir", getenv("DATADIR"), "storage pools, the driver's --datadir; default $DATADIR")
	flags.Func("from-dir", "directory whose children may be moved into the pool, such as PV_DIR of the provisioner; can be given several times; default $FROM_DIR", c.addFrom)
	flags.Func("no-provisioner", "pod that has the pool mounted and is no provisioner, namespace/name, although where its variables come from cannot be seen; can be given several times", addName(&c.NoProvisioners))
	flags.StringVar(&c.Node, "node-name", getenv("NODE_NAME"), "name of this node; default $NODE_NAME")
	flags.StringVar(&c.Directory, "save-dir", "/var/lib/hostpath-migrate", "directory for the files with the old objects")
	flags.StringVar(&c.HostRoot, "host-root", cmp.Or(getenv("HOST_ROOT"), "/"), "where the root directory of the node is mounted, in which paths of pods and of other volumes are looked up; default $HOST_ROOT or /")
	flags.StringVar(&c.socket, "socket", "/csi/csi.sock", "the driver's socket")
	flags.StringVar(&c.kubeconfig, "kubeconfig", "", "kubeconfig file; not needed inside a cluster")
	flags.BoolVar(&c.stay, "stay", false, "wait for a signal afterwards, so that a pod stays in which to run this command")

	problems := cmdline.ParseAll(flags, args)
	if errors.Is(problems, flag.ErrHelp) {
		return migration{}, flag.ErrHelp
	}
	note := func(flag string, err error) {
		if err != nil {
			problems = errors.Join(problems, fmt.Errorf("--%s: %w", flag, err))
		}
	}
	if from := getenv("FROM_DIR"); len(c.From) == 0 && from != "" {
		note("from-dir", c.addFrom(from))
	}
	if c.Chosen.Empty() {
		problems = errors.Join(problems, errors.New("no claims are chosen: give --claim, --namespace, --from-class or --all"))
	}
	var err error
	if c.Pools, err = poolconfig.Parse(pools, "/"); !c.Undo {
		note("datadir", err)
	}
	_, err = parseNode(c.Node)
	note("node-name", err)
	if c.Class == "" && !c.Undo {
		note("to-class", errors.New("is missing; name a StorageClass of the CSI driver"))
	}
	if c.Steps < 0 || c.Timeout < 0 {
		problems = errors.Join(problems, errors.New("--steps and --timeout cannot be negative"))
	}
	return c, problems
}

// addName adds what a flag names to a list.
func addName(to *[]types.NamespacedName) func(string) error {
	return func(s string) error {
		namespace, name, ok := strings.Cut(s, "/")
		if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
			return fmt.Errorf("%q is not namespace/name", s)
		}
		*to = append(*to, types.NamespacedName{Namespace: namespace, Name: name})
		return nil
	}
}

func (c *migration) addFrom(s string) error {
	if !filepath.IsAbs(s) {
		return fmt.Errorf("%q is not an absolute path", s)
	}
	c.From = append(c.From, filepath.Clean(s))
	return nil
}
