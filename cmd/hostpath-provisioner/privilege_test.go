package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/privilege"
	"kubevirt.io/hostpath-provisioner/pkg/pool"
	"kubevirt.io/hostpath-provisioner/pkg/pool/store"
	"kubevirt.io/hostpath-provisioner/pkg/provisioner"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// containerVariable makes this program one that serves a directory with fewer capabilities.
const containerVariable = "PROVISIONER_TEST_CONTAINER"

type container struct {
	Path, Options       string
	Capabilities, Later []privilege.Capability
}

// serveCommands serves a directory as the program does, but that commands come from standard input: "create", with the
// answer whether the size is enforced, "delete", and "move" as the migration does, each with a name.
func serveCommands(encoded string) error {
	var box container
	if err := json.Unmarshal([]byte(encoded), &box); err != nil {
		return err
	}
	if _, err := privilege.Keep(box.Capabilities, box.Later...); err != nil {
		return err
	}
	c, err := parse([]string{"--node-name=node-a", "--pv-dir=" + box.Path, "--pool-options=" + box.Options}, func(string) string { return "" }, io.Discard)
	if err != nil {
		return err
	}
	set, closePool, err := openPool(c, klog.Background())
	if err != nil {
		return err
	}
	ctx := context.Background()
	if err := set.Wait(ctx); err != nil {
		return err
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		command, name, _ := strings.Cut(lines.Text(), " ")
		if command == "move" {
			fmt.Println("moved:", move(box.Path, name))
			continue
		}
		fmt.Println(obey(ctx, set, command, name))
	}
	return closePool()
}

func move(path, name string) error {
	h := store.Handover{From: store.VolumePath{Directory: path, Name: name}, To: store.VolumePath{Directory: filepath.Join(path, provisioner.CSIDirectory), Name: name}}
	if err := h.Check(); err != nil {
		return err
	}
	return errors.Join(h.Move(), h.Record(0))
}

func obey(ctx context.Context, set *pool.Set, command, name string) string {
	if command == "delete" {
		if err := remove(ctx, set, name); err != nil {
			return err.Error()
		}
		return "deleted"
	}
	made, err := create(ctx, set, name)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("enforced: %t", made.Enforced)
}

// Users of volumes.
const user, otherUser = 1000, 1001

// contents are what users leave in a volume, by its name.
var contents = map[string]func(directory string) error{
	"closed": func(directory string) error {
		inside := filepath.Join(directory, "a", "b")
		return errors.Join(os.MkdirAll(inside, 0o700), os.Chown(inside, user, user), os.Chmod(inside, 0),
			os.Chown(filepath.Dir(inside), user, user), os.Chmod(filepath.Dir(inside), 0))
	},
	"immutable": func(directory string) error {
		file := filepath.Join(directory, "file")
		return errors.Join(os.WriteFile(file, nil, 0o600), exec.Command("chattr", "+i", file).Run())
	},
	"sticky": func(directory string) error {
		common := filepath.Join(directory, "tmp")
		file := filepath.Join(common, "file")
		return errors.Join(os.Mkdir(common, 0o777), os.WriteFile(file, nil, 0o600),
			os.Chown(file, otherUser, otherUser), os.Chown(common, user, user), os.Chmod(common, 0o777|os.ModeSticky))
	},
}

// The container has four capabilities. With all of them nothing fails, and without each of them something does.
func TestCapabilities_eachIsNeeded(t *testing.T) {
	if testenv.Guest() {
		t.Skip("make test has this")
	}
	root := testenv.CountingBtrfs(t, 512*mib)
	tests := map[string]struct {
		without privilege.Capability
		options string
		created string
		stays   string // what cannot be erased
	}{
		"with all":         {0, "{}", "enforced: true", ""},
		"no DAC_OVERRIDE":  {privilege.DACOverride, "{}", "enforced: true", "closed"},
		"no FOWNER":        {privilege.Fowner, "{}", "enforced: true", "sticky"},
		"no IMMUTABLE":     {privilege.LinuxImmutable, "{}", "enforced: true", "immutable"},
		"no SYS_ADMIN":     {privilege.SysAdmin, "{}", "pool unavailable", ""},
		"no limits wanted": {privilege.SysAdmin, `{"enforcement":"none"}`, "enforced: false", ""},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			path := filepath.Join(root, strings.ReplaceAll(title, " ", "-"))
			t.Cleanup(func() {
				must.Succeed(t, exec.Command("chattr", "-R", "-f", "-i", path).Run())
				must.Succeed(t, os.RemoveAll(path))
			})
			lacking := func(c privilege.Capability) bool { return c == tt.without }
			p := startBoxed(t, container{
				path, tt.options,
				slices.DeleteFunc(slices.Clone(privilege.Needed), lacking), slices.DeleteFunc(slices.Clone(privilege.ForErasing), lacking),
			})
			for name, fill := range contents {
				answer := p.ask("create " + name)
				if !strings.Contains(answer, tt.created) {
					t.Errorf("create %s: %s, want %s", name, answer, tt.created)
				}
				if !strings.HasPrefix(answer, "enforced: ") {
					continue
				}
				must.Succeed(t, fill(filepath.Join(path, name)))
				if answer := p.ask("delete " + name); answer != "deleted" {
					t.Errorf("delete %s: %s", name, answer)
				}
				if erased := p.erases(name); erased == (name == tt.stays) {
					t.Errorf("%s is erased: %t\n%s", name, erased, p.log())
				}
			}
		})
	}
}

// A boxed is this program with fewer capabilities.
type boxed struct {
	*testing.T
	path    string
	input   io.Writer
	answers *bufio.Scanner
	errors  *os.File
}

func startBoxed(t *testing.T, box container) *boxed {
	t.Helper()
	encoded, err := json.Marshal(box)
	must.Succeed(t, err)
	self, err := os.Executable()
	must.Succeed(t, err)
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), self) // it ends with its input
	cmd.Env = append(os.Environ(), containerVariable+"="+string(encoded))
	input, err := cmd.StdinPipe()
	must.Succeed(t, err)
	output, err := cmd.StdoutPipe()
	must.Succeed(t, err)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	must.Succeed(t, err)
	cmd.Stderr = log
	must.Succeed(t, cmd.Start())
	p := &boxed{T: t, path: box.Path, input: input, answers: bufio.NewScanner(output), errors: log}
	t.Cleanup(func() {
		must.Succeed(t, input.Close())
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v\n%s", err, p.log())
		}
		must.Succeed(t, log.Close())
	})
	return p
}

func (p *boxed) ask(command string) string {
	p.Helper()
	fmt.Fprintln(p.input, command)
	if !p.answers.Scan() {
		p.Fatalf("no answer to %q\n%s", command, p.log())
	}
	return p.answers.Text()
}

func (p *boxed) log() string {
	p.Helper()
	text, err := os.ReadFile(p.errors.Name())
	must.Succeed(p.T, err)
	return string(text)
}

// erases waits until a volume is erased, or the log says that it cannot be.
func (p *boxed) erases(name string) bool {
	p.Helper()
	failed := func(line string) bool {
		return strings.Contains(line, "Failed to erase trash") && strings.Contains(line, name)
	}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		left, err := filepath.Glob(filepath.Join(p.path, ".hostpath-provisioner/trash/node-a", name+".*"))
		must.Succeed(p.T, err)
		if len(left) == 0 {
			return true
		}
		if slices.ContainsFunc(strings.Split(p.log(), "\n"), failed) {
			return false
		}
	}
	p.Fatalf("%s is neither erased nor said to fail\n%s", name, p.log())
	return false
}

// Not to label, nor to erase: the container of the migration has one capability.
func TestMigration_needsOneCapability(t *testing.T) {
	if testenv.Guest() {
		t.Skip("make test has this")
	}
	testenv.NeedRoot(t)
	for _, capabilities := range [][]privilege.Capability{{privilege.DACOverride}, nil} {
		path := t.TempDir()
		serve(t, filepath.Join(path, provisioner.CSIDirectory))
		p := startBoxed(t, container{path, "{}", capabilities, nil})
		p.ask("create pvc-1")
		directory := filepath.Join(path, "pvc-1")
		must.Succeed(t, errors.Join(os.Chown(directory, user, user), os.Chmod(directory, 0)))
		// To move a directory to another parent changes it, too.
		if answer := p.ask("move pvc-1"); (answer == "moved: <nil>") != (len(capabilities) == 1) {
			t.Errorf("with %v %s", capabilities, answer)
		}
	}
}
