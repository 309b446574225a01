// Package cmdline is what the command lines of the programs have in common: every problem is reported, not only the
// first.
package cmdline

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
)

// ParseAll parses flags like flags.Parse and goes on after a bad one, so that all of them are reported. Arguments that
// are not flags are problems too. It returns flag.ErrHelp after printing the flags to their output.
func ParseAll(flags *flag.FlagSet, args []string) error {
	output := flags.Output()
	flags.SetOutput(io.Discard)
	defer flags.SetOutput(output)
	var problems []error
	for {
		err := flags.Parse(args)
		if errors.Is(err, flag.ErrHelp) {
			flags.SetOutput(output)
			flags.PrintDefaults()
			return err
		}
		if err != nil {
			problems = append(problems, err)
		} else if flags.NArg() > 0 {
			problems = append(problems, fmt.Errorf("unexpected argument %q", flags.Arg(0)))
		}
		rest := flags.Args()
		if err == nil && len(rest) > 0 {
			rest = rest[1:]
		}
		if len(rest) == 0 {
			return errors.Join(problems...)
		}
		args = rest
	}
}

// CheckAddress finds what net.Listen would, without listening. An empty address is good: it stands for none.
func CheckAddress(address string) error {
	if address == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(address)
	switch {
	case err == nil && port == "":
		err = errors.New("missing port")
	case err == nil:
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%q is not an address such as :8443: %v", address, err)
	}
	return nil
}
