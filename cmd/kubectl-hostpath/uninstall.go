package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"kubevirt.io/hostpath-provisioner/pkg/kubectl"
)

// checkUninstall refuses flags of uninstall that do not fit the command.
func (r *request) checkUninstall() error {
	switch given := len(r.files) > 0; {
	case r.command == "uninstall" && !given:
		return errors.New("uninstall needs the files that the operator was installed from: -f hostpath-provisioner-operator.yaml")
	case r.command != "uninstall" && (given || r.yes):
		return errors.New("--filename, --kustomize and --yes are for uninstall")
	}
	return nil
}

// uninstall removes the operator, if the user says so.
func (r request) uninstall(ctx context.Context, in io.Reader, out, errs io.Writer) error {
	u := kubectl.Uninstallation{Kubectl: r.kubectl, Files: r.files}
	found, err := u.Find(ctx)
	if err != nil {
		return err
	}
	if !r.yes {
		fmt.Fprintf(out, "This removes all HostPathProvisioners and VolumeMoves, what the operator in the namespace %s has deployed, and then\n\n  %s\n\nClaims and data stay. Type yes to go on: ",
			r.kubectl.Namespace, joined(found.Removed, "\n  "))
		answer, err := bufio.NewReader(in).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if strings.TrimSpace(answer) != "yes" {
			return errors.New("nothing was removed")
		}
	}
	if err := u.Run(ctx, found, out, errs); err != nil {
		return err
	}
	if len(found.Left) > 0 {
		fmt.Fprintf(out, "Left, as it may have data, or data may go with it: %s\n", joined(found.Left, ", "))
	}
	return nil
}

func joined(objects []kubectl.Object, by string) string {
	names := make([]string, len(objects))
	for i, o := range objects {
		names[i] = o.String()
	}
	return strings.Join(names, by)
}
