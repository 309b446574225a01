package quota_test

import (
	"bufio"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/quota"
	"kubevirt.io/hostpath-provisioner/test/must"
	"kubevirt.io/hostpath-provisioner/test/testenv"
)

// claimantVariable makes this program one of the processes: it names the directory to work in.
const claimantVariable = "QUOTA_TEST_CLAIMANT"

// limitBytes is what each directory is limited to.
const limitBytes = 1 << 20

// TestClaimant is a process that limits new directories and prints their names and ids.
func TestClaimant(t *testing.T) {
	path, count, ok := strings.Cut(os.Getenv(claimantVariable), "*")
	if !ok {
		return // it is only a process of TestTwoProcessesNeverTakeOneID
	}
	directories, err := strconv.Atoi(count)
	must.Succeed(t, err)
	root := open(t, path)
	facility, err := quota.Detect(root)
	must.Succeed(t, err)
	own := make(map[quota.ID]bool)
	for range directories {
		name := rand.Text()
		d, err := facility.Make(root, name)
		must.Succeed(t, err)
		from := quota.FirstID
		for {
			id, err := facility.NewID(root, from, func(id quota.ID) bool { return own[id] })
			must.Succeed(t, err)
			err = facility.Limit(d, id, quota.Limit{Bytes: limitBytes})
			if errors.Is(err, quota.ErrTaken) {
				from = id + 1
				continue
			}
			must.Succeed(t, err)
			own[id] = true
			fmt.Println("claimed", name, id)
			break
		}
		must.Succeed(t, d.Close())
	}
}

// The driver and the provisioner, in two containers, can have their pools on one filesystem. They know nothing of each
// other's claims.
func TestTwoProcessesNeverTakeOneID(t *testing.T) {
	testenv.NeedRoot(t)
	self, err := os.Executable()
	must.Succeed(t, err)
	directories := 2000
	if testing.Short() {
		directories = 500
	}
	for kind, mounted := range mountedByTheMachine() {
		t.Run(kind, func(t *testing.T) {
			path := below(t, mounted)
			var both sync.WaitGroup
			var outputs [2][]byte
			var failures [2]error
			for i := range outputs {
				both.Go(func() {
					cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestClaimant$", "-test.count=1")
					cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s*%d", claimantVariable, path, directories))
					outputs[i], failures[i] = cmd.CombinedOutput()
				})
			}
			both.Wait()
			for i, err := range failures {
				if err != nil {
					t.Fatalf("%v: %s", err, outputs[i])
				}
			}
			wantOneEach(t, path, outputs[:], 2*directories)
		})
	}
}

// wantOneEach compares what the processes printed with what is on the disk.
func wantOneEach(t *testing.T, path string, outputs [][]byte, want int) {
	t.Helper()
	root := open(t, path)
	facility, err := quota.Detect(root)
	must.Succeed(t, err)
	owners := make(map[quota.ID]string)
	for _, output := range outputs {
		lines := bufio.NewScanner(strings.NewReader(string(output)))
		for lines.Scan() {
			var name string
			var id quota.ID
			if n, _ := fmt.Sscanf(lines.Text(), "claimed %s %d", &name, &id); n != 2 {
				continue
			}
			if owners[id] != "" {
				t.Errorf("project %d has the directories %s and %s", id, owners[id], name)
			}
			owners[id] = name
			d, err := root.Open(name)
			must.Succeed(t, err)
			carried, err := facility.IDOf(d)
			must.Succeed(t, err)
			must.Succeed(t, d.Close())
			usage, err := facility.Usage(root, id)
			must.Succeed(t, err)
			if carried != id || usage.Limit.Bytes != limitBytes || usage.Inodes != 1 {
				t.Errorf("%s carries %d, want %d; its project has %+v", name, carried, id, usage)
			}
		}
	}
	if len(owners) != want {
		t.Errorf("%d directories were limited, want %d", len(owners), want)
	}
}
