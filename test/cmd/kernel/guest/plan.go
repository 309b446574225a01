// Package guest is what happens inside the virtual machine: its first process,
// and what it and the host have to know of each other.
package guest

import (
	"path"
	"time"
)

// Where things are in the guest.
const (
	// Program is the first process, the tool itself.
	Program = "/init"
	// PlanFile holds the Plan as JSON.
	PlanFile = "/plan.json"
	// Policy is the binary SELinux policy, where libselinux expects it for a
	// policy that is called hostpath.
	Policy = "/etc/selinux/hostpath/policy/policy.33"
	// Out is the directory whose content goes to the host.
	Out = "/out"
	// XFS and Ext4 are where these filesystems are mounted.
	XFS  = "/mnt/xfs"
	Ext4 = "/mnt/ext4"
	// Work holds a working directory for each program.
	Work = "/work"
)

// The ports on which the guest talks to the host.
const (
	Stdout = "hostpath.stdout"
	Stderr = "hostpath.stderr"
	// Report carries Messages as JSON.
	Report = "hostpath.report"
	// Archive carries what is in Out as a tar archive.
	Archive = "hostpath.archive"
)

// Directory is the working directory of a program of that name.
func Directory(name string) string { return path.Join(Work, path.Base(name)) }

// A Plan is what the host asks of the guest.
type Plan struct {
	SELinux bool
	// Containers says that container runtimes will run.
	Containers bool
	// Archive says that the host wants to have what is in Out.
	Archive bool
	Runs    []Run
}

// A Run is a program to run, with its arguments and environment.
type Run struct {
	Args []string
	Env  []string
}

// A Message reports one event to the host.
type Message struct {
	// Result says how a run ended.
	Result *Result `json:",omitempty"`
	// Trouble says what went wrong in the guest itself.
	Trouble string `json:",omitempty"`
	// Done says that all runs have ended and the archive is complete.
	Done bool `json:",omitempty"`
}

// A Result is how a run of the plan ended: with the program's exit status, or
// 128 and the number of the signal that killed it.
type Result struct {
	Run      int
	Status   int
	Duration time.Duration
}
