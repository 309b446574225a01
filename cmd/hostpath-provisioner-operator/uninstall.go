package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"kubevirt.io/hostpath-provisioner/pkg/operator"
)

// uninstall has the operator that runs in a namespace remove all HostPathProvisioners and VolumeMoves.
func uninstall(arguments []string, namespace string) error {
	flags := flag.NewFlagSet("hostpath-provisioner-operator uninstall", flag.ContinueOnError)
	// helm uninstall waits for five minutes, in which a node also has to fetch the image.
	timeout := flags.Duration("timeout", 4*time.Minute, "how long to wait until all is removed")
	if err := flags.Parse(arguments); errors.Is(err, flag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	scheme, err := operator.Scheme()
	if err != nil {
		return err
	}
	api, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctrl.SetupSignalHandler(), *timeout)
	defer stop()
	u := &operator.Uninstallation{Client: api, Namespace: namespace, Poll: time.Second, Say: func(format string, args ...any) { fmt.Printf(format+"\n", args...) }}
	return u.Run(ctx)
}
