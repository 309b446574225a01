// Package migrate turns PersistentVolumes of the provisioners from before CSI, and of rancher's local-path, into ones
// of the CSI driver, on the same directory. It runs on the node of the directories.
//
// A volume is migrated in steps (step.go), each of which can be repeated. What has been done is not kept: before each
// step it is read from the file with the old objects, from the cluster and from the disk. So a run that was ended
// anywhere is continued by the next one, forward or back.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"kubevirt.io/hostpath-provisioner/pkg/driver/client"
	"kubevirt.io/hostpath-provisioner/pkg/hostfs/dir"
	"kubevirt.io/hostpath-provisioner/pkg/pool/poolconfig"
	"kubevirt.io/hostpath-provisioner/pkg/volume"
)

// A Config is what a user says of one run.
type Config struct {
	// Node is the name of the Node object that this process runs on.
	Node string
	// Pools are those of the driver on this node, of which the names and paths count.
	Pools []poolconfig.Config
	// From are directories, besides the pool, whose children may be moved into the pool. Absolute and clean.
	From []string
	// Class is the StorageClass of the new objects, which says the pool.
	Class string
	// Directory has the files with the old objects.
	Directory string
	// HostRoot is where this process has the root directory of the node, in which paths of other pods and volumes are looked up.
	HostRoot string
	Chosen   Chosen
	// NoProvisioners are pods that may look like provisioners of the pool, and are none.
	NoProvisioners []types.NamespacedName
	// Apply has the steps done, and not only listed; Undo goes back to the old objects.
	Apply, Undo bool
	// Steps is how many steps are done for each claim in this run; 0 for all.
	Steps int
	// Timeout is how long is waited for the cluster in one step.
	Timeout time.Duration
}

func (c Config) want() form {
	if c.Undo {
		return plain
	}
	return csi
}

// Driver is the driver on this node.
type Driver interface {
	Name(ctx context.Context) (string, error)
	Directory(ctx context.Context, parameters map[string]string) (dir.ID, error)
	Volume(ctx context.Context, id volume.ID) (client.Volume, error)
}

type migration struct {
	Config
	client kubernetes.Interface
	driver Driver
	out    io.Writer
	files  savedFiles
	target target
	checks checker
}

// errStopped reports claims that could not be migrated; the output says which and why.
var errStopped = errors.New("not all of the chosen claims can be migrated")

// Run lists what is to be done for the chosen claims and what would stop it, and does it if Config.Apply is set.
func Run(ctx context.Context, config Config, client kubernetes.Interface, driver Driver, out io.Writer) error {
	host, err := dir.Open(config.HostRoot)
	if err != nil {
		return fmt.Errorf("--host-root: %w", err)
	}
	defer func() { _ = host.Close() }() // it is only read
	files, unlock, err := openFiles(config.Directory, config.Apply)
	if err != nil {
		return err
	}
	defer unlock()
	m := &migration{Config: config, client: client, driver: driver, out: out, files: files}
	if m.target, err = m.findTarget(ctx); err != nil {
		return err
	}
	m.checks = checker{Config: config, client: client, driver: driver, host: host, target: m.target}
	chosen, err := m.choose(ctx)
	if err != nil {
		return err
	}
	failed := 0
	for _, c := range chosen.here {
		if err := m.one(ctx, c); err != nil {
			failed++
			m.print("  stopped: %v\n", err)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	m.summarize(chosen, failed)
	// For an undo, a claim without a file is already as it should be.
	if failed > 0 || len(chosen.missing) > 0 && !m.Undo {
		return errStopped
	}
	return nil
}

func (m *migration) print(format string, args ...any) { fmt.Fprintf(m.out, format, args...) }

func (m *migration) one(ctx context.Context, s *saved) error {
	m.print("%s (PersistentVolume %s, %s)\n", s.claimName(), s.Volume.Name, s.From)
	var problems error
	if !s.onDisk {
		problems = m.checks.check(ctx, s)
	}
	now, err := m.observe(ctx, s)
	if err != nil {
		return errors.Join(problems, err)
	}
	if problems != nil {
		_, err := next(m.want(), now.seen)
		return errors.Join(problems, err)
	}
	if m.deletedSince(s, now) {
		m.print("  migrated, and deleted since; %s is not needed any more\n", s.file())
		return nil
	}
	if !m.Apply {
		steps, err := plan(m.want(), now.seen)
		for _, step := range steps {
			m.print("  %s\n", m.describe(step, s))
		}
		if len(steps) == 0 && err == nil {
			m.print("  nothing to do\n")
		}
		return err
	}
	return m.carryOut(ctx, s)
}

// pause is how long is waited before the cluster is asked again.
const pause = 500 * time.Millisecond

type progress struct {
	last  step // done, waited for, or to be done again because the object had changed
	since time.Time
	done  int // steps but those that wait
}

// at notes the step that is next, and reports whether that is still the last one.
func (p *progress) at(next step) (again bool) {
	if next == p.last {
		return true
	}
	if p.last != nothing && !p.last.waits() {
		p.done++
	}
	p.last, p.since = next, time.Now()
	return false
}

func (m *migration) carryOut(ctx context.Context, s *saved) error {
	for p := new(progress); ; {
		now, err := m.observe(ctx, s)
		if err != nil {
			return err
		}
		step, err := next(m.want(), now.seen)
		if err != nil || step == nothing {
			return err
		}
		again := p.at(step)
		if m.Steps > 0 && p.done == m.Steps {
			m.print("  stopped after --steps=%d; repeat the command to go on\n", m.Steps)
			return nil
		}
		if !again {
			m.print("  %s\n", m.describe(step, s))
		} else if time.Since(p.since) > m.Timeout {
			return fmt.Errorf("%s: not within %v (%s); repeat the command when it can go on", m.describe(step, s), m.Timeout, now.seen)
		}
		if err := m.perform(ctx, step, s, now); err != nil {
			return err
		}
		if !again && !step.waits() {
			continue
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}
